"""From a request's bytes and headers to what routing knows of it, and to the bytes a backend gets.

Rules: the body is read once, as spans; what must change for a backend is a splice of those bytes. No field is
judged here that the gateway does not use: the backend knows its own rules.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import partial

from aiohttp import web

from policies import PromptSizes, RequestFacts, RouterParams, Tier, estimate_prompt
from policies.calibrate import UNKNOWN_ERROR, Calibration, Mix
from policies.filters import tier as tier_filter
from policies.frozen import frozen
from policies.types import ContextEstimate
from proxy.access import Caller
from proxy.attempt import Limits, Plan
from proxy.config import SESSION_HEADERS as SESSION_HEADERS
from proxy.config import Config, ModelRoute, Timeouts
from proxy.endpoints import RESPONSES_PREFIX, Body, Endpoint
from proxy.errors import Outcome, ProxyError
from proxy.local import unknown_model
from proxy.owners import Owners
from proxy.pool import Backend, Pool
from proxy.record import Record
from proxy.refusals import tier_forbidden
from proxy.stored import find_stored, previous, refuse_taken
from proxy.toolwork import ToolWork, history_edits, nudge, thinking_edits
from proxy.wire.body import BodyError
from proxy.wire.coerce import Toolset
from proxy.wire.errors import Api
from proxy.wire.mix import count_mix
from proxy.wire.multipart import Form, read_form
from proxy.wire.prefix import LINK_BYTES, NO_PREFIX, read_prefix
from proxy.wire.request import RequestBody, read_request
from proxy.wire.splice import Edit, apply, default, leaves, override
from proxy.wire.toolrender import ToolFormat

DEADLINE_HEADER = "x-tierline-deadline"
PRIORITY_HEADER = "x-tierline-priority"
MOST_SECONDS = 86_400.0
NEAR = 2.0
"""So many times the error that one estimate in ten exceeds is near a limit: there the backend's tokenizer is asked."""

TOOL_FORMATS = tuple(form.value for form in ToolFormat)

_INCLUDE_USAGE = override("stream_options.include_usage", True)
# Without include_usage it does nothing; with ours it would put usage into every chunk.
_NOT_CONTINUOUS = override("stream_options.continuous_usage_stats", False)
_STREAM_USAGE = frozenset({Api.CHAT, Api.COMPLETIONS})
_NOTHING = ContextEstimate(0, 0, 0)


@frozen
class Classified:
    """A request as routing and relay need it. body: its parsed spans; None when it has none. pinned: the backend
    that holds what the request refers to. work: what its tools mean, if it has any. mix: what its text is made of; None:
    nothing to learn from. near: a backend whose window the prompt is so near to that its tokenizer should be asked."""

    facts: RequestFacts
    route: ModelRoute
    raw: bytes
    body: RequestBody | Form | None
    pinned: str | None
    work: ToolWork | None = None
    mix: Mix | None = None
    near: str | None = None

    def output_limit(self) -> int | None:
        """Tokens of the answer, as the client limits them."""
        return self.body.max_output_tokens if isinstance(self.body, RequestBody) else None


