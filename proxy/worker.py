"""A worker process: the gateway's requests, with what must be exact asked of the owner (`owner`, `remote`).

Rules
1. It has no listening socket: connections come from the owner. It ends when the owner says so, when it is told to (SIGTERM),
   or when the owner is gone; what runs may finish within `drain_timeout`. It never outlives that: an alarm sees to it.
2. Its configuration comes through the channel, at its start and at every change.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from functools import partial

from proxy.app import END_SECONDS, App, Parts
from proxy.channel import Kind, receive, unpack
from proxy.clock import LoopClock, Timer
from proxy.config import Config
from proxy.logs import set_up_logging
from proxy.owners import Owners
from proxy.recorder import locked
from proxy.remote import Link, MirrorPool, NoMemory, RemoteGate, RemoteLedger, SharedOwners
from proxy.serve import loop_factory, settle
from proxy.toolcheck import warm

log = logging.getLogger("tierline.workers")

REPORT_SECONDS = 0.5


class WorkerApp(App):
    """One of `share` processes that serve."""

    def __init__(self, config: Config, share: int, way: socket.socket, lock: int) -> None:
        self._share, self._way = share, way
        self.stop = asyncio.Event()
        self.replaced = False
        clock = LoopClock()
        link = self.link = Link(clock, self._orphaned)
        super().__init__(
            config,
            clock,
            parts=Parts(
                pool=MirrorPool,
                gate=lambda *_: RemoteGate(link),
                ledger=partial(RemoteLedger, link),
                owners=lambda: SharedOwners(link),
                memory=NoMemory,
                shares_limits=False,
                writes=lambda write: None if write is None else locked(write, lock),
            ),
        )
        assert isinstance(self.pool, MirrorPool)
        self.pool.link = link
        link.handlers |= {
            Kind.CONFIG: self._configured,
            Kind.STATES: self.pool.mirror,
            Kind.GIVE_UP: self.gateway.give_up,
            Kind.LEARNT: partial(Owners.learn, self.gateway.owners),
            Kind.DRAIN: self._told_to_stop,
            Kind.SCRAPE: self._scraped,
            Kind.DROPPED: self._dropped,
        }
        self._reporting: Timer | None = None
        self._greeted: set[asyncio.Task[object]] = set()
        self._page = (b"", "text/plain")
        self.gateway.gather = self._gather

    async def run(self, channel: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for sign in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
            signal.signal(sign, signal.SIG_IGN)  # the owner's: a terminal sends Ctrl-C to all
        loop.add_signal_handler(signal.SIGTERM, self._leave)
        await loop.create_unix_connection(lambda: self.link.channel, sock=channel)
        entry = self.entry()
        await entry.setup()
        self._runners.append(entry)
        self._make = entry.server
        assert self._server is not None
        self._server.on_closed = lambda: self.link.say(Kind.CLOSED)
        self.keys.start()
        self._beside(self.config)
        await asyncio.to_thread(warm)
        settle()
        loop.add_reader(self._way.fileno(), self._accept)
        self._report()
        self.link.say(Kind.READY)
        await self.stop.wait()
        await self.drain(replaced=self.replaced)
        await self.close()

    def _most(self, config: Config) -> int:
        return -(-config.server.max_connections // self._share)

    def _watch_file(self, config: Config) -> None:
        """The owner does."""

    def _send_off(self) -> None:
        """The owner says when nobody runs there any more (DROPPED)."""

    def _dropped(self, name: str) -> None:
        if name in self.pool.leaving:
            task = asyncio.ensure_future(self.pool.drop(name))
            self._greeted.add(task)
            task.add_done_callback(self._greeted.discard)

    # -- connections

    def _accept(self) -> None:
        """What the owner accepted."""
        while True:
            try:
                _, descriptors, _, _ = socket.recv_fds(self._way, 1, 1)
            except BlockingIOError:
                return
            except OSError:
                descriptors = []
            if not descriptors:  # the owner is gone: its channel says so, too
                asyncio.get_running_loop().remove_reader(self._way.fileno())
                return
            for fd in descriptors:
                task = asyncio.ensure_future(self._greet(socket.socket(fileno=fd)))
                self._greeted.add(task)
                task.add_done_callback(self._greeted.discard)

    async def _greet(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._make, sock)
        except OSError:
            sock.close()

    # -- what the owner says

    def _configured(self, packed: bytes) -> None:
        try:
            self.configure(unpack(packed))
        except Exception:
            log.exception("the new configuration cannot be put in force here: another worker comes")
            self._leave()

    def _told_to_stop(self, replaced: bool) -> None:
        self._accept()  # what it sent before
        self.replaced = replaced
        self.stop.set()

    def _leave(self) -> None:
        """Told to end by somebody else: others serve on."""
        self.link.say(Kind.LEAVING)
        self.replaced = True  # others accept in our place
        self.stop.set()

    def _orphaned(self) -> None:
        """The owner is gone."""
        if not self.stop.is_set():
            log.error("the owner is gone: up to %g s for what runs", self.config.server.drain_timeout)
        self.stop.set()

    async def drain(self, *, replaced: bool = False) -> None:
        signal.alarm(int(self.config.server.drain_timeout + 4 * END_SECONDS) + 1)
        await asyncio.gather(*self._greeted, return_exceptions=True)
        await super().drain(replaced=replaced)

    async def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._way.fileno())
        if self._reporting is not None:
            self._reporting.cancel()
        await super().close()
        self.link.say(Kind.TEXT, self.metrics.render()[0])
        self.link.channel.close()

    # -- what it says

    def _report(self) -> None:
        now, streams = self.clock.now(), self.gateway.streams
        backends = []
        for name, backend in self.pool.backends.items():
            heard = max(streams(name), default=None) if self.gateway.exchanges else None
            silent = None if heard is None else now - heard
            backends.append((name, backend.connections.open_connections, silent))
        clients = len(self._server.connections) if self._server is not None else 0
        self.link.say(Kind.REPORT, clients, tuple(backends))
        self._reporting = self.clock.call_at(now + REPORT_SECONDS, self._report)

    def _scraped(self, accept: str) -> None:
        self.link.say(Kind.TEXT, self.metrics.render(accept)[0])

    async def _gather(self, accept: str) -> None:
        _, said = await self.link.answer(Kind.PAGE, accept)
        self._page = said

    def page(self, accept: str) -> tuple[bytes, str]:
        return self._page


def main(channel: int, connections: int, lock: int) -> None:
    """A fresh interpreter begins here."""
    ours, way = socket.socket(fileno=channel), socket.socket(fileno=connections)
    said = receive(ours)
    if not said:
        raise SystemExit(0)  # the owner is gone already
    _, packed, share = said[0]
    config: Config = unpack(packed)
    set_up_logging(config.telemetry.log_level, config.telemetry.log_format)
    ours.setblocking(False)
    way.setblocking(False)

    async def work() -> None:
        await WorkerApp(config, share, way, lock).run(ours)

    with asyncio.Runner(loop_factory=loop_factory(config.server.uvloop)) as runner:
        runner.run(work())
