"""The process that serves: its signals, from start to exit code.

Rules
1. SIGTERM and SIGINT stop it, SIGHUP reads the file again, SIGUSR2 puts another process in its place (`upgrade`).
2. What start-up made lives as long as the process: the collector need not look at it again.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Callable

from proxy.app import App
from proxy.config import Config, ListenerTls
from proxy.lane import CompiledLane
from proxy.listen import Listeners, ready
from proxy.toolcheck import warm
from proxy.upgrade import hand_over

log = logging.getLogger("tierline")


class Stop:
    """When to stop, and whether another process is in our place then."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.replaced = False
        self._upgrading: asyncio.Task[bool] | None = None

    def on_signals(self, app: App, listeners: Listeners) -> None:
        loop = asyncio.get_running_loop()
        for sign in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sign, self.asked.set)
        loop.add_signal_handler(signal.SIGHUP, app.reloader.reload, "SIGHUP")
        loop.add_signal_handler(signal.SIGUSR2, self._upgrade, app, listeners)

    def _upgrade(self, app: App, listeners: Listeners) -> None:
        if self._upgrading is None and not self.asked.is_set():
            self._upgrading = asyncio.ensure_future(hand_over(listeners, app.clock))
            self._upgrading.add_done_callback(self._upgraded)

    def _upgraded(self, task: asyncio.Task[bool]) -> None:
        self._upgrading = None
        if not task.cancelled() and task.result():
            self.replaced = True
            self.asked.set()


def settle() -> None:
    """Of the memory: see rule 2."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


async def _serve(config: Config) -> int:
    app, listeners, stop = _app(config), Listeners(), Stop()
    stop.on_signals(app, listeners)
    await app.start(listeners)
    listeners.close_unused()
    await asyncio.to_thread(warm)
    settle()
    where = f"{_scheme(config.server.tls)}://{config.server.host}:{app.port}"
    log.info("serving %s on %s", ", ".join(config.routes), where)
    if CompiledLane is None:
        log.info("built without a C compiler: chunks cost more CPU, all else is the same")
    if config.admin.enabled:
        log.info("admin on %s://%s:%d", _scheme(config.admin.tls), config.admin.host, app.admin_port)
    ready()
    await stop.asked.wait()
    log.info("stopping: up to %g s for what runs", app.config.server.drain_timeout)
    await app.drain(replaced=stop.replaced)
    await app.close()
    log.info("stopped")
    return 0


def _scheme(tls: ListenerTls) -> str:
    return "http" if tls.cert is None else "https"


def _app(config: Config) -> App:
    if config.server.workers == 1:
        return App(config)
    from proxy.owner import OwnerApp

    return OwnerApp(config)


def run(config: Config) -> int:
    """Serve until SIGTERM or SIGINT, or until another process serves in our place.

    Returns the exit code; raises OSError when an address cannot be had."""
    with asyncio.Runner(loop_factory=loop_factory(config.server.uvloop)) as runner:
        return runner.run(_serve(config))


def loop_factory(choice: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if choice == "off":
        return None
    try:
        import uvloop
    except ImportError:
        if choice == "on":
            raise
        return None
    return uvloop.new_event_loop