class Classifier:
    """`calibrations`: by model, kept over reloads."""

    def __init__(
        self, config: Config, pool: Pool, owners: Owners, calibrations: dict[str, Calibration] | None = None
    ) -> None:
        self._config = config
        self.calibrations = calibrations if calibrations is not None else {}
        self._pool = pool
        self._owners = owners
        self._session_headers = config.server.session_headers
        self._allowed: dict[tuple[str, str], tuple[str, ...]] = {}
        self._edits = {name: _route_edits(route) for name, route in config.routes.items()}
        targets = [name for name, model in config.models.items() if model.alias_of is None]
        self._only = targets[0] if len(targets) == 1 else None

    def configured(self, config: Config) -> Classifier:
        """One for another configuration, with what was learned."""
        return Classifier(config, self._pool, self._owners, self.calibrations)

    def classify(
        self, endpoint: Endpoint, request: web.BaseRequest, raw: bytes, record: Record, caller: Caller
    ) -> Classified:
        """Raises ProxyError (400, 403, 404) for what the gateway has to understand and cannot, or the caller may not ask."""
        if endpoint.body is Body.NONE:
            return self._stored_response(endpoint, request, raw, record, caller)
        body: RequestBody | Form
        try:
            if endpoint.body is Body.FORM:
                body = read_form(request.headers.get("content-type", ""), raw)
                model, record.stream = body.get_str("model"), body.get_bool("stream")
            else:
                body = read_request(endpoint.api, raw)
                model, record.stream = body.model, body.stream
        except BodyError as error:
            raise bad_field(error) from None
        route = self._route(model, caller)
        work = self._tool_work(endpoint, request, body, route, caller)
        record.model, record.target = route.name, route.target
        tier = self._tier(request, route, record, caller)
        prompt, output = _NOTHING, 0
        session = next((v for name in self._session_headers if (v := request.headers.get(name))), None)
        pinned = near = mix = None
        prefix, link_tokens = NO_PREFIX, 0.0
        if isinstance(body, RequestBody):
            record.tools = body.tools
            session = session or body.session
            prompt, mix, near = self._estimate(body, route, tier, record)
            if endpoint.generates:
                output = body.max_output_tokens or self._config.policy.output_reserve_tokens
                prefix = read_prefix(body, route.target)
                if prefix.links:
                    size = body.sizes.text_bytes - body.sizes.media_bytes + body.sizes.tools_bytes
                    link_tokens = prompt.tokens * LINK_BYTES / max(size, LINK_BYTES)
            if body.previous_response_id is not None:
                pinned = previous(self._owners, body.previous_response_id, route, caller)
            if endpoint.api is Api.RESPONSES and b"request_id" in body.scan.members:
                try:
                    refuse_taken(self._owners, body.scan.get_str(b"request_id") or "", caller)
                except BodyError as error:
                    raise bad_field(error) from None
        if session is not None:
            record.session_hash = hashlib.blake2b(
                session.encode("utf-8", "replace"), digest_size=6
            ).hexdigest()
        record.prompt_tokens_estimate = prompt.tokens
        record.prompt_tokens_low, record.prompt_tokens_high = prompt.low, prompt.high
        record.conversation = _conversation(record.tenant, session, prefix.opening)
        facts = RequestFacts(
            route.name,
            tier,
            prompt,
            output,
            session,
            record.tools,
            record.stream,
            prefix.links,
            link_tokens,
            record.conversation,
            self._priority(request, caller.priority),
            record.tenant,
            self._deadline(request, record),
            None if endpoint.generates else 1.0,
        )
        return Classified(facts, route, raw, body, pinned, work, mix, near)

    def learn(self, asked: Classified, tokens: int) -> None:
        """A backend reported how many tokens the prompt has."""
        if asked.mix is not None and self._config.policy.calibrate:
            model = asked.route.target
            calibration = self.calibrations.get(model)
            if calibration is None:
                calibration = self.calibrations[model] = Calibration()
            calibration.learn(asked.mix, tokens)

    def continues(self, endpoint: Endpoint, asked: Classified) -> str:
        """How the tier lets a broken stream of this request go on elsewhere: its `continuation`."""
        facts = asked.facts
        may = facts.stream and endpoint.generates and isinstance(asked.body, RequestBody)
        return self._config.tiers[facts.tier.name].continuation if may else "off"

    def prepare(
        self,
        endpoint: Endpoint,
        asked: Classified,
        backend: Backend,
        timeouts: Timeouts,
        record: Record,
        *,
        nudged: bool = False,
    ) -> tuple[bytes, Plan]:
        """The body for this backend, and how to read its answer. nudged: it answered before, without the call."""
        served = backend.served_model or asked.route.target
        body, raw, work = asked.body, asked.raw, asked.work
        hide_usage = False
        if isinstance(body, Form):
            raw = body.replace("model", served) if body.get_str("model") != served else raw
        elif body is not None:
            edits: list[Edit] = []
            if endpoint.api is Api.CHAT:
                edits += self._chat_edits(body, work, backend, record, nudged=nudged)
            edits += self._edits[asked.route.name]
            if body.model != served:
                edits.append(override(("model",), served))
            usage = body.stream and endpoint.api in _STREAM_USAGE and not body.include_usage
            if usage and backend.spec.stream_usage:
                edits.append(_INCLUDE_USAGE)
                if b"continuous_usage_stats" in (body.scan.raw(b"stream_options") or b""):
                    edits.append(_NOT_CONTINUOUS)
                hide_usage = True
            if edits:
                try:
                    raw = apply(body.scan, edits)
                except BodyError as error:
                    raise bad_field(error) from None
        first = timeouts.first_token + timeouts.first_token_per_1k_tokens * asked.facts.prompt.tokens / 1000
        after, interval = timeouts.keepalive_after, timeouts.keepalive_interval
        limits = Limits(first, timeouts.gap, timeouts.total, timeouts.client_idle, after, interval)
        swap = self.model_swap(asked, backend)
        reader = None
        if work is not None and asked.facts.stream:
            reader = partial(work.reader, backend.spec, swap, hide_usage=hide_usage)
        return raw, Plan(endpoint.api, asked.facts.stream, hide_usage, swap, limits, reader)

    def _chat_edits(
        self, body: RequestBody, work: ToolWork | None, backend: Backend, record: Record, *, nudged: bool
    ) -> list[Edit]:
        """What this backend needs to see differently: the thinking switch, history, the tool choice."""
        try:
            edits = thinking_edits(body)
            tools = work.tools if work is not None else Toolset(None)
            words = nudge(work.choice) if work is not None and nudged else None
            changes, record.history_repairs = history_edits(
                body, tools, backend.spec.history_reasoning, words
            )
        except BodyError as error:
            raise bad_field(error) from None
        return [*edits, *changes, *(work.edits(backend.spec) if work is not None else ())]

    def model_swap(self, asked: Classified, backend: Backend) -> tuple[bytes, bytes] | None:
        """(the backend's name, the public one) where answers shall carry the public one."""
        served = backend.served_model or asked.route.target
        if asked.route.response_model != "public" or served == asked.route.name:
            return None
        return served.encode(), asked.route.name.encode()

    # -- inside -----------------------------------------------------------------------------------------------

    def _tool_work(
        self,
        endpoint: Endpoint,
        request: web.BaseRequest,
        body: RequestBody | Form,
        route: ModelRoute,
        caller: Caller,
    ) -> ToolWork | None:
        if endpoint.api is not Api.CHAT or not isinstance(body, RequestBody):
            return None
        form = request.headers.get("x-tool-format")
        if form is None:
            form = caller.tool_format
        elif form not in TOOL_FORMATS:
            message = f"Unknown tool format '{form[:100]}'; this gateway knows: {', '.join(TOOL_FORMATS)}."
            raise ProxyError(
                Outcome.BAD_REQUEST, 400, message, code="unknown_tool_format", param="x-tool-format"
            )
        try:
            return ToolWork.read(body, route, form)
        except BodyError as error:
            raise bad_field(error) from None

    def _stored_response(
        self, endpoint: Endpoint, request: web.BaseRequest, raw: bytes, record: Record, caller: Caller
    ) -> Classified:
        """GET, DELETE or cancel of a stored response: only its maker knows it."""
        ident = endpoint.path.removeprefix(RESPONSES_PREFIX).partition("/")[0]
        route, owner = find_stored(self._owners, self._config, ident, caller)
        record.model, record.target = route.name, route.target
        tier = Tier(route.tier)  # what was answered once may be read at any tier
        streams = "stream=true" in request.query_string
        facts = RequestFacts(route.name, tier, _NOTHING, 0, stream=streams, expected_output=1.0)
        record.stream = facts.stream
        return Classified(facts, route, raw, None, owner)

    def _route(self, model: str | None, caller: Caller) -> ModelRoute:
        name = model if model is not None else self._only
        if name is None:
            have = ", ".join(name for name in self._config.models if caller.sees(name))
            message = f"You must provide a model; this gateway serves: {have}."
            raise ProxyError(
                Outcome.BAD_REQUEST, 400, message, code="missing_required_parameter", param="model"
            )
        route = self._config.resolve(name)
        if route is None or not caller.sees(name):
            raise unknown_model(name)
        return route

    def _tier(self, request: web.BaseRequest, route: ModelRoute, record: Record, caller: Caller) -> Tier:
        asked = request.headers.get("x-quality-tier")
        name = asked.strip().lower() if asked is not None else route.tier
        tier = self._config.tier(name)
        if tier is None:
            have = ", ".join(self._config.tiers)
            message = f"Unknown quality tier '{name[:100]}'; this gateway knows: {have}."
            raise ProxyError(Outcome.BAD_REQUEST, 400, message, code="unknown_tier", param="x-quality-tier")
        record.tier_asked = record.tier = name
        if caller.tiers is not None and name not in caller.tiers:
            raise tier_forbidden(name, caller)
        return tier

    def _backends(self, route: ModelRoute, tier: Tier) -> tuple[str, ...]:
        """Those good enough for the tier, up or down: the configuration alone says."""
        key = route.name, tier.name
        if key not in self._allowed:
            facts = RequestFacts(route.name, tier, _NOTHING, 0)
            views = self._pool.views(route.backends)
            fit = tuple(view.name for view in views if tier_filter(facts, view, RouterParams()) is None)
            self._allowed[key] = fit
        return self._allowed[key]

    def _estimate(
        self, body: RequestBody, route: ModelRoute, tier: Tier, record: Record
    ) -> tuple[ContextEstimate, Mix | None, str | None]:
        """(estimate, what the text is made of, a backend to ask). The expected value is what was learned, within the
        bounds of the size. Words bound a prompt from below, and cost: they are counted where it seems too long for
        every window that the tier allows."""
        ratio = self._config.policy.tokens
        estimate = estimate_prompt(_prompt_sizes(body, None), ratio)
        mix, spread = None, UNKNOWN_ERROR
        if not (body.sizes.images or body.sizes.media_bytes or body.sizes.sequences > 1):
            mix = Mix(*count_mix(body))
            calibration = self.calibrations.get(route.target)
            if calibration is not None:
                expected, record.prompt_tokens_error, spread = calibration.predict(mix)
                if expected is not None:
                    tokens = min(max(estimate.low, round(expected)), estimate.high)
                    estimate = replace(estimate, tokens=tokens)
        allowed = self._backends(route, tier)
        window = self._pool.largest_window(allowed)
        if window is not None and estimate.tokens > window:
            counted = estimate_prompt(_prompt_sizes(body, body.words()), ratio)
            estimate = replace(counted, tokens=min(max(counted.low, estimate.tokens), counted.high))
        # A prompt that the server may cut is never too long.
        if body.sizes.truncates:
            return replace(estimate, low=0), None, None
        near = self._near(estimate, spread, allowed) if body.api in TOKENIZED and mix is not None else None
        return estimate, mix, near

    def _near(self, estimate: ContextEstimate, spread: float, names: tuple[str, ...]) -> str | None:
        """A backend whose window decides, and the estimate cannot tell on which side the prompt is.

        Where all windows are the same there is nothing to decide: the backend judges, in its own words.
        """
        windows = {name: self._pool.backends[name].window_tokens for name in names}
        if len(set(windows.values())) < 2:
            return None
        margin = min(NEAR * spread, 0.5) * estimate.tokens
        for name, window in windows.items():
            if window is not None and abs(estimate.tokens - window) <= margin and estimate.low <= window:
                return name
        return None

    def counted(self, asked: Classified, tokens: int, record: Record) -> Classified:
        """The tokenizer has spoken: the estimate is what it said."""
        facts = asked.facts
        prompt = ContextEstimate(tokens, tokens, tokens)
        record.prompt_tokens_estimate = record.prompt_tokens_low = record.prompt_tokens_high = tokens
        record.prompt_tokens_error = 0.0
        link_tokens = facts.link_tokens * tokens / max(1, facts.prompt.tokens)
        return replace(asked, facts=replace(facts, prompt=prompt, link_tokens=link_tokens), near=None)

    def _priority(self, request: web.BaseRequest, most: int) -> int:
        """The key's; a request may ask for less, never for more."""
        asked = request.headers.get("x-tierline-priority")
        if asked is None:
            return most
        try:
            return min(most, max(-9, int(asked)))
        except ValueError:
            raise _bad_header(PRIORITY_HEADER, "a whole number, -9 to 9") from None

    def _deadline(self, request: web.BaseRequest, record: Record) -> float | None:
        asked = request.headers.get("x-tierline-deadline")
        if asked is None:
            return None
        try:
            seconds = float(asked)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds <= MOST_SECONDS:
            raise _bad_header(DEADLINE_HEADER, "seconds until the first token, above 0")
        return record.accepted_at + seconds


