"""Wiring: the only place where everything meets. Build, listen, run until told to stop, drain, close.

Shutting down, in order: stop accepting; let streams finish, up to `drain_timeout`; end the rest with an in-band
error; close clients and backends; write the last records.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random

from aiohttp import web

from policies import Fleet, PolicyParams, RetryParams
from policies.hedge import HedgeParams
from policies.limits import Quota
from policies.trace import TracingRouter
from proxy.abilities import Abilities
from proxy.access import Callers
from proxy.adminapi import Exposition, Gear, admin_app, admin_keys
from proxy.backend import idle, make, remake
from proxy.classify import Classifier
from proxy.clock import Clock, LoopClock
from proxy.config import Admin as AdminSection
from proxy.config import Config, ListenerTls
from proxy.config import Server as ServerSection
from proxy.entrance import AppRunner, Door, ServerRunner, refused_counter
from proxy.explain import Memory
from proxy.farewell import Farewell
from proxy.front import Patience, Server
from proxy.gate import Gate
from proxy.handler import Gateway
from proxy.headers import Cors
from proxy.health import HealthPoller
from proxy.intake import ClientsOf
from proxy.keys import Keys, failures_counter
from proxy.keystore import Store
from proxy.ledger import Ledger, LocalLedger
from proxy.limiter import Limiter
from proxy.listen import Listeners
from proxy.local import Local
from proxy.metrics import Counter, Metrics
from proxy.owners import Owners
from proxy.pool import Pool
from proxy.recorder import FileWriter, Recorder, Write, writer_for
from proxy.recordstore import RecordStore
from proxy.reload import Reloader
from proxy.requestlog import request_log
from proxy.sharedledger import SharedLedger
from proxy.spans import spans_for
from proxy.tls import Tls, loads_counter
from proxy.tokenizer import Tokenizer
from proxy.ui.routes import Sources, Ui
from proxy.wire.forwarded import networks

log = logging.getLogger("tierline")

END_SECONDS = 5.0
"""What ending the rest in-band may take after the drain limit."""


@dataclass(frozen=True, slots=True)
class Parts:
    """How what workers share is made: here in this process, in a worker (`worker`) as the owner's."""

    pool: type[Pool] = Pool
    gate: Callable[[Clock, Fleet, TracingRouter, PolicyParams, Random, RetryParams], Gate] = Gate
    ledger: Callable[[Clock], LocalLedger] = LocalLedger
    owners: Callable[[], Owners] = Owners
    memory: Callable[[], Memory] = Memory
    shares_limits: bool = True
    writes: Callable[[Write | None], Write | None] = lambda write: write


