"""What the gateway answers itself on the data side: is it alive, can it serve, which models, which metrics."""

from __future__ import annotations

from collections.abc import Callable

import orjson

from policies import BackendView, DropReason, RequestFacts, RouterParams, drop_reason
from policies.types import ContextEstimate
from proxy import __version__
from proxy.access import ANYBODY, Caller
from proxy.clock import Clock
from proxy.config import Config, ModelRoute
from proxy.endpoints import MODELS
from proxy.errors import Outcome, ProxyError
from proxy.pool import Pool
from proxy.upstream import Headers

Page = tuple[int, Headers, bytes]
_JSON = (b"content-type", b"application/json")
_NOTHING = ContextEstimate(0, 0, 0)
# What passes by itself or is nobody's fault: a full backend is still able to serve.
_PASSING = frozenset({DropReason.FULL, DropReason.KV_FULL, DropReason.SUSPECT})


class Local:
    """Pages by path. `metrics`: gives the exposition, or None when metrics are on the admin side only."""

    def __init__(
        self, config: Config, pool: Pool, clock: Clock, metrics: Callable[[str], tuple[bytes, str]] | None
    ) -> None:
        self._config = config
        self._pool = pool
        self._metrics = metrics
        self._started = int(clock.wall())
        self.draining = False

    def configure(self, config: Config) -> None:
        """Other models or tiers from now on."""
        self._config = config

    def owns(self, path: str) -> bool:
        if path == "/metrics":
            return self._metrics is not None
        return path in ("/health", "/ready", "/version", MODELS) or path.startswith(MODELS + "/")

    def page(self, method: str, path: str, caller: Caller = ANYBODY, accept: str = "") -> Page:
        """Raises ProxyError for a wrong method or an unknown model. Who may not see a model does not see it here."""
        if method not in ("GET", "HEAD"):
            raise ProxyError(
                Outcome.BAD_REQUEST,
                405,
                f"{path} takes GET, not {method}.",
                code="method_not_allowed",
                headers=(("allow", "GET, HEAD"),),
            )
        if path == "/health":
            return 200, [_JSON], b'{"status":"ok"}'
        if path == "/version":
            return 200, [_JSON], orjson.dumps({"version": __version__})
        if path == "/ready":
            return self._ready()
        if path == "/metrics" and self._metrics is not None:
            body, content_type = self._metrics(accept)
            return 200, [(b"content-type", content_type.encode())], body
        if path == MODELS:
            data = [self._model(route) for route in self._config.routes.values() if caller.sees(route.name)]
            return 200, [_JSON], orjson.dumps({"object": "list", "data": data})
        name = path.removeprefix(MODELS + "/")
        route = self._config.resolve(name)
        if route is None or not caller.sees(name):
            raise unknown_model(name)
        return 200, [_JSON], orjson.dumps(self._model(route))

    def _able(self, route: ModelRoute) -> tuple[list[BackendView], dict[str, str]]:
        """Backends that may serve the route at its own tier now, and why the others may not."""
        tier = self._config.tier(route.tier)
        assert tier is not None
        facts = RequestFacts(route.name, tier, _NOTHING, 0)
        able, reasons = [], {}
        for view in self._pool.views(route.backends):
            reason = drop_reason(facts, view, RouterParams())
            if reason is None or reason in _PASSING:
                able.append(view)
            else:
                reasons[view.name] = reason.value
        return able, reasons

    def _ready(self) -> Page:
        models: dict[str, object] = {}
        ready = not self.draining
        for name, route in self._config.routes.items():
            able, reasons = self._able(route)
            models[name] = {"ready": bool(able), "backends": [view.name for view in able], "not": reasons}
            ready = ready and bool(able)
        body = {
            "status": "ready" if ready else "draining" if self.draining else "not ready",
            "models": models,
        }
        return 200 if ready else 503, [_JSON], orjson.dumps(body)

    def _model(self, route: ModelRoute) -> dict[str, object]:
        able, _ = self._able(route)
        views = able or list(self._pool.views(route.backends))
        windows = [view.window_tokens for view in views if view.window_tokens]
        return {
            "id": route.name,
            "object": "model",
            "created": self._started,
            "owned_by": "tierline",
            "root": route.target,
            "parent": None,
            "max_model_len": max(windows) if windows else None,
            "tier": route.tier,
        }


def unknown_model(name: str) -> ProxyError:
    return ProxyError(
        Outcome.BAD_REQUEST,
        404,
        f"The model `{name[:200]}` does not exist.",
        type="invalid_request_error",
        code="model_not_found",
        param="model",
    )
