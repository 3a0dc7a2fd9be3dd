"""Wiring: the only place where everything meets. Build, listen, run until told to stop, drain, close.

Shutting down, in order: stop accepting; let streams finish, up to `drain_timeout`; end the rest with an in-band
error; close clients and backends; write the last records.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from random import Random
from urllib.parse import urlsplit

from aiohttp import web

from policies.hedge import HedgeParams
from policies.limits import Quota
from policies.trace import TracingRouter
from proxy.abilities import Abilities
from proxy.access import Callers, KeyRing
from proxy.admin import admin_app
from proxy.classify import Classifier
from proxy.clock import Clock, LoopClock
from proxy.config import Admin as AdminSection
from proxy.config import Backend as BackendConfig
from proxy.config import Config, ListenerTls
from proxy.config import Server as ServerSection
from proxy.entrance import AppRunner, Door, ServerRunner, refused_counter
from proxy.explain import Memory
from proxy.front import Patience, Server
from proxy.gate import Gate
from proxy.handler import Gateway
from proxy.headers import Cors
from proxy.health import HealthPoller
from proxy.intake import ClientsOf
from proxy.keys import Keys, failures_counter
from proxy.ledger import LocalLedger
from proxy.limiter import Limiter
from proxy.listen import Listeners
from proxy.local import Local
from proxy.metrics import Counter, Metrics
from proxy.owners import Owners
from proxy.pool import Backend, BackendSpec, Pool
from proxy.recorder import FileWriter, Recorder, Write, write_stdout
from proxy.reload import Reloader
from proxy.sharedledger import SharedLedger
from proxy.tls import Tls, loads_counter
from proxy.tokenizer import Tokenizer
from proxy.upstream import ConnectionPool
from proxy.wire.forwarded import networks

log = logging.getLogger("tierline")

END_SECONDS = 5.0
"""What ending the rest in-band may take after the drain limit."""


class App:
    """The gateway as a thing that can be started and stopped; tests use it just like `run`."""

    def __init__(self, config: Config, clock: Clock | None = None, rng: Random | None = None) -> None:
        self.config = config
        self.clock = clock or LoopClock()
        self.reloader = Reloader(config, self.configure, self.clock)
        self._watch: asyncio.Task[None] | None = None
        self._write = _writer(config)
        self.recorder = Recorder(self.clock, self._write)
        self.pool = Pool(
            [_backend(config, backend, self.clock) for backend in config.backends],
            self.clock,
            config.health.breaker,
            config.policy_params,
            config.health.trial_timeout,
            config.health.progress,
        )
        self.metrics = Metrics(config, self.pool.snapshot, self.recorder)
        on_data = config.admin.metrics_on in ("data", "both")
        self.local = Local(config, self.pool, self.clock, self.metrics.render if on_data else None)
        owners = Owners()
        ledger = LocalLedger(self.clock)
        shared = config.limits.shared
        self.shared = SharedLedger(shared, self.clock, ledger) if shared.url is not None else None
        rng = rng or Random()
        self.gate = Gate(
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
            memory=Memory(),
            policy=config.policy_digest,
            keeps_decisions=config.telemetry.decisions,
            admin_keys=KeyRing([("admin", config.admin.key.digest)] if config.admin.key is not None else []),
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
        self.keys = Keys(config, self.clock, ledger, self._keys_changed)
        self.metrics.counters = self._counters
        self.pool.streams, self.pool.give_up = self.gateway.streams, self.gateway.give_up
        self.metrics.estimate_errors = self._estimate_errors
        self.health = HealthPoller(config, self.clock, self.pool, Random(rng.getrandbits(64)))
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
        server = self._server = Server(
            self.gateway.handle,
            max_body_bytes=config.server.max_body_bytes,
            keepalive_timeout=config.server.keepalive_timeout,
            patience=Patience(
                self.clock,
                config.server.header_timeout,
                config.timeouts.client_idle,
                config.server.max_connections,
            ),
        )
        try:
            entry = ServerRunner(server, handle_signals=False, shutdown_timeout=1.0)
            entry.door = self._door("server", config.server.tls, config.server.proxy_protocol)
            self.port = await self._listen(entry, listeners, "data", config.server)
            if config.admin.enabled:
                runner = AppRunner(
                    admin_app(config, self.pool, self.metrics, self.reloader, self.gateway.memory),
                    access_log=None,
                    handle_signals=False,
                    shutdown_timeout=1.0,
                )
                runner.door = self._door("admin", config.admin.tls)
                self.admin_port = await self._listen(runner, listeners, "admin", config.admin)
        except OSError:
            await self.close()
            raise
        self.health.start()
        self.keys.start()
        if any(tier.continuation != "off" for tier in config.tiers.values()):
            for name in self.pool.backends:
                self.abilities.of(name)  # asks it, beside
        if config.server.watch_config:
            self._watch = asyncio.get_running_loop().create_task(self.reloader.watch(), name="watch config")

    def configure(self, config: Config) -> None:
        """Put another configuration in force, in one step. Only what `reload.RELOADABLE` names may differ."""
        gateway = self.gateway
        self.config = config
        self.pool.configure(config.policy_params)
        gateway.classifier = gateway.classifier.configured(config)
        gateway.retry = config.policy.retry
        gateway.hedges = _hedges(config)
        gateway.timeouts = {backend.name: config.timeouts_for(backend) for backend in config.backends}
        gateway.policy = config.policy_digest
        gateway.keeps_decisions = config.telemetry.decisions
        gateway.clients = _clients(config)
        self.local.configure(config)
        self.metrics.configure(config)
        self.keys.configure(config)
        self.gate.configure(_router(config), config.policy_params, config.policy.retry)

    def _keys_changed(self, callers: Callers, quotas: dict[str, Quota]) -> None:
        self.gateway.callers = callers
        self.gateway.limiter.configure(self.config, quotas)

    def _counters(self) -> Iterator[Counter]:
        yield from self.gateway.limiter.counters()
        yield failures_counter(self.keys.failures)
        if self.shared is not None:
            yield from self.shared.counters()
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
            most=server.max_connections,
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
        await self.health.stop()
        await self.keys.close()
        await self.abilities.close()
        for door in self._doors:
            door.close()
        for runner in reversed(self._runners):
            await runner.cleanup()
        if self.shared is not None:
            await self.shared.close()
        await self.pool.close()
        await self.recorder.close()
        if isinstance(self._write, FileWriter):
            self._write.close()


def _hedges(config: Config) -> dict[str, HedgeParams]:
    return {name: tier.hedges for name, tier in config.tiers.items() if tier.hedges is not None}


def _clients(config: Config) -> ClientsOf | None:
    return ClientsOf(networks(config.server.trusted_proxies)) if config.telemetry.client_addresses else None


def _router(config: Config) -> TracingRouter:
    return TracingRouter(config.policy.router, config.policy.ranking, exact=config.telemetry.decisions)


def _writer(config: Config) -> Write | None:
    path = config.telemetry.records_path
    if path is not None:
        return FileWriter(str(path))
    return write_stdout if config.telemetry.records == "stdout" else None


def _backend(config: Config, backend: BackendConfig, clock: Clock) -> Backend:
    parts = urlsplit(backend.url)
    secure = parts.scheme == "https"
    host = parts.hostname or ""
    of = f"backend {backend.name}"
    tls = Tls(of, backend.tls.files, backend.tls.context, clock) if secure else None
    if secure and backend.tls.insecure_any_certificate:
        log.warning("%s: any certificate is accepted, so whoever stands between may read and answer", of)
    max_idle = config.pool.max_idle if backend.max_idle is None else backend.max_idle
    connections = ConnectionPool(
        clock,
        host,
        parts.port or (443 if secure else 80),
        tls,
        idle_seconds=config.pool.idle_seconds,
        max_idle=max_idle,
        server_name=backend.tls.server_name,
    )
    reference, kl_bits = backend.worth
    spec = BackendSpec(
        name=backend.name,
        url=backend.url,
        host_header=parts.netloc.encode(),
        path_prefix=parts.path.rstrip("/").encode(),
        model=backend.model,
        key=backend.key.reveal() if backend.key is not None else None,
        reference=reference,
        kl_bits=kl_bits,
        window_tokens=backend.limits.window_tokens,
        max_in_flight=backend.limits.max_in_flight,
        kv_tokens=backend.limits.kv_tokens,
        stream_usage=backend.stream_usage,
        profile=backend.measured,
        speculates=backend.speculates,
        remote=backend.remote,
        parser=backend.parser,
        reasoning_parser=backend.reasoning_parser,
        enforces_choice=backend.enforces_choice,
        history_reasoning=backend.history_reasoning,
    )
    return Backend(spec, connections)
