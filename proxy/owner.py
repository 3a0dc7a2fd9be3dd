"""`server.workers` > 1: the process that owns what must be exact, and N others that serve (docs/workers.md).

Rules
1. The owner has the listening sockets, admission, the fleet, limits, health, the admin listener. It accepts a connection and
   hands it to the worker with the fewest; of what goes through that it sees nothing.
2. A worker that ends, however, loses its streams and nothing else: what it was given is given back (`seat`), and another is
   started, at once if it had lived for a while.
3. The configuration travels as it was read: every process has the same, whatever has become of the file.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from random import Random

from proxy.adminapi import Exposition
from proxy.app import END_SECONDS, App
from proxy.channel import Kind, frame, pack
from proxy.clock import Clock
from proxy.config import Config
from proxy.listen import Listeners
from proxy.merge import Page, keep, merge, read, write
from proxy.messages import Plain
from proxy.metrics import Counter
from proxy.owners import Owners
from proxy.remote import mirrored
from proxy.seat import Seat, Shared, newest

log = logging.getLogger("tierline.workers")

START_SECONDS = 60.0
"""A worker has so long until it serves."""
SCRAPE_SECONDS = 1.0
LIVED_SECONDS = 10.0
"""Who ended sooner is not started again at once, but after a while that doubles."""
FIRST_PAUSE, MOST_PAUSE = 0.2, 10.0
AT_ONCE = 64
"""Connections that are accepted before other work goes on."""
CHILD = "import sys; sys.path[:] = {path!r}; from proxy.worker import main; main({channel}, {connections}, {lock})"


class Child:
    """A worker's process and its seat. connections: where it gets them."""

    def __init__(self, process: subprocess.Popen[bytes], seat: Seat, connections: socket.socket) -> None:
        self.process, self.seat, self.connections = process, seat, connections


