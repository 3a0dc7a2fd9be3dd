"""The page's addresses below /ui, and what its data is made of.

Rules
1. What is true now comes from the pool, the gate, the fleet and the ledger of this process, which with several workers is
   their owner; what was comes from the database of records (`store`). Nothing else is asked, nothing is changed: drain and
   undrain are the admin API's.
2. Every answer is bounded, and none is kept by a browser. The guard of the admin listener stands before all of them but
   the static files (`open_paths`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import orjson
from aiohttp import web

from policies.fleet import Fleet
from policies.router import Router
from policies.trace import Trace
from proxy import __version__
from proxy.clock import Clock
from proxy.config import Config
from proxy.decisions import read
from proxy.explain import Story, explained
from proxy.ledger import Ledger, LocalLedger
from proxy.ui import queries
from proxy.ui.heat import CONCURRENCY, CONTEXT, heat
from proxy.ui.live import conversations, standings
from proxy.ui.page import API, HEADERS, Page
from proxy.ui.store import Busy, NoStore, Question, Reader
from proxy.ui.whatif import WhatIf, active
from proxy.wire.errors import Api, ErrorInfo, openai_type, render_body

NO_STORE = {**HEADERS, "Cache-Control": "no-store"}
MOST_BODY = 64_000
MOST_TEXT = 256
HEAT_SECONDS = 86_400.0

Handler = Callable[[web.Request], Awaitable[web.Response]]


class Stories(Protocol):
    def find(self, request_id: str) -> dict[str, object] | None: ...


class Pool(Protocol):
    """What the page needs of it."""

    @property
    def fleet(self) -> Fleet: ...

    def snapshot(self) -> Sequence[Mapping[str, object]]: ...


class Policy(Protocol):
    config: Config


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the page looks. waiting: (tier, priority) → how many are in line."""

    clock: Clock
    pool: Pool
    policy: Policy
    stories: Stories
    waiting: Callable[[], Mapping[tuple[str, int], int]]
    ledger: Ledger