TOKENIZED = frozenset({Api.CHAT, Api.COMPLETIONS})
"""Whose body vLLM's /tokenize takes as it is."""


def _conversation(tenant: str | None, session: str | None, opening: int | None) -> str | None:
    """What names a conversation: the session, else how it began. Two tenants' sessions are never one."""
    if session is None and opening is None:
        return None
    said = f"{tenant or ''}\0{session if session is not None else opening}"
    return hashlib.blake2b(said.encode("utf-8", "replace"), digest_size=6).hexdigest()


def _bad_header(name: str, what: str) -> ProxyError:
    message = f"The header {name} must be {what}."
    return ProxyError(Outcome.BAD_REQUEST, 400, message, code="bad_header", param=name)


def _prompt_sizes(body: RequestBody, words: int | None) -> PromptSizes:
    sizes = body.sizes
    text, media = sizes.text_bytes, sizes.media_bytes
    return PromptSizes(text, sizes.messages, sizes.tools_bytes, sizes.images, media, words, sizes.sequences)


def _route_edits(route: ModelRoute) -> tuple[Edit, ...]:
    """What an alias puts into a request: leaves, so that a table changes only the keys it names."""
    return tuple(
        make(path, value)
        for make, table in ((default, route.defaults), (override, route.overrides))
        for path, value in leaves(table)
    )


def bad_field(error: BodyError) -> ProxyError:
    return ProxyError(Outcome.BAD_REQUEST, 400, error.message, code="invalid_request_body", param=error.param)
