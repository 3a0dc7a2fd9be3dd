"""Asking a backend how many tokens a prompt has: only near a limit, for it costs what reading the prompt costs.

Rules: the request's own body goes to /tokenize, with the backend's name for the model. One short deadline; whatever does
not answer it is an estimate kept, never an error. A backend without the path is not asked again for a while.
"""

from __future__ import annotations

from proxy.aside import post
from proxy.classify import Classified
from proxy.clock import Clock
from proxy.pool import Backend
from proxy.wire.errors import Api
from proxy.wire.request import RequestBody
from proxy.wire.splice import apply, override

PATH = b"/tokenize"
TIMEOUT = 2.0
ASK_AGAIN_SECONDS = 300.0


class Tokenizer:
    """`count` gives the tokens, or None where nobody can say."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._without: dict[tuple[str, str | None], float] = {}
        self.asked = 0

    async def count(self, backend: Backend, api: Api, asked: Classified) -> int | None:
        now = self._clock.now()
        body = asked.body
        if not isinstance(body, RequestBody) or now < self._without.get(backend.spec.server, 0.0):
            return None
        if not backend.health.healthy:
            return None
        self.asked += 1
        model = backend.served_model or asked.route.target
        raw = apply(body.scan, [override(("model",), model)]) if body.model != model else asked.raw
        tokens = _count(await post(self._clock, backend, PATH, raw, TIMEOUT))
        if tokens is None:
            self._without[backend.spec.server] = self._clock.now() + ASK_AGAIN_SECONDS
        return tokens


def _count(answer: object) -> int | None:
    count = answer.get("count") if isinstance(answer, dict) else None
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else None
