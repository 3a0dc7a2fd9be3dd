"""Asking the backends how they are: a poller each, on an interval.

Rules
1. A poll is a probe (`health_path`), then the engine's numbers (`metrics_path`), then, until it is known, what
   the backend serves (`/v1/models`, llama-server's `/props`). What is learnt goes to a `HealthSink`; nothing is
   decided here.
2. A backend without these paths works: `/v1/models` is the probe, its numbers stay unknown and are asked for
   again only now and then.
3. A backend in doubt is asked for one token (a trial), at its sink's wish: whatever it answers but a 5xx, nothing or a
   refusal of our own key shows that it can answer.
4. Every request has a deadline, every body a bound, no redirect is followed. Nothing that a backend answers
   ends a poller: a fault of our own is logged and the next round comes.
5. Details name what happened, never a URL, a key or a body.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Mapping
from random import Random
from typing import Protocol

import aiohttp
import orjson

from proxy.clock import Clock
from proxy.config import Backend, Config
from proxy.wire.promtext import EngineMetrics, read_metrics

log = logging.getLogger("tierline.health")

MODELS_PATH = "/v1/models"
COMPLETIONS_PATH = "/v1/completions"
PROPS_PATH = "/props"
MAX_BODY_BYTES = 4 << 20
# Rounds until a path that the backend does not have is asked for again: it may be restarted as something else.
ASK_AGAIN_ROUNDS = 30
# "No such path": 501 is llama-server without --metrics.
_ABSENT = frozenset({404, 405, 501})


class HealthSink(Protocol):
    """Who learns what was found. Called on the event loop's thread; must not block or raise."""

    def polled(self, name: str, metrics: EngineMetrics, now: float) -> None: ...

    def probe(self, name: str, ok: bool, detail: str, now: float) -> None: ...

    def discovered(self, name: str, window_tokens: int | None, served_model: str | None) -> None: ...

    def busy(self, name: str) -> bool:
        """Whether requests of ours run there."""
        ...

    def trial_due(self, name: str) -> float | None:
        """Seconds that a trial may take; None: none is wanted."""
        ...

    def tried(self, name: str, ok: bool, detail: str, now: float) -> None: ...

    def tls(self, name: str) -> ssl.SSLContext | bool:
        """How to talk TLS with it, by the files as they are now; True: as anybody does."""
        ...

    def model(self, name: str) -> str | None:
        """Its name for the model, as far as it is known."""
        ...


class HealthPoller:
    """One task a backend. `start` and `stop` are called once each, on the running loop; `configure` at any time."""

    def __init__(self, config: Config, clock: Clock, sink: HealthSink, rng: Random | None = None) -> None:
        self._config = config
        self._clock = clock
        self._sink = sink
        self._rng = rng or Random()
        self._started = False
        self._watches: dict[str, tuple[Watch, asyncio.Task[None]]] = {}
        self._ended: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._started = True
        self.configure(self._config)

    def configure(self, config: Config) -> None:
        """Other backends and intervals from now on. A new or changed backend is asked at once; who is not among them is
        still asked, until it is dropped: what runs there may get stuck."""
        self._config = config
        if not self._started:
            return
        for backend in config.backends:
            known = self._watches.get(backend.name)
            if known is not None and known[0].backend == backend:
                known[0].timeout = config.health.timeout
                continue
            self.drop(backend.name)
            watch = Watch(_session(), backend, config, self._clock, self._sink)
            task = asyncio.get_running_loop().create_task(self._run(watch), name=f"health {backend.name}")
            self._watches[backend.name] = watch, task

    def drop(self, name: str) -> None:
        """Ask it no more; nothing is heard of it from here on."""
        known = self._watches.pop(name, None)
        if known is not None:
            ending = asyncio.get_running_loop().create_task(self._end(*known), name=f"end of health {name}")
            known[1].cancel()
            self._ended.add(ending)
            ending.add_done_callback(self._ended.discard)

    async def _end(self, watch: Watch, task: asyncio.Task[None]) -> None:
        await asyncio.gather(task, return_exceptions=True)
        await watch.session.close()

    async def stop(self) -> None:
        for name in tuple(self._watches):
            self.drop(name)
        self._started = False
        await asyncio.gather(*self._ended, return_exceptions=True)

    async def _run(self, watch: Watch) -> None:
        while True:
            try:
                await watch.round()
            except Exception:
                log.exception("polling backend %s failed inside the gateway", watch.name)
            # Spread, so that many backends are not all asked in the same millisecond for ever.
            await self._clock.sleep(self._config.health.interval * self._rng.uniform(0.9, 1.1))


