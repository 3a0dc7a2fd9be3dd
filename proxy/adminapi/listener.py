"""The door of the admin listener: who may come in, what comes out, one shape for everything that goes wrong.

Rules
1. /health and /version answer anybody who reaches the listener. Everything else wants an admin key where one is
   configured; a client's key never opens it, and one whose role is `read` changes nothing.
2. A browser on this machine may be told by any page to ask this listener: see `origins`.
3. Errors have OpenAI's shape and name the field. Secrets are masked before they get here.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import orjson
from aiohttp import web

from proxy.access import KeyRing
from proxy.adminapi.document import document
from proxy.adminapi.gear import ApiError, Call, Gear, Raw
from proxy.adminapi.routes import METRICS, ROUTES, Route
from proxy.config import Config
from proxy.config.bodies import Fault, reaches_too_far, read_body
from proxy.origins import refused_by_admin
from proxy.wire.errors import Api, ErrorInfo, openai_type, render_body
from proxy.wire.forwarded import Client, client_of, networks

log = logging.getLogger("tierline.admin")

ADMIN_KEY_NAME = "admin"
NOBODY = "without key"
MAX_BODY_BYTES = 1 << 20

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def admin_keys(config: Config) -> KeyRing:
    """Of whoever may ask, in whichever role."""
    key = config.admin.key
    keys = [(ADMIN_KEY_NAME, key.digest)] if key is not None else []
    return KeyRing(keys + [(one.name, one.digest) for one in config.admin.keys])


class Pages(Protocol):
    """Further addresses of the listener, which only show: the live page."""

    @property
    def open_paths(self) -> frozenset[str]:
        """Those that need no key."""
        ...

    def add_routes(self, app: web.Application) -> None: ...


def admin_app(gear: Gear, pages: Pages | None = None) -> web.Application:
    """The routes, with their keys and their errors."""
    door = Door(gear, pages.open_paths if pages is not None else frozenset())
    app = web.Application(middlewares=[door.guard], client_max_size=MAX_BODY_BYTES)
    routes = ROUTES + ((METRICS,) if gear.config.admin.metrics_on in ("admin", "both") else ())
    for route in routes:
        app.router.add_route(route.method, route.path, door.handler(route))

    async def openapi(request: web.Request) -> web.Response:
        return _json(document(routes, keys=bool(door.keys)))

    app.router.add_get("/openapi.json", openapi)
    if pages is not None:
        pages.add_routes(app)
    return app


class Door:
    def __init__(self, gear: Gear, open_paths: frozenset[str]) -> None:
        self._gear = gear
        self._config = gear.config
        self._keys, self._readers = admin_keys(self._config), _readers(self._config)
        self._open = open_paths | {route.path for route in ROUTES if route.open}

    @property
    def keys(self) -> KeyRing:
        """As configured now."""
        if self._config is not self._gear.config:
            self._config = self._gear.config
            self._keys, self._readers = admin_keys(self._config), _readers(self._config)
        return self._keys

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The key, and one shape for everything that goes wrong."""
        try:
            self._admit(request)
            return await handler(request)
        except ApiError as refused:
            return _error(refused.status, refused.message, refused.code, param=refused.param)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            allow = error.headers.get("Allow")
            message = f"{error.reason}: {request.method} {request.path[:200]}"
            return _error(error.status, message, None, {"Allow": allow} if allow is not None else None)
        except Exception:
            log.exception("admin request %s %r failed", request.method, request.path)
            return _error(500, "internal error", None)

    def _admit(self, request: web.Request) -> None:
        why = refused_by_admin(
            request.method,
            request.headers.get("origin"),
            request.headers.get("sec-fetch-site"),
            request.headers.get("host"),
            keyed=bool(self.keys),
            secure=self._client(request).secure,
            own=self._gear.config.admin.host,
        )
        if why is not None:
            raise ApiError(403, why, "origin_not_allowed")
        if self.keys and request.path not in self._open and self.keys.identify(request.headers) is None:
            message = "Incorrect or missing admin key: send it as `Authorization: Bearer KEY`."
            raise ApiError(401, message, "invalid_api_key")

    def _client(self, request: web.Request) -> Client:
        trusted = networks(self._gear.config.server.trusted_proxies)
        return client_of(request.remote or "", request.secure, request.raw_headers, trusted)

    def handler(self, route: Route) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            who = self.keys.identify(request.headers) or NOBODY
            if route.changes and who in self._readers:
                message = f"The admin key {who!r} may only read."
                raise ApiError(403, message, "read_only")
            params, remote = dict(request.match_info), self._client(request).address
            call = Call(who, remote, params, {}, request.headers.get("accept", ""))
            if route.body is not None:
                call.body = await self._body(route, request)
            found = await route.does(self._gear, call)
            if isinstance(found, Raw):
                return web.Response(body=found.body, headers={"Content-Type": found.content_type})
            return _json(found, route.status)

        return handle

    async def _body(self, route: Route, request: web.Request) -> dict[str, Any]:
        """As it was sent, once its model has taken it."""
        raw = await request.read()
        if not raw and route.optional:
            return {}
        if request.content_type != "application/json":
            raise ApiError(415, "Send the body as application/json.", "unsupported_media_type")
        try:
            data = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise ApiError(400, f"The body is no JSON: {error}", "invalid_json") from None
        if not isinstance(data, dict):
            raise ApiError(400, "The body must be a JSON object.", "invalid_json")
        data = {key: _whole(value) for key, value in data.items()}
        # Reading may look into files and variables, and run a policy's own Python: not for what may not be named.
        config, beyond, harmless = self._gear.config, None, data
        policy = data.get("policy")
        for path, problem in [
            *reaches_too_far(config, data),
            *(reaches_too_far(config, policy) if isinstance(policy, dict) else ()),
        ]:
            beyond = beyond or ApiError(409, f"{path}: {problem}", "not_from_here", path)
            harmless = _without(harmless, path.split("."))
        assert route.body is not None
        try:
            read_body(route.body, harmless, config, os.environ)
        except Fault as fault:
            raise ApiError(409 if fault.conflict else 400, str(fault), "invalid_body", fault.path) from None
        if beyond is not None:
            raise beyond
        return data


def _whole(value: Any) -> Any:
    """JSON knows no whole numbers: 4.0 is 4."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _whole(one) for key, one in value.items()}
    return [_whole(one) for one in value] if isinstance(value, list) else value


def _without(data: dict[str, Any], path: list[str]) -> dict[str, Any]:
    first, *rest = path
    if not rest:
        return {key: value for key, value in data.items() if key != first}
    return {**data, first: _without(data[first], rest)}


def _readers(config: Config) -> frozenset[str]:
    return frozenset(one.name for one in config.admin.keys if one.role == "read")


def _json(value: object, status: int = 200) -> web.Response:
    try:
        body = orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # a whole number of more than 64 bits
        body = json.dumps(value, indent=2, ensure_ascii=False).encode()
    return web.Response(body=body, status=status, content_type="application/json")


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
