"""The load of `tests.limits` on gateways as users run them, in real time: several workers, or several gateways that share.

    python -m tests.limits --workers 2 --seconds 20
    python -m tests.limits --gateways 2           # needs a valkey-server or redis-server

What was let in is read from their records, and must fit at every moment into what the limits had given out until then; the
backend counts how many of a key's requests it has at once (here nobody leaves: it would hear of that later).
That nobody was refused who fitted: as many came in as may, but for what the whole seconds of `Retry-After` leave lying.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

from aiohttp import web

from proxy.clock import LoopClock
from tests.agreement import client_session
from tests.limits import KEYS, LIMITS, Backend, client, config, models
from tests.ports import free_port
from tests.valkey import ValkeyServer

ROOT = Path(__file__).parent.parent
SLACK_SECONDS = 0.25
"""How much later or earlier than its record says a request may have come in."""
LYING_SECONDS = 3.0
"""Of a minute's allowance, may be left over at the end."""
READY_SECONDS = 60.0


async def run(*, clients: int, seconds: float, workers: int, gateways: int) -> tuple[list[str], list[str]]:
    """(what was seen, what should not be)."""
    clock = LoopClock()
    backend, seen = Backend(clock), Counter[str]()
    site = web.Application()
    site.router.add_post("/v1/chat/completions", backend.answer)
    site.router.add_get("/v1/models", models)
    runner = web.AppRunner(site, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tierline-limits-")))
        text = config(f"http://127.0.0.1:{runner.addresses[0][1]}")
        if gateways > 1:
            server = ValkeyServer(folder)
            server.start()
            stack.callback(server.stop)
            text += f'[limits.shared]\nurl = "{server.url}"\non_failure = "closed"\ntimeout = 10\n'
        ports = [free_port() for _ in range(gateways)]
        started = [_start(folder, number, text, port, workers) for number, port in enumerate(ports)]
        stack.callback(_stop_all, started)
        async with client_session() as session:
            await asyncio.gather(*(_ready(session, clock, port) for port in ports))
            until = clock.now() + seconds
            urls = [f"http://127.0.0.1:{port}/v1/chat/completions" for port in ports]
            places = range(clients)
            # Each key's clients at each gateway.
            await asyncio.gather(
                *(
                    client(n, clock, session, urls[n // len(KEYS) % gateways], until, seen, 0.0)
                    for n in places
                )
            )
        await asyncio.to_thread(_stop_all, started)  # with their last records written
        records = await asyncio.to_thread(_records, folder)
    await runner.cleanup()
    return judge(records, backend.most, seen)


def _start(folder: Path, number: int, text: str, port: int, workers: int) -> subprocess.Popen[bytes]:
    text = text.replace("port = 0", f"port = {port}" + (f"\nworkers = {workers}" if workers > 1 else ""))
    text = text.replace('records = "off"', f'records = "file:{folder}/{number}.jsonl"\nlog_level = "warning"')
    path = folder / f"{number}.toml"
    path.write_text(text)
    env = {f"K_{key}": f"sk-{key}" for key in KEYS} | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-m", "proxy", "serve", "--config", str(path)], env=env)


def _records(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]


def _stop_all(started: list[subprocess.Popen[bytes]]) -> None:
    for process in started:
        process.terminate()
    for process in started:
        process.wait(60.0)


async def _ready(session: object, clock: LoopClock, port: int) -> None:
    until = clock.now() + READY_SECONDS
    while clock.now() < until:
        try:
            async with session.get(f"http://127.0.0.1:{port}/ready") as response:  # type: ignore[attr-defined]
                if response.status == 200:
                    return
        except OSError:
            pass
        await clock.sleep(0.1)
    raise TimeoutError(f"no gateway on port {port}")


Entry = tuple[float, float, int, int]
"""When it came, when it ended, what was reserved, what was charged."""


def judge(
    records: list[dict[str, object]], most: Counter[str], seen: Counter[str]
) -> tuple[list[str], list[str]]:
    said, wrong = [], []
    for name, limits in LIMITS.items():
        scope, _, whose = name.partition(":")
        mine = [r for r in records if scope == "model" or r[scope] == whose]
        came = sorted(
            _entry(r) for r in mine if r["reserved_tokens"] is not None and r["outcome"] != "limited"
        )
        wrong += [f"{name}: {problem}" for problem in beyond(came, limits)]
        if scope == "key":
            said.append(f"{whose}: {len(came)} let in, at most {most[whose]} at once; limits {limits}")
            at_once = limits.get("concurrent_requests")
            # Whom other limits hold up, too, need not come so far.
            short = len(limits) == 1 and most[whose] < (at_once or 0)
            if at_once is not None and (short or most[whose] > at_once):
                wrong.append(f"{name}: {most[whose]} at once, and {at_once} may")
    wrong += [f"{word}: {count}" for word, count in seen.items() if word in ("failed", "not told")]
    return said, wrong


def _entry(record: dict[str, object]) -> Entry:
    begin = datetime.fromisoformat(str(record["time"])).timestamp()
    end = begin + float(str(record["e2e_seconds"]))
    return begin, end, int(str(record["reserved_tokens"])), int(str(record["charged_tokens"] or 0))


def beyond(came: list[Entry], limits: dict[str, int]) -> list[str]:
    """Moments at which more had come in than had been given out. A bucket is full at the beginning, and gives its limit a
    minute from then on; what ended has paid what it was charged, what runs what was reserved."""
    out = []
    requests, tokens = limits.get("requests_per_minute"), limits.get("tokens_per_minute")
    for count, (at, *_) in enumerate(came, 1):
        minutes = (at - came[0][0] + SLACK_SECONDS) / 60
        if requests is not None and count > requests * (1 + minutes):
            out.append(f"{count} requests in {minutes * 60:.1f} s")
        if tokens is not None:
            paid = sum(
                charged
                if end < at - SLACK_SECONDS
                else min(reserved, charged)
                if end < at + SLACK_SECONDS
                else reserved
                for _, end, reserved, charged in came[:count]
            )
            if paid > tokens * (1 + minutes):
                out.append(f"{paid} tokens in {minutes * 60:.1f} s")
    if requests is not None and len(limits) == 1:
        least = requests * (1 + (came[-1][0] - came[0][0] - LYING_SECONDS) / 60)
        if len(came) < int(least):
            out.append(f"only {len(came)} requests, and {least:.1f} would have fitted")
    return out