def _session() -> aiohttp.ClientSession:
    """For one backend: its connections are closed with it."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=2),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"user-agent": "tierline-health", "accept-encoding": "identity"},
        # Deadlines are the clock's; aiohttp's own would be a second authority.
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        auto_decompress=False,
        trust_env=False,
    )


class Watch:
    """What is known of one backend between rounds."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        backend: Backend,
        config: Config,
        clock: Clock,
        sink: HealthSink,
    ) -> None:
        self.name = backend.name
        self.session = session
        self.backend = backend
        self.timeout = config.health.timeout
        self._clock = clock
        self._sink = sink
        self._base = backend.url.rstrip("/")
        # Given to each request, not to the session: another backend must not see this one's key.
        self._headers = {"authorization": f"Bearer {backend.key.reveal()}"} if backend.key is not None else {}
        self._without: dict[str, int] = {}  # path the backend lacks → rounds until it is asked for again
        self._known = False

    async def round(self) -> None:
        """Probe, numbers, discovery. A backend that does not answer the probe is not asked for more."""
        self._without = {path: left - 1 for path, left in self._without.items() if left > 1}
        ok, detail = await self._probe()
        self._sink.probe(self.name, ok, detail, self._clock.now())
        if not ok:
            self._known = False  # it may come back as something else
            return
        await self._poll()
        if not self._known:
            await self._discover()
        if (seconds := self._sink.trial_due(self.name)) is not None:
            ok, detail = await self._trial(seconds)
            self._sink.tried(self.name, ok, detail, self._clock.now())

    async def _trial(self, seconds: float) -> tuple[bool, str]:
        ask = {"model": self._sink.model(self.name) or "", "prompt": "1", "max_tokens": 1}
        status, _, detail = await self._ask("POST", COMPLETIONS_PATH, seconds, ask)
        refused = status in (401, 403) and bool(self._headers)
        return status is not None and status < 500 and not refused, detail

    async def _probe(self) -> tuple[bool, str]:
        path = self.backend.health_path
        if path not in self._without:
            status, _, detail = await self._get(path)
            if status not in _ABSENT:
                return _ok(status), detail
            self._without[path] = ASK_AGAIN_ROUNDS
        if self._known and self._sink.busy(self.name):
            # Its list of models would do harm: llama-cpp-python ends the answer that runs for whoever asks for it.
            status, _, detail = await self._get(path)
            return _ok(status) or status in _ABSENT, detail
        status, _, detail = await self._get(MODELS_PATH)
        return _ok(status), detail

    async def _poll(self) -> None:
        path = self.backend.metrics_path
        if path in self._without:
            return
        status, body, detail = await self._get(path)
        if status in _ABSENT:
            self._without[path] = ASK_AGAIN_ROUNDS
        elif _ok(status):
            found = read_metrics(body)
            if found != EngineMetrics():  # a page of something else says nothing about load
                self._sink.polled(self.name, found, self._clock.now())
        else:
            log.debug("backend %s: %s answered %s", self.name, path, detail)

    async def _discover(self) -> None:
        status, body, _ = await self._get(MODELS_PATH)
        if not _ok(status):
            self._known = status in _ABSENT
            return
        window, model = read_models(body, self.backend.model)
        if window is None:
            status, body, _ = await self._get(PROPS_PATH)
            window = read_props(body) if _ok(status) else None
        # A server that lists its model but not its window will not say more when asked again.
        self._known = model is not None
        if window is not None or model is not None:
            self._sink.discovered(self.name, window, model)

    async def _get(self, path: str) -> tuple[int | None, bytes, str]:
        return await self._ask("GET", path, self.timeout)

    async def _ask(
        self, method: str, path: str, seconds: float, body: object = None
    ) -> tuple[int | None, bytes, str]:
        """(status, body, what happened); status None when there was no whole answer."""
        try:
            async with (
                self._clock.timeout_at(self._clock.now() + seconds),
                self.session.request(
                    method,
                    self._base + path,
                    json=body,
                    headers=self._headers,
                    ssl=self._sink.tls(self.name),
                    server_hostname=self.backend.tls.server_name,
                    allow_redirects=False,
                ) as response,
            ):
                return response.status, await _bounded(response), f"status {response.status}"
        except TimeoutError:
            return None, b"", f"no answer within {seconds:g} s"
        except aiohttp.ClientConnectorCertificateError:
            return None, b"", "its certificate is not trusted"
        except aiohttp.ClientConnectorError as error:
            return None, b"", f"cannot connect ({_why(error.os_error)})"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return None, b"", f"no valid answer ({type(error).__name__})"


def _why(error: OSError) -> str:
    """The system's words; those of asyncio hold the address."""
    number = error.errno
    return os.strerror(number) if isinstance(number, int) and number > 0 else type(error).__name__


def _ok(status: int | None) -> bool:
    return status is not None and 200 <= status < 300


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    """The body, or its first MAX_BODY_BYTES; the connection of a longer one is not used again."""
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size >= MAX_BODY_BYTES:
            response.close()
            break
    return b"".join(parts)[:MAX_BODY_BYTES]


def read_models(body: bytes, model: str | None) -> tuple[int | None, str | None]:
    """(window in tokens, name) of `model` in an answer of /v1/models, or of the first one listed.

    vLLM says max_model_len, llama-server meta.n_ctx; llama-cpp-python neither.
    """
    value = _loads(body)
    data = value.get("data") if isinstance(value, dict) else None
    entries = [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []
    if not entries:
        return None, None
    entry = next((entry for entry in entries if model is not None and entry.get("id") == model), entries[0])
    meta = entry.get("meta")
    window = _tokens(entry.get("max_model_len")) or _tokens(
        meta.get("n_ctx") if isinstance(meta, dict) else None
    )
    name = entry.get("id")
    return window, name if isinstance(name, str) and name else None


def read_props(body: bytes) -> int | None:
    """A slot's window in an answer of llama-server's /props."""
    value = _loads(body)
    settings = value.get("default_generation_settings") if isinstance(value, dict) else None
    return _tokens(settings.get("n_ctx")) if isinstance(settings, dict) else None


def _loads(body: bytes) -> Mapping[str, object] | None:
    try:
        value: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _tokens(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40 else None
