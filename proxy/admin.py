"""The operator's window: an aiohttp application for the admin listener.

Rules: /health and /version answer anybody who reaches the listener, everything else wants the admin key when one
is configured; a key of a client never opens it. Secrets are masked before they get here. Every change is logged
with who asked and what changed. Errors have OpenAI's shape, like everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import orjson
from aiohttp import web

from proxy import __version__
from proxy.access import KeyRing
from proxy.config import Config, effective
from proxy.explain import Memory
from proxy.origins import refused_by_admin
from proxy.reload import Reloaded
from proxy.wire.errors import Api, ErrorInfo, openai_type, render_body
from proxy.wire.forwarded import Client, client_of, networks

log = logging.getLogger("tierline.admin")

ADMIN_KEY_NAME = "admin"
_OPEN = frozenset({"/health", "/version"})

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PoolAdmin(Protocol):
    """What the pool does for an operator."""

    def snapshot(self) -> Sequence[Mapping[str, object]]:
        """One mapping a backend, the view that routing has of it."""
        ...

    def set_draining(self, name: str, draining: bool) -> None:
        """Raises KeyError for a name that is not configured."""
        ...


class Exposition(Protocol):
    def render(self, accept: str = "") -> tuple[bytes, str] | Awaitable[tuple[bytes, str]]:
        """At once, or when it has been gathered from other processes."""
        ...


class PolicyAdmin(Protocol):
    """What is in force, and how to change it."""

    config: Config

    def reload(self, why: str) -> Reloaded: ...


class Stories(Protocol):
    def find(self, request_id: str) -> dict[str, object] | None: ...


class Pages(Protocol):
    """Further addresses of the listener: the live page."""

    @property
    def open_paths(self) -> frozenset[str]:
        """Those that need no key."""
        ...

    def add_routes(self, app: web.Application) -> None: ...


@dataclass(slots=True)
class Unchanging:
    """A configuration that did not come from a file."""

    config: Config

    def reload(self, why: str) -> Reloaded:
        return Reloaded(self.config.policy_digest, (), ("the configuration did not come from a file",))


def admin_app(
    config: Config,
    pool: PoolAdmin,
    metrics: Exposition,
    policy: PolicyAdmin | None = None,
    stories: Stories | None = None,
    pages: Pages | None = None,
) -> web.Application:
    """The routes, with their key and their errors."""
    open_paths = _OPEN if pages is None else _OPEN | pages.open_paths
    admin = Admin(pool, metrics, policy or Unchanging(config), stories or Memory(), open_paths)
    app = web.Application(middlewares=[admin.guard])
    app.router.add_get("/health", admin.health)
    app.router.add_get("/version", admin.version)
    app.router.add_get("/admin/backends", admin.backends)
    app.router.add_get("/admin/config", admin.config)
    app.router.add_post("/admin/reload", admin.reload)
    app.router.add_get("/admin/explain/{request_id}", admin.explain)
    app.router.add_post("/admin/backends/{name}/drain", admin.drain)
    app.router.add_post("/admin/backends/{name}/undrain", admin.undrain)
    if config.admin.metrics_on in ("admin", "both"):
        app.router.add_get("/metrics", admin.metrics)
    if pages is not None:
        pages.add_routes(app)
    return app


class Admin:
    """The handlers. Bodies are JSON, but for /metrics."""

    def __init__(
        self,
        pool: PoolAdmin,
        metrics: Exposition,
        policy: PolicyAdmin,
        stories: Stories,
        open_paths: frozenset[str] = _OPEN,
    ) -> None:
        self._open_paths = open_paths
        self._policy = policy
        self._stories = stories
        self._pool = pool
        self._metrics = metrics
        self._ring = admin_keys(policy.config), policy.config

    @property
    def _keys(self) -> KeyRing:
        """As configured now."""
        ring, config = self._ring
        if config is not self._policy.config:
            config = self._policy.config
            ring, _ = self._ring = admin_keys(config), config
        return ring

    def _client(self, request: web.Request) -> Client:
        trusted = networks(self._policy.config.server.trusted_proxies)
        return client_of(request.remote or "", request.secure, request.raw_headers, trusted)

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The key, and one shape for everything that goes wrong."""
        client = self._client(request)
        why = refused_by_admin(
            request.method,
            request.headers.get("origin"),
            request.headers.get("sec-fetch-site"),
            request.headers.get("host"),
            keyed=bool(self._keys),
            secure=client.secure,
            own=self._policy.config.admin.host,
        )
        if why is not None:
            return _error(403, why, "origin_not_allowed")
        if (
            self._keys
            and request.path not in self._open_paths
            and self._keys.identify(request.headers) is None
        ):
            message = "Incorrect or missing admin key: send it as `Authorization: Bearer KEY`."
            return _error(401, message, "invalid_api_key")
        try:
            return await handler(request)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            allow = error.headers.get("Allow")
            message = f"{error.reason}: {request.method} {request.path[:200]}"
            return _error(error.status, message, None, {"Allow": allow} if allow is not None else None)
        except Exception:
            log.exception("admin request %s %r failed", request.method, request.path)
            return _error(500, "internal error", None)

    async def health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def version(self, request: web.Request) -> web.Response:
        return _json({"version": __version__})

    async def backends(self, request: web.Request) -> web.Response:
        return _json({"backends": list(self._pool.snapshot())})

    async def config(self, request: web.Request) -> web.Response:
        return _json({**effective(self._policy.config), "policy_digest": self._policy.config.policy_digest})

    async def reload(self, request: web.Request) -> web.Response:
        who = self._keys.identify(request.headers) or "without key"
        done = self._policy.reload(f"asked by {who} from {self._client(request).address}")
        if done.problems:
            return _error(409, "; ".join(done.problems), "config_refused")
        return _json({"policy": done.policy, "changed": list(done.changed)})

    async def explain(self, request: web.Request) -> web.Response:
        ident = request.match_info["request_id"]
        story = self._stories.find(ident)
        if story is None:
            message = f"Nothing is remembered of request {ident[:200]!r}: only the last ones are."
            return _error(404, message, "request_not_found", param="request_id")
        return _json(story)

    async def metrics(self, request: web.Request) -> web.Response:
        found = self._metrics.render(request.headers.get("accept", ""))
        body, content_type = found if isinstance(found, tuple) else await found
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def drain(self, request: web.Request) -> web.Response:
        return self._set_draining(request, True)

    async def undrain(self, request: web.Request) -> web.Response:
        return self._set_draining(request, False)

    def _set_draining(self, request: web.Request, draining: bool) -> web.Response:
        name = request.match_info["name"]
        before = self._find(name)
        if before is None:
            return _error(404, f"No backend is named {name[:200]!r}.", "backend_not_found", param="name")
        self._pool.set_draining(name, draining)
        after = self._find(name)
        who = self._keys.identify(request.headers) or "without key"
        log.warning(
            "backend %s: draining %s -> %s, by %s from %s",
            name,
            before.get("draining"),
            draining,
            who,
            self._client(request).address,
        )
        return _json(after)

    def _find(self, name: str) -> Mapping[str, object] | None:
        return next((backend for backend in self._pool.snapshot() if backend["name"] == name), None)


def admin_keys(config: Config) -> KeyRing:
    key = config.admin.key
    return KeyRing([(ADMIN_KEY_NAME, key.digest)] if key is not None else [])


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(
        body=orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE),
        status=status,
        content_type="application/json",
    )


def _error(
    status: int,
    message: str,
    code: str | None,
    headers: Mapping[str, str] | None = None,
    *,
    param: str | None = None,
) -> web.Response:
    info = ErrorInfo(status, message, openai_type(status), code, param)
    return web.Response(
        body=render_body(Api.OTHER, info), status=status, content_type="application/json", headers=headers
    )
