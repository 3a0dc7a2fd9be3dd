"""The request path: accept → parse → classify → limit → admit → choose → relay → normalize → record.

Rules
1. `handle` reads top to bottom, one call a stage. Whatever goes wrong in a stage is a `ProxyError`; it becomes a
   response in one place, `Exchange.refuse`.
2. The record is closed exactly once, in `handle`'s `finally`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from urllib.parse import unquote

from aiohttp import web

from policies import RetryParams
from policies.hedge import Allowance, HedgeParams
from proxy.abilities import Abilities
from proxy.access import Callers, KeyRing
from proxy.classify import Classifier
from proxy.clock import Clock
from proxy.config import Timeouts
from proxy.errors import Outcome, ProxyError
from proxy.exchange import STOPPING, Exchange
from proxy.explain import Memory
from proxy.gate import Gate
from proxy.headers import Cors
from proxy.intake import ClientsOf, find_endpoint, known_page
from proxy.limiter import Limiter
from proxy.local import Local
from proxy.metrics import Metrics
from proxy.owners import Owners
from proxy.pool import Pool
from proxy.record import Measures, Record
from proxy.recorder import Recorder
from proxy.spans import Spans
from proxy.tokenizer import Tokenizer
from proxy.turns import Turns

log = logging.getLogger("tierline.request")

NOT_FOUND = frozenset({"response_not_found", "previous_response_not_found"})
"""Another process may just have learned of it."""


@dataclass(slots=True, eq=False)
class Gateway:
    """What every request needs, wired by `app`."""

    clock: Clock
    classifier: Classifier
    gate: Gate
    tokenizer: Tokenizer
    abilities: Abilities
    memory: Memory
    policy: str
    """Digest of the active one."""
    keeps_decisions: bool
    admin_keys: KeyRing
    retry: RetryParams
    rng: Random
    pool: Pool
    timeouts: dict[str, Timeouts]
    """By backend."""
    hedges: dict[str, HedgeParams]
    """By tier; of those that are not here no request is sent twice."""
    callers: Callers
    limiter: Limiter
    public_paths: frozenset[str]
    body_timeout: float
    cors: Cors
    owners: Owners
    local: Local
    metrics: Metrics
    recorder: Recorder
    clients: ClientsOf | None = None
    """Who a request comes from; None: no record says it."""
    spans: Spans | None = None
    told: tuple[Callable[[Record, Measures], None], ...] = ()
    """Who else hears of each closed record."""
    exchanges: set[Exchange] = field(default_factory=set)
    turns: Turns = field(default_factory=Turns)
    allowance: Allowance = field(default_factory=Allowance)
    gather: Callable[[str], Awaitable[None]] | None = None
    """In a worker: gets the metrics of all for the page that shows them."""
    draining: bool = False
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_idle(self) -> None:
        """Until no request runs."""
        while self.exchanges:
            self._idle.clear()
            await self._idle.wait()

    def may_explain(self, headers: Mapping[str, str]) -> bool:
        """Asked with the admin key, in a header of its own or as the request's key; nobody has it where none is set."""
        if not self.admin_keys or headers.get("x-tierline-explain") != "1":
            return False
        key = headers.get("x-tierline-admin-key")
        if key is not None and self.admin_keys.identify({"Authorization": f"Bearer {key}"}) is not None:
            return True
        return self.admin_keys.identify(headers) is not None

    def drain(self) -> None:
        """From now on every answer closes its connection, also those that are under way."""
        self.draining = self.local.draining = True
        for exchange in self.exchanges:
            exchange.answer.close_behind()

    def interrupt(self) -> None:
        """End every running answer with an error: the gateway stops."""
        for exchange in tuple(self.exchanges):
            exchange.interrupt()

    def streams(self, backend: str) -> Iterator[float]:
        """When each stream of this backend that has begun, and whose client reads, was last heard."""
        for exchange in self.exchanges:
            if exchange.record.backend == backend and (heard := exchange.heard()) is not None:
                yield heard

    def give_up(self, backend: str, since: float) -> None:
        """It answers nobody: what runs there and was not heard since then fails now, not when its time is over."""
        for exchange in tuple(self.exchanges):
            if exchange.record.backend == backend:
                exchange.give_up(since)

    def _answer_here(self, exchange: Exchange, request: web.BaseRequest) -> web.StreamResponse | None:
        """The gateway's own pages and browsers' preflights; no record."""
        origin, answer = request.headers.get("origin"), exchange.answer
        if request.method == "OPTIONS" and self.cors.allows(origin):
            assert origin is not None
            asked = request.headers.get("access-control-request-headers")
            answer.send(204, self.cors.preflight(origin, asked), b"")
            return answer
        if not self.local.owns(exchange.path):
            return None
        try:
            exchange.authorize()
            path, accept = unquote(exchange.path), request.headers.get("accept", "")
            status, headers, body = self.local.page(request.method, path, exchange.caller, accept)
        except ProxyError as error:
            exchange.refuse(error)
        else:
            answer.send(status, [*headers, *exchange.headers], body)
        return answer

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """One request, from accept to record."""
        exchange = Exchange(self, request)
        if self.gather is not None and exchange.path == "/metrics":
            await self.gather(request.headers.get("accept", ""))
        if (done := self._answer_here(exchange, request)) is not None:
            return done
        self.exchanges.add(exchange)
        if self.clients is not None:
            exchange.record.client = self.clients(request).address
        if self.spans is not None:
            exchange.record.trace = self.spans.begin(request.headers)
        try:
            exchange.authorize()
            endpoint = find_endpoint(request.method, exchange.path)
            if not self.callers.required and (origin := request.headers.get("origin")) is not None:
                known_page(origin, self.cors)
            body = await exchange.read_body()
            if not self.turns.take():
                await self.turns.wait()
            try:
                asked = await exchange.classify(endpoint, body)
            except ProxyError as error:
                if error.code not in NOT_FOUND or not await self.owners.catch_up():
                    raise
                asked = await exchange.classify(endpoint, body)
            if asked.work is not None:
                await self.turns.wait()  # tools took a while to read: chunks pass first
            if self.limiter.active:
                await exchange.limit(endpoint, asked)
            await exchange.serve(endpoint, asked)
        except ProxyError as error:
            exchange.refuse(error)
        except asyncio.CancelledError:
            if not exchange.interrupted:
                exchange.end(Outcome.CANCELLED, "client went away")
                raise
            exchange.refuse(ProxyError(Outcome.SHUTDOWN, 503, STOPPING, type="server_error", code="shutdown"))
        except Exception:
            log.exception("request %s failed inside the gateway", exchange.record.request_id)
            exchange.refuse(ProxyError(Outcome.INTERNAL, 500, "internal error", type="server_error"))
        finally:
            self.exchanges.discard(exchange)
            if not self.exchanges:
                self._idle.set()
            derived = exchange.close()
            for told in self.told:
                told(exchange.record, derived)
        return exchange.answer
