"""The demo's processes, from start to end: `python -m tests.demo [--real]`, or `make demo`, `make demo-real`.

Exit status: 0 after Ctrl-C, SIGTERM or `--exit`; 1 with the reason when it cannot run.
No child is left behind, whatever the end (tests/real/child.py).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tests.demo.fleet import Fleet
from tests.demo.llama import llama_fleet
from tests.demo.picture import picture
from tests.demo.study import study_fleet
from tests.demo.table import LEGEND, PLAIN_WIDTH, Rows, Tail
from tests.demo.traffic import Traffic
from tests.ports import free_port
from tests.real.child import POLL, Child, Deadline
from tests.real.server import Unavailable, cache_folder

READY = 20.0  # seconds that the gateway has to see both backends
LOOK = 0.1  # seconds between looks at the records
SHOWN = 5  # errors in words; the rows show them all
LAST_RECORDS = 3.0  # seconds that the records may come behind the answers


class Failure(Exception):
    """The demo cannot go on; the message says why."""


async def demo(fleet: Fleet, options: argparse.Namespace, console: Console) -> None:
    async with AsyncExitStack() as stack:
        if taken(options.port):
            raise Failure(
                f"port {options.port} on 127.0.0.1 is taken: stop what listens there, or choose another, "
                f"as in: make {fleet.command} DEMO_PORT=8090"
            )
        if not options.svg:
            console.print(f"starting {fleet.starting} and the gateway …", style="dim")
        for server in fleet.servers.values():
            await stack.enter_async_context(server)
        folder = folder_of(fleet, options.port, stack)
        records = folder / "records.jsonl"
        for old in (records, *folder.glob("records.db*")):
            old.unlink(missing_ok=True)
        port = options.port or free_port()
        admin_port = free_port() if taken(port + 1) else port + 1
        config = folder / "config.toml"
        config.write_text(fleet.config(port, admin_port, records))
        url = f"http://127.0.0.1:{port}"
        gateway = await stack.enter_async_context(running_gateway(config, folder / "gateway.log", url))
        clients = fleet.traffic(url)
        stack.push_async_callback(clients.close)
        rows = Rows(console, clients.jobs)
        tail = Tail(records)
        for line in fleet.about:
            console.print(line, style="dim", soft_wrap=True)
        if not options.svg:
            where = from_here(folder)
            console.print(f"serving on {url}; config and records in {where}", style="dim", soft_wrap=True)
        console.print()
        rows.header()
        await show_traffic(options.seconds, clients, rows, tail, gateway)
        results(console, rows, clients)
        if options.svg:
            options.svg.write_text(picture(console, f"make {fleet.command}"), "utf-8")
        if not options.exit:
            things_to_try(console, clients.model, url, admin_port)
        while not options.exit:
            show(rows, tail, gateway)
            await asyncio.sleep(LOOK)


def folder_of(fleet: Fleet, port: int, stack: AsyncExitStack) -> Path:
    """For config, records and log: one that stays. With any port there may be other demos: then one for this run."""
    if not port:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tierline-demo-")))
    folder = cache_folder() / fleet.command
    folder.mkdir(exist_ok=True)
    return folder


async def show_traffic(seconds: float, clients: Traffic, rows: Rows, tail: Tail, gateway: Child) -> None:
    """Rows while there is traffic, and a line below them on a terminal."""
    console = rows.console
    loop = asyncio.get_running_loop()
    start = loop.time()
    status_line = console.is_terminal and not console.record  # a record would keep each of its states
    live = Live(console=console, transient=True, refresh_per_second=8) if status_line else None
    work = loop.create_task(clients.run(seconds))
    try:
        with live or contextlib.nullcontext():
            while not work.done():
                show(rows, tail, gateway)
                if live is not None:
                    passed = min(seconds, loop.time() - start)
                    status = f"{passed:.0f} of {seconds:.0f} s · {clients.in_flight} in flight"
                    live.update(Text(f"{status} · {len(rows.records)} done", style="dim"))
                await asyncio.sleep(LOOK)
            await work
            deadline = Deadline(LAST_RECORDS)
            while len(rows.records) < len(clients.jobs) and not deadline.over:
                show(rows, tail, gateway)
                await asyncio.sleep(LOOK)
    finally:
        work.cancel()
    if not rows.records:
        raise Failure(f"the gateway wrote no records; its log:\n{gateway.tail()}")


def show(rows: Rows, tail: Tail, gateway: Child) -> None:
    """Print what is new; Failure when the gateway is gone."""
    for record in tail.new():
        rows.add(record)
    if not gateway.running:
        raise Failure(f"the gateway ended with status {gateway.process.returncode}:\n{gateway.tail()}")


def results(console: Console, rows: Rows, clients: Traffic) -> None:
    """Below the rows: what they mean, a line a backend, and what should not have been."""
    console.print()
    console.print(LEGEND, style="dim")
    console.print()
    console.print(rows.summary())
    for broken in clients.broken[:SHOWN]:
        console.print(f"went wrong: {broken}", style="red", soft_wrap=True)
    if rows.surprises:
        console.print(f"did not end as they should: {rows.surprises} of {len(rows.records)}", style="red")


def things_to_try(console: Console, model: str, url: str, admin_port: int) -> None:
    asked = (
        f'{{"model": "{model}", "stream": true, "max_tokens": 40, '
        '"messages": [{"role": "user", "content": "Hi"}]}'
    )
    console.print("\nStill serving; Ctrl-C ends it. Four things to try:", style="bold")
    for line in (
        f"open http://127.0.0.1:{admin_port}/ui   # the live page",
        f"curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d '{asked}'",
        f"curl -s {url}/metrics | grep tierline_time",
        f"curl -s http://127.0.0.1:{admin_port}/admin/backends",
    ):
        console.print(f"  {line}", soft_wrap=True, markup=False, highlight=False)
    console.print()


def from_here(path: Path) -> Path:
    """The path as one would type it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