class OwnerApp(App):
    """The gateway without its requests."""

    def __init__(self, config: Config, clock: Clock | None = None, rng: Random | None = None) -> None:
        super().__init__(config, clock, rng)
        self.farewell.dropped = partial(self._all, Kind.DROPPED)
        self._children: dict[int, Child] = {}
        self._sockets: list[socket.socket] = []
        self._stopping = False
        self._restarts = self._missed = self._short = 0
        self._gone: Page = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._told: bytes | None = None
        self._syncing = False
        self._lock = os.memfd_create("tierline-records")
        self._shared = Shared(
            config,
            self.clock,
            self.gate,
            self.pool,
            self.ledger,
            self.gateway.memory,
            self._learnt,
            self.gathered,
        )
        self.pool.changed = self._changed
        self.pool.streams = lambda name: newest(self._seats, name)
        self.pool.give_up = lambda name, since: self._all(Kind.GIVE_UP, name, since)
        self.pool.opened = lambda name: sum(seat.opened(name) for seat in self._seats)

    @property
    def _seats(self) -> list[Seat]:
        return [child.seat for child in self._children.values()]

    def _all(self, *message: object) -> None:
        for seat in self._seats:
            seat.say(*message)

    # -- start and end

    async def _open(self, listeners: Listeners) -> None:
        at = self.config.server
        self._sockets = await listeners.listen("data", at.host, at.port, at.backlog)
        self.port = self._sockets[0].getsockname()[1]

    def _ask_abilities(self, config: Config) -> None:
        """Workers do."""

    async def start(self, listeners: Listeners | None = None) -> None:
        """Every worker serves. Raises ChildProcessError when one does not come to."""
        await super().start(listeners)
        for index in range(self.config.server.workers):
            await self._spawn(index)
        try:
            async with self.clock.timeout_at(self.clock.now() + START_SECONDS):
                for child in tuple(self._children.values()):
                    await child.seat.started.wait()
        except TimeoutError:
            log.error("a worker does not come to serve within %g s", START_SECONDS)
        if len(self._children) < self.config.server.workers or not all(seat.ready for seat in self._seats):
            await self.close()
            raise ChildProcessError("a worker ended before it served: see what it said")
        self._accept_on()

    async def drain(self, *, replaced: bool = False) -> None:
        self._stopping = True
        self._accept_off()
        for sock in self._sockets:
            sock.close()
        if replaced:
            for site in self._sites.get("admin", ()):
                await site.stop()
        self._all(Kind.DRAIN, replaced)
        seconds = self.config.server.drain_timeout + 2 * END_SECONDS + 2.0
        await self._until_gone(seconds)

    async def close(self) -> None:
        self._stopping = True
        self._accept_off()
        for child in tuple(self._children.values()):
            child.seat.channel.close()  # they take that for the owner's end
        await self._until_gone(END_SECONDS)
        for sock in self._sockets:
            sock.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        await super().close()

    async def _until_gone(self, seconds: float) -> None:
        """Until no worker runs; what still does after so long is killed."""
        over = self.clock.now() + seconds
        for child in tuple(self._children.values()):
            try:
                async with self.clock.timeout_at(over):
                    await asyncio.shield(asyncio.to_thread(child.process.wait))
            except TimeoutError:
                log.error("worker %d does not end: killed", child.process.pid)
                child.process.kill()
                await asyncio.to_thread(child.process.wait)
            child.connections.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._children.clear()

    def configure(self, config: Config) -> None:
        super().configure(config)
        self._shared.configure(config)
        self._all(Kind.CONFIG, pack(config))
        self._told = None
        self._mirror()

    # -- workers

    async def _spawn(self, index: int) -> None:
        began = self.clock.now()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        way, their_way = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        seat = Seat(self._shared, lambda: self._lost(index, began))
        process = _start(theirs.fileno(), their_way.fileno(), self._lock)
        theirs.close()
        their_way.close()
        way.setblocking(False)
        first = frame([(Kind.CONFIG, pack(self.config), self.config.server.workers)])
        await asyncio.to_thread(ours.sendall, first)
        ours.setblocking(False)
        self._children[index] = Child(process, seat, way)
        await asyncio.get_running_loop().create_unix_connection(lambda: seat.channel, sock=ours)
        seat.say(Kind.STATES, pack(mirrored(self.pool)))
        log.info("worker %d is process %d", index, process.pid)

    def _lost(self, index: int, began: float) -> None:
        """A worker's channel has ended, and everything it held is given back."""
        child = self._children.get(index)
        if child is None:
            return
        keep(self._gone, child.seat.page)
        child.seat.page = {}
        if self._stopping:
            return
        del self._children[index]
        task = asyncio.get_running_loop().create_task(self._restart(index, child, began))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _restart(self, index: int, child: Child, began: float) -> None:
        child.process.kill()  # a process without its channel is of no use
        code = await asyncio.to_thread(child.process.wait)
        child.connections.close()
        lived = self.clock.now() - began
        if not child.seat.left:
            log.error("worker %d (process %d) ended after %.1f s, exit code %d: another is started",
                      index, child.process.pid, lived, code)  # fmt: skip
        if lived < LIVED_SECONDS:
            self._short += 1
            await self.clock.sleep(min(MOST_PAUSE, FIRST_PAUSE * 2 ** min(self._short, 10)))
        else:
            self._short = 0
        while True:
            try:
                await self._spawn(index)
                break
            except OSError as error:
                log.error("worker %d cannot be started: %s", index, error)
                await self.clock.sleep(MOST_PAUSE)
        self._restarts += 1
        new = self._children.get(index)
        try:
            async with self.clock.timeout_at(self.clock.now() + START_SECONDS):
                if new is not None:
                    await new.seat.started.wait()
        except TimeoutError:
            log.error("worker %d does not come to serve within %g s: killed", index, START_SECONDS)
            if new is not None:
                new.process.kill()  # its channel ends, and it is started again

    # -- connections

    def _accept_on(self) -> None:
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            loop.add_reader(sock.fileno(), self._accept, sock)

    def _accept_off(self) -> None:
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            if sock.fileno() >= 0:
                loop.remove_reader(sock.fileno())

    def _accept(self, sock: socket.socket) -> None:
        for _ in range(AT_ONCE):
            children = sorted(
                [child for child in self._children.values() if child.seat.ready],
                key=lambda child: child.seat.connections,
            )
            try:
                if not children:
                    raise OSError("no worker takes connections")
                connection, _address = sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # out of descriptors, or no worker: clients wait in the backlog
                log.warning("connections wait: %s", error)
                self._accept_off()
                self.clock.call_at(self.clock.now() + 0.2, self._accept_again)
                return
            with connection:
                for child in children:
                    try:
                        socket.send_fds(child.connections, [b"c"], [connection.fileno()])
                    except OSError:  # it does not take them from us now
                        continue
                    child.seat.connections += 1
                    break

    def _accept_again(self) -> None:
        if not self._stopping:
            self._accept_on()

    # -- what all of them know

    def _changed(self) -> None:
        """Something of a backend is not what it was."""
        self.gate.pump()
        if not self._syncing:
            self._syncing = True
            asyncio.get_running_loop().call_soon(self._mirror)

    def _mirror(self) -> None:
        self._syncing = False
        states = pack(mirrored(self.pool))
        if states != self._told:
            self._told = states
            self._all(Kind.STATES, states)

    def _learnt(self, who: Seat, what: Plain) -> None:
        Owners.learn(self.gateway.owners, *what)
        for seat in self._seats:
            if seat is not who:
                seat.say(Kind.LEARNT, *what)

    # -- metrics

    def exposition(self) -> Exposition:
        return Gathered(self.gathered)

    async def gathered(self, accept: str = "") -> tuple[bytes, str]:
        """Of all processes. Who does not say it in time is shown as it last was."""
        seats = [seat for seat in self._seats if seat.ready]
        asked = [asyncio.ensure_future(seat.scrape(accept)) for seat in seats]
        if asked:
            try:
                async with self.clock.timeout_at(self.clock.now() + SCRAPE_SECONDS):
                    await asyncio.wait(asked)
            except TimeoutError:
                pass
            self._missed += sum(not one.done() for one in asked)
            for one in asked:
                one.cancel()
        text, content_type = self.metrics.render(accept)
        pages = [seat.page for seat in self._seats]
        merged = merge(read(text.decode()), [self._gone, *pages])
        return write(merged, exemplars=content_type.startswith("application/openmetrics")), content_type

    def _counters(self) -> Iterator[Counter]:
        yield from super()._counters()
        yield from worker_counters(self._restarts, self._missed)


def worker_counters(restarts: int, missed: int) -> Iterator[Counter]:
    text = "Worker processes that were started in place of one that ended."
    yield "tierline_worker_restarts", text, (), [((), restarts)]
    text = "Times that a worker did not say its metrics in time, and was shown as it last was."
    yield "tierline_worker_scrapes_missed", text, (), [((), missed)]


class Gathered:
    """For the admin listener."""

    def __init__(self, render: Callable[[str], Awaitable[tuple[bytes, str]]]) -> None:
        self._render = render

    def render(self, accept: str = "") -> Awaitable[tuple[bytes, str]]:
        return self._render(accept)


def _start(channel: int, connections: int, lock: int) -> subprocess.Popen[bytes]:
    """A fresh interpreter like ours."""
    code = CHILD.format(path=sys.path, channel=channel, connections=connections, lock=lock)
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return subprocess.Popen([sys.executable, *flags, "-c", code], pass_fds=(channel, connections, lock))