class App:
    """The gateway as a thing that can be started and stopped; tests use it just like `run`."""

    def __init__(
        self,
        config: Config,
        clock: Clock | None = None,
        rng: Random | None = None,
        parts: Parts = Parts(),
    ) -> None:
        self.config = config
        self.clock = clock or LoopClock()
        self.reloader = Reloader(config, self.configure, self.clock)
        self._watch: asyncio.Task[None] | None = None
        self._write = writer_for(config)
        self._store = _store(config, self.clock)
        self.recorder = Recorder(self.clock, parts.writes(self._write), self._store)
        self.pool = parts.pool(
            [make(config, backend, self.clock) for backend in config.backends],
            self.clock,
            config.health.breaker,
            config.policy_params,
            config.health.trial_timeout,
            config.health.progress,
        )
        self.pool.places = _places(config)
        self.metrics = Metrics(config, self.pool.snapshot, self.recorder)
        on_data = config.admin.metrics_on in ("data", "both")
        self.local = Local(config, self.pool, self.clock, self.page if on_data else None)
        owners = parts.owners()
        self._accounts = ledger = parts.ledger(self.clock)
        shared = config.limits.shared if parts.shares_limits else None
        self.shared = SharedLedger(shared, self.clock, ledger) if shared and shared.url is not None else None
        self.ledger: Ledger = self.shared or ledger
        rng = rng or Random()
        self.gate = parts.gate(
            self.clock, self.pool.fleet, _router(config), config.policy_params, rng, config.policy.retry
        )
        self.pool.changed = self.gate.pump
        self.metrics.waiting = self.gate.waiting
        self.abilities = Abilities(self.clock, self.pool)
        self.gateway = Gateway(
            clock=self.clock,
            classifier=Classifier(config, self.pool, owners),
            gate=self.gate,
            tokenizer=Tokenizer(self.clock),
            abilities=self.abilities,
            memory=parts.memory(),
            policy=config.policy_digest,
            keeps_decisions=config.telemetry.decisions,
            admin_keys=admin_keys(config),
            retry=config.policy.retry,
            rng=rng,
            pool=self.pool,
            hedges=_hedges(config),
            timeouts={backend.name: config.timeouts_for(backend) for backend in config.backends},
            callers=Callers(),
            limiter=Limiter(self.shared or ledger),
            public_paths=frozenset(config.server.public_paths),
            body_timeout=config.server.body_timeout,
            cors=Cors(config.server.cors_origins),
            owners=owners,
            local=self.local,
            metrics=self.metrics,
            recorder=self.recorder,
            clients=_clients(config),
        )
        self.spans = self.gateway.spans = spans_for(config, self.clock)
        self._hearers = [one for one in (self.spans, request_log(config, self.clock)) if one is not None]
        self.gateway.told = tuple(one.add for one in self._hearers)
        self.keys = Keys(config, self.clock, ledger, self._keys_changed)
        self.metrics.counters, self.metrics.gauges = self._counters, self.reloader.gauges
        self.pool.streams, self.pool.give_up = self.gateway.streams, self.gateway.give_up
        self.metrics.estimate_errors = self._estimate_errors
        self.health = HealthPoller(config, self.clock, self.pool, Random(rng.getrandbits(64)))
        self.farewell = Farewell(self.clock, self.pool, self.health)
        memory, waiting = self.gateway.memory, self.gate.waiting
        self.ui = Ui(Sources(self.clock, self.pool, self.reloader, memory, waiting, self.ledger))
        self._server: Server | None = None
        self._runners: list[web.BaseRunner] = []
        self._sites: dict[str, list[web.SockSite]] = {}
        self._doors: list[Door] = []
        self.port = 0
        self.admin_port = 0

    async def start(self, listeners: Listeners | None = None) -> None:
        """Listen on both sides and begin to watch the backends. Raises OSError when an address cannot be had."""
        config, listeners = self.config, listeners or Listeners({})
        if self.shared is not None:
            await self.shared.start()
        try:
            await self._open(listeners)
            if config.admin.enabled:
                runner = AppRunner(
                    admin_app(self._gear(), self.ui),
                    access_log=None,
                    handle_signals=False,
                    shutdown_timeout=1.0,
                )
                runner.door = self._door("admin", config.admin.tls)
                self.admin_port = await self._listen(runner, listeners, "admin", config.admin)
        except OSError:
            await self.close()
            raise
        for name in config.origin.overlay.draining:
            if name in self.pool.backends:
                self.pool.set_draining(name, True)
        self.health.start()
        self.keys.start()
        self._beside(config)

    def _gear(self) -> Gear:
        """What the admin API acts on."""
        gear = Gear(self.pool, self.exposition(), self.reloader, self.gateway.memory, self.clock)
        store = self.config.server.store
        if store is not None:
            gear.store = partial(Store, store)
            gear.keys_changed = self.keys.turn
        gear.accounts, gear.standing = self._accounts.limited, self._accounts.standing
        return gear

    def _patience(self, config: Config) -> Patience:
        server = config.server
        return Patience(self.clock, server.header_timeout, config.timeouts.client_idle, self._most(config))

    def _most(self, config: Config) -> int:
        """Connections of clients that this process may have."""
        return config.server.max_connections

    def _beside(self, config: Config) -> None:
        """What runs beside the requests, as far as it does not yet."""
        self._ask_abilities(config)
        self._watch_file(config)
        self._send_off()

    def _send_off(self) -> None:
        self.farewell.look()

    def _ask_abilities(self, config: Config) -> None:
        if any(tier.continuation != "off" for tier in config.tiers.values()):
            for name in self.pool.backends:
                self.abilities.of(name)  # asks it

    def _watch_file(self, config: Config) -> None:
        loop = asyncio.get_running_loop()
        if config.server.watch_config and (self._watch is None or self._watch.done()):
            self._watch = loop.create_task(self.reloader.watch(), name="watch config")

    async def _open(self, listeners: Listeners) -> None:
        """Where clients come."""
        self.port = await self._listen(self.entry(), listeners, "data", self.config.server)

    def entry(self) -> ServerRunner:
        """What answers clients."""
        config = self.config
        self._server = Server(
            self.gateway.handle,
            max_body_bytes=config.server.max_body_bytes,
            keepalive_timeout=config.server.keepalive_timeout,
            patience=self._patience(config),
        )
        entry = ServerRunner(self._server, handle_signals=False, shutdown_timeout=1.0)
        entry.door = self._door("server", config.server.tls, config.server.proxy_protocol)
        return entry

    def exposition(self) -> Exposition:
        """What the admin listener shows of metrics."""
        return self.metrics

    def page(self, accept: str) -> tuple[bytes, str]:
        """The same on the clients' listener."""
        return self.metrics.render(accept)

    def configure(self, config: Config) -> None:
        """Put another configuration in force, in one step. Only what `reload.RELOADABLE` names may differ. Raises OSError
        when its backends cannot be made; nothing is changed then."""
        backends = remake(config, self.pool.backends, self.clock)
        gateway, server, health = self.gateway, config.server, config.health
        before, self.config = self.config, config
        self.pool.configure(
            backends,
            _places(config),
            config.policy_params,
            health.breaker,
            health.trial_timeout,
            health.progress,
        )
        for backend in config.backends:
            self.pool.backends[backend.name].connections.configure(*idle(config, backend))
        gateway.classifier = gateway.classifier.configured(config)
        gateway.retry = config.policy.retry
        gateway.hedges = _hedges(config)
        staying = {name: gateway.timeouts[name] for name in self.pool.leaving}
        gateway.timeouts = staying | {one.name: config.timeouts_for(one) for one in config.backends}
        gateway.policy = config.policy_digest
        gateway.keeps_decisions = config.telemetry.decisions
        gateway.clients = _clients(config)
        gateway.admin_keys = admin_keys(config)
        gateway.public_paths = frozenset(server.public_paths)
        gateway.body_timeout = server.body_timeout
        gateway.cors = Cors(server.cors_origins)
        if self.spans is not None:
            self.spans.configure(config)
        self.local.configure(config)
        self.metrics.configure(config)
        self.keys.configure(config)
        if self._server is not None:
            self._server.patience = self._patience(config)
            self._server.max_body_bytes = server.max_body_bytes
            self._server.keepalive_timeout = server.keepalive_timeout
        for door in self._doors:
            door.seconds, door.most = server.header_timeout, self._most(config)
            if door.trusted is not None:
                door.trusted = networks(server.trusted_proxies)
        if before.telemetry.log_level != config.telemetry.log_level:
            logging.getLogger().setLevel(config.telemetry.log_level.upper())
        self.gate.configure(_router(config), config.policy_params, config.policy.retry, self.pool.renamed)
        self.health.configure(config)
        self._beside(config)

    def _keys_changed(self, callers: Callers, quotas: dict[str, Quota]) -> None:
        self.gateway.callers = callers
        self.gateway.limiter.configure(self.config, quotas)

    def _counters(self) -> Iterator[Counter]:
        yield from self.gateway.limiter.counters()
        yield failures_counter(self.keys.failures)
        if self.shared is not None:
            yield from self.shared.counters()
        if self.spans is not None:
            yield self.spans.counter()
        yield from self.reloader.counters()
        contexts = [door.tls for door in self._doors] + [
            one.connections.tls for one in self.pool.backends.values()
        ]
        yield from loads_counter(tls for tls in contexts if tls is not None)
        yield from refused_counter(self._doors)

    def _door(self, name: str, tls: ListenerTls, proxied: bool = False) -> Door | None:
        """Where TLS or a PROXY header stands before the first request."""
        if tls.cert is None and not proxied:
            return None
        server = self.config.server
        door = Door(
            name,
            self.clock,
            tls=Tls(name, tls.files, tls.context, self.clock) if tls.cert is not None else None,
            trusted=networks(server.trusted_proxies) if proxied else None,
            seconds=server.header_timeout,
            most=self._most(self.config),
            good_bye=3600.0 if name == "server" else 10.0,  # clients of the data side are timed by `front`
        )
        self._doors.append(door)
        return door

    async def _listen(
        self, runner: web.BaseRunner, listeners: Listeners, name: str, at: ServerSection | AdminSection
    ) -> int:
        """Accept there; the port is returned."""
        await runner.setup()
        self._runners.append(runner)
        backlog = self.config.server.backlog
        sockets = await listeners.listen(name, at.host, at.port, backlog)
        for sock in sockets:
            site = web.SockSite(runner, sock, backlog=backlog)
            await site.start()
            self._sites.setdefault(name, []).append(site)
        port: int = sockets[0].getsockname()[1]
        return port

    def _estimate_errors(self) -> Iterator[tuple[str, str, float]]:
        for model, calibration in self.gateway.classifier.calibrations.items():
            for kind, error in calibration.errors().items():
                yield model, kind.value, error

    async def drain(self, *, replaced: bool = False) -> None:
        """Accept nothing new, let what runs finish until the limit, then end it in-band.

        replaced: another process accepts in our place. Then connections that ask nothing are kept, too, until their next
        answer or the limit: a request may be on its way on them.
        """
        gateway = self.gateway
        gateway.drain()
        for name, sites in self._sites.items():
            if name == "data" or replaced:
                for site in sites:
                    await site.stop()
        seconds = self.config.server.drain_timeout
        over = self.clock.now() + seconds
        if not await self._idle(seconds):
            log.warning("%d requests still run after %g s: ending them", len(gateway.exchanges), seconds)
            gateway.interrupt()
            await self._idle(END_SECONDS)
        elif replaced and self._server is not None:
            with contextlib.suppress(TimeoutError):
                async with self.clock.timeout_at(over):
                    await self._server.left()
            await self._idle(END_SECONDS)

    async def _idle(self, seconds: float) -> bool:
        """Wait until no request runs and every answer is with its client; False when `seconds` were not enough."""
        try:
            async with self.clock.timeout_at(self.clock.now() + seconds):
                await self.gateway.wait_idle()
                if self._server is not None:
                    await self._server.flush()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Close everything, at once. Safe after a failed start."""
        self.gate.close()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self.farewell.close()
        await self.health.stop()
        await self.keys.close()
        await self.abilities.close()
        for door in self._doors:
            door.close()
        for runner in reversed(self._runners):
            await runner.cleanup()
        await self.ui.close()
        if self.shared is not None:
            await self.shared.close()
        await self.pool.close()
        for told in self._hearers:
            await told.close()
        await self.recorder.close()
        if isinstance(self._write, FileWriter):
            self._write.close()
        if self._store is not None and not self.recorder.busy:
            self._store.close()


def _places(config: Config) -> dict[str, tuple[str, ...]]:
    return {name: route.backends for name, route in config.routes.items()}


def _hedges(config: Config) -> dict[str, HedgeParams]:
    return {name: tier.hedges for name, tier in config.tiers.items() if tier.hedges is not None}


def _clients(config: Config) -> ClientsOf | None:
    return ClientsOf(networks(config.server.trusted_proxies)) if config.telemetry.client_addresses else None


def _router(config: Config) -> TracingRouter:
    return TracingRouter(config.policy.router, config.policy.ranking, exact=config.telemetry.decisions)


def _store(config: Config, clock: Clock) -> RecordStore | None:
    path, kept = config.records_store, config.telemetry
    if path is None:
        return None
    return RecordStore(str(path), clock.wall, keep_days=kept.keep_days, keep_mb=kept.keep_mb)