# -- the gateway ---------------------------------------------------------------------------------------------


@asynccontextmanager
async def running_gateway(config: Path, log: Path, url: str) -> AsyncIterator[Child]:
    """`tierline serve` on that config, from ready to stopped."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    gateway = Child([sys.executable, "-m", "proxy", "serve", "--config", config], log, environment)
    try:
        deadline = Deadline(READY)
        while not await asyncio.to_thread(answers, f"{url}/ready"):
            if not gateway.running:
                raise Failure(f"the gateway did not start:\n{gateway.tail()}")
            if deadline.over:
                raise Failure(f"the gateway was not ready after {READY:g} s:\n{gateway.tail()}")
            await asyncio.sleep(POLL)
        yield gateway
    finally:
        gateway.stop()


def answers(url: str) -> bool:
    """Whether a GET is answered with success."""
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except OSError:
        return False


def taken(port: int) -> bool:
    """Whether somebody listens there already; port 0 never is."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
        return False


# -- from here it starts -------------------------------------------------------------------------------------


async def until_stopped(fleet: Fleet, options: argparse.Namespace, console: Console) -> None:
    """The demo, ended by SIGINT, SIGTERM or SIGHUP as if it had come to its end."""
    loop = asyncio.get_running_loop()
    work = loop.create_task(demo(fleet, options, console))
    for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if sign is not signal.SIGHUP or signal.getsignal(sign) is not signal.SIG_IGN:  # nohup stays nohup
            loop.add_signal_handler(sign, work.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await work


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.demo",
        description="Two simulated vLLM servers, the gateway, and mixed traffic, shown live.",
    )
    parser.add_argument("--real", action="store_true", help="two real llama-servers instead")
    parser.add_argument("--time-scale", type=float, metavar="N", help="simulated time runs N times as fast")
    default_port = int(os.environ.get("DEMO_PORT") or 8080)
    parser.add_argument("--port", type=int, default=default_port, help="of the gateway; 0: any that is free")
    parser.add_argument("--seconds", type=float, default=30.0, help="of traffic (default 30)")
    parser.add_argument("--exit", action="store_true", help="end after the traffic, do not keep serving")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also save what was shown as a picture")
    options = parser.parse_args()
    if options.real and options.time_scale is not None:
        parser.error("--time-scale: a real server takes the time that it takes")
    if options.time_scale is not None and not options.time_scale > 0:
        parser.error("--time-scale: a number above 0")
    fleet = llama_fleet() if options.real else study_fleet(options.time_scale or 1.0)
    console = Console(highlight=False)
    if options.svg:
        console = Console(highlight=False, width=PLAIN_WIDTH, force_terminal=True, record=True)
    elif not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)
    try:
        asyncio.run(until_stopped(fleet, options, console))
    except (Failure, Unavailable) as reason:
        print(f"demo: {reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