class Refused(Exception):
    """The question makes no sense; param says where."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


class Ui:
    """`add_routes` puts it on an application; `close` it afterwards."""

    def __init__(self, sources: Sources) -> None:
        self._from = sources
        self._page = Page()
        self._reader = Reader(lambda: sources.policy.config.records_store, sources.clock)
        self._what_if = WhatIf(sources.clock)

    @property
    def open_paths(self) -> frozenset[str]:
        return self._page.paths

    def add_routes(self, app: web.Application) -> None:
        self._page.add_routes(app)
        get = {
            "fleet": self._fleet,
            "latency": self._latency,
            "requests": self._requests,
            "explain": self._explain,
            "heat": self._heat,
            "conversations": self._conversations,
            "limits": self._limits,
            "policy": self._policy,
        }
        for name, handler in get.items():
            app.router.add_get(f"{API}/{name}", partial(_answer, handler))
        app.router.add_post(f"{API}/whatif", partial(_answer, self._replayed))

    async def close(self) -> None:
        await self._what_if.close()
        self._reader.close()

    async def _ask(self, question: Question, name: Hashable = None, seconds: float = 0.0) -> Any:
        return await self._reader.ask(question, name, seconds)

    # -- what is true now

    async def _fleet(self, request: web.Request) -> dict[str, Any]:
        sources, problem, measured = self._from, None, {}
        try:
            now = sources.clock.wall()
            measured = await self._ask(lambda db: queries.measured(db, now), "measured", 2.0)
        except (NoStore, Busy) as error:
            problem = str(error)
        waiting = sources.waiting().items()
        return {
            "time": sources.clock.wall(),
            "version": __version__,
            "policy": sources.policy.config.policy_digest,
            "backends": [
                {**backend, "measured": measured.get(str(backend["name"]))}
                for backend in sources.pool.snapshot()
            ],
            "waiting": [
                {"tier": tier, "priority": priority, "count": n} for (tier, priority), n in sorted(waiting)
            ],
            "measured_seconds": queries.MEASURED_SECONDS,
            "records": problem,
        }

    async def _conversations(self, request: web.Request) -> dict[str, Any]:
        return conversations(self._from.pool.fleet, self._from.clock.now())

    async def _limits(self, request: web.Request) -> dict[str, Any]:
        sources = self._from
        if not isinstance(sources.ledger, LocalLedger):
            return {"shared": True, "limits": []}
        found = standings(sources.ledger, sources.clock.now(), sources.clock.wall())
        return {"shared": False, "limits": found}

    async def _policy(self, request: web.Request) -> dict[str, Any]:
        config = self._from.policy.config
        return {"policy": config.policy_digest, **active(config)}

    # -- what was

    async def _latency(self, request: web.Request) -> Any:
        window = _one_of(request, "window", queries.WINDOWS, "1h")
        by = _one_of(request, "by", queries.GROUPS, "none")
        now, fresh = self._from.clock.wall(), queries.WINDOWS[window][1] / 2
        return await self._ask(
            lambda db: queries.latencies(db, now, window, by), ("latency", window, by), fresh
        )

    async def _requests(self, request: web.Request) -> dict[str, Any]:
        filters = {name: value for name in queries.FILTERS if (value := _text(request, name))}
        limit, before = (
            min(_number(request, "limit", 100) or 1, queries.MOST_SHOWN),
            _number(request, "before"),
        )

        def question(db: Any) -> dict[str, Any]:
            return {"requests": queries.recent(db, limit, filters, before)}

        found = await self._ask(question, ("requests", limit, before, *filters.items()), 1.0)
        choices = await self._ask(queries.choices, "choices", 10.0)
        return {**found, "choices": choices}

    async def _heat(self, request: web.Request) -> dict[str, Any]:
        backends = self._from.policy.config.backends
        profiles = {backend.name: backend.measured for backend in backends}
        name = _one_of(request, "backend", profiles, next(iter(profiles)))
        profile, now = profiles[name], self._from.clock.wall()

        def question(db: Any) -> list[dict[str, Any]]:
            return heat(queries.cells(db, now, HEAT_SECONDS, name), profile)

        return {
            "backend": name,
            "backends": list(profiles),
            "profile": None if profile is None else profile.measured.title,
            "concurrency": CONCURRENCY,
            "context": CONTEXT,
            "cells": await self._ask(question, ("heat", name), 5.0),
        }

    async def _explain(self, request: web.Request) -> dict[str, Any]:
        ident, row = _text(request, "request_id"), _number(request, "row")
        if not ident:
            raise Refused("Which request? Say it by `request_id`.", "request_id")
        story, record, problem = self._from.stories.find(ident), None, None
        try:
            record = await self._ask(lambda db: queries.record(db, ident, row), ("record", ident, row), 1.0)
        except (NoStore, Busy) as error:
            problem = str(error)
        if story is None and record is not None:
            story = self._told(ident, record)
        if story is None and record is None:
            raise Refused(
                f"Nothing is known of request {ident!r}. {problem or ''}".strip(), "request_id", 404
            )
        if record is not None:
            record.pop("decisions", None)
        return {"story": story, "record": record, "records": problem}

    def _told(self, ident: str, record: Mapping[str, Any]) -> dict[str, object] | None:
        """From the decisions of the record; with scores, where the same policy is still in force."""
        config = self._from.policy.config
        try:
            traces: tuple[Trace, ...] = tuple(read(one) for one in record.get("decisions") or ())
        except (KeyError, TypeError, ValueError):
            return None
        if not traces:
            return None
        if record["policy"] == config.policy_digest:
            router = Router(config.policy_params.router, config.policy.ranking)
            traces = tuple([trace.scored(router) for trace in traces])
        return explained(ident, Story(record["policy"] or "", record["queue_wait_seconds"] or 0.0, traces))

    # -- what would be

    async def _replayed(self, request: web.Request) -> Any:
        if (request.content_length or 0) > MOST_BODY:
            raise Refused(f"More than {MOST_BODY} bytes.", status=413)
        try:
            body = orjson.loads(await request.read())
            text = body["policy"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise Refused("A JSON object with `policy`, TOML as text, is expected.", "policy")
        return await self._what_if.run(self._from.policy.config, text)


async def _answer(handler: Callable[[web.Request], Awaitable[Any]], request: web.Request) -> web.Response:
    """With its headers; what cannot be answered says why, in OpenAI's shape."""
    try:
        body, status = orjson.dumps(await handler(request)), 200
    except Refused as error:
        status, body = error.status, _error(error.status, str(error), None, error.param)
    except NoStore as error:
        status, body = 409, _error(409, str(error), "no_store", None)
    except Busy as error:
        status, body = 503, _error(503, str(error), "busy", None)
    return web.Response(body=body, status=status, headers=NO_STORE, content_type="application/json")


def _error(status: int, message: str, code: str | None, param: str | None) -> bytes:
    return render_body(Api.OTHER, ErrorInfo(status, message, openai_type(status), code, param))


def _text(request: web.Request, name: str) -> str:
    return request.query.get(name, "")[:MOST_TEXT]


def _number(request: web.Request, name: str, default: int | None = None) -> int | None:
    text = request.query.get(name)
    if text is None or text == "":
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise Refused(f"`{name}` is a whole number, at least 0.", name)
    return int(text)


def _one_of(request: web.Request, name: str, known: Mapping[str, object], default: str) -> str:
    text = request.query.get(name, default)
    if text not in known:
        raise Refused(f"`{name}` is one of {', '.join(known)}.", name)
    return text
