"""What the tools of a chat request mean for one backend: what it is sent in their place, and what its answer goes through.

Rules
1. A request is read once (`ToolWork.read`); what depends on the backend is asked for per attempt. A request without
   tools, without a wish about the shape and with thinking on needs none of this and gets None.
2. Only what has to change is spliced: a repaired message replaces that message's bytes, `tool_choice` its value.
3. Whether an answer lacks the call that it must hold is told to the handler; asking again is its business.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import orjson

from proxy.config import ModelRoute
from proxy.pool import BackendSpec
from proxy.wire.body import BodyError, Kind, items
from proxy.wire.chatdelta import ChatShape, repair_choice
from proxy.wire.coerce import Toolset
from proxy.wire.request import RequestBody
from proxy.wire.splice import Edit, default, override
from proxy.wire.streams import MalformedStream
from proxy.wire.toolcalls import FinishedCall, ToolChoice, ToolEngine
from proxy.wire.toolevents import Counters
from proxy.wire.toolrender import ToolFormat
from proxy.wire.toolrequest import HistoryRepairs, repair_history
from proxy.wire.toolstream import ToolChatStream, dumps

_REASONING: Mapping[str, tuple[str, ...]] = {
    "backend": (),
    "reasoning": ("reasoning",),
    "reasoning_content": ("reasoning_content",),
    "both": ("reasoning", "reasoning_content"),
}
_TOOL_MARK = b'"tool'
"""Begins every key and role by which a message says that it has to do with tools."""
_BLANK = re.compile(r"[\s,]*")
_END = re.compile(rb"\s*\]")
_ENABLE_THINKING = ("chat_template_kwargs", "enable_thinking")
_EFFORT = {"none": False, "minimal": False, "low": True, "medium": True, "high": True, "xhigh": True}


KEPT_TOOLSETS, MAX_KEPT_BYTES = 32, 64 * 1024
"""How many lists of tools are kept compiled, and how long their text may be: some ten megabytes at most."""


def new_id() -> str:
    return "call_" + secrets.token_hex(12)


@dataclass(frozen=True, slots=True)
class ToolWork:
    """The tools of one request. form, reasoning: how calls and thinking leave. thinking: as asked for; None: the
    backend's default."""

    body: RequestBody
    tools: Toolset
    choice: ToolChoice
    form: ToolFormat
    reasoning: tuple[str, ...]
    thinking: bool | None

    @classmethod
    def read(cls, body: RequestBody, route: ModelRoute, form: str | None) -> ToolWork | None:
        """form: what the request or its key asks for, else the model's. Raises BodyError for tools that no backend
        could read."""
        wanted = ToolFormat(form or route.tool_format)
        reasoning = _REASONING[route.reasoning]
        thinking = _thinking(body, route)
        if not body.tools and not reasoning and thinking is not False:
            return None
        tools = _toolset(body) if body.tools else _NO_TOOLS
        return cls(
            body, tools, ToolChoice.read(_value(body, b"tool_choice"), tools), wanted, reasoning, thinking
        )

    def must_call(self, backend: BackendSpec) -> bool:
        """The gateway itself sees to it that the answer holds a call."""
        return (
            self.choice.mode in ("required", "named") and bool(self.tools.by_name) and backend.enforces_choice
        )

    def is_demanded(self, call: FinishedCall) -> bool:
        """A call of the tool that was named, where one was."""
        return self.choice.named is None or call.name == self.choice.named.name

    def edits(self, backend: BackendSpec) -> list[Edit]:
        """What this backend is sent in place of the request's tool_choice."""
        if not self.tools.by_name or self.choice.mode == "none":
            return []
        if backend.parser == "none":
            return [override(("tool_choice",), "none")]
        return [override(("tool_choice",), "auto")] if self.must_call(backend) else []

    def _engine(self, backend: BackendSpec, exact: bool) -> ToolEngine:
        choice = self.choice
        if self.must_call(backend):
            choice = (
                ToolChoice()
            )  # it was asked as "auto": the answer is the model's own text, not guided JSON
        return ToolEngine(
            self.tools,
            choice,
            new_id,
            starts_thinking=backend.reasoning_parser == "none" and self.thinking is not False,
            reasoning_is_content=self.thinking is False,
            exact=exact,
        )

    def _shape(self) -> ChatShape:
        return ChatShape(self.form, self.reasoning)

    def reader(
        self, backend: BackendSpec, model_swap: tuple[bytes, bytes] | None, *, hide_usage: bool
    ) -> ToolChatStream:
        return ToolChatStream(
            lambda exact: self._engine(backend, exact),
            self._shape(),
            model_swap,
            hide_usage=hide_usage,
            demanded=self.is_demanded if self.must_call(backend) else None,
        )

    def whole(self, backend: BackendSpec, raw: bytes) -> WholeAnswer:
        """A whole answer put right; its bytes stay where nothing changes."""
        try:
            answer = json.loads(raw)
            choices = answer["choices"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return WholeAnswer(raw)
        if not isinstance(choices, list):
            return WholeAnswer(raw)
        try:
            return self._put_right(backend, raw, answer, choices)
        except (RecursionError, MalformedStream):  # nests deeper than anything that could be a call
            return WholeAnswer(raw, lacks_call=self.must_call(backend))

    def _put_right(
        self, backend: BackendSpec, raw: bytes, answer: dict[str, Any], choices: list[Any]
    ) -> WholeAnswer:
        engines, put_right = [], []
        for choice in choices:
            engine = self._engine(backend, self.form is ToolFormat.OPENAI)
            engines.append(engine)
            put_right.append(
                repair_choice(engine, choice, self._shape()) if isinstance(choice, dict) else choice
            )
        counters = Counters()
        for engine in engines:
            counters.add(engine.counters)
        calls = [call for engine in engines for call in engine.calls]
        lacks = self.must_call(backend) and not any(
            call.complete and self.is_demanded(call) for call in calls
        )
        if any(new is not old for new, old in zip(put_right, choices, strict=True)):
            raw = dumps({**answer, "choices": put_right})
        return WholeAnswer(raw, counters, calls, lacks)


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """lacks_call: it had to hold one."""

    body: bytes
    counters: Counters = field(default_factory=Counters)
    calls: list[FinishedCall] = field(default_factory=list)
    lacks_call: bool = False


def raw_engine(work: ToolWork | None, thinks: bool) -> ToolEngine:
    """For text as the model wrote it, of a backend that was not asked to parse it. thinks: it begins inside thinking."""
    armed = work is not None and work.choice.mode != "none"
    tools = work.tools if work is not None and armed else Toolset(None)
    engine = ToolEngine(tools, ToolChoice(), new_id, starts_thinking=thinks)
    engine.armed = True  # also without tools: thinking is to be told apart
    return engine


def rest_engine(work: ToolWork | None, exact: bool) -> ToolEngine:
    """For what follows a text that has begun, behind the thinking, of a backend that may have parsed it."""
    if work is None:
        return ToolEngine(_NO_TOOLS, ToolChoice(), new_id, exact=exact)
    choice = work.choice if work.choice.mode == "none" else ToolChoice()
    return ToolEngine(work.tools, choice, new_id, exact=exact)


# -- thinking ------------------------------------------------------------------------------------------------


def _thinking(body: RequestBody, route: ModelRoute) -> bool | None:
    """Whether the model will think: an override's word, the client's, a default's; None: nobody said."""
    for table in (route.overrides,):
        if (said := _enabled(table)) is not None:
            return said
    if body.scan.kind(b"chat_template_kwargs") is Kind.OBJECT:
        kwargs = body.scan.get_object(b"chat_template_kwargs")
        if kwargs is not None and (kind := kwargs.kind(b"enable_thinking")) in (Kind.TRUE, Kind.FALSE):
            return kind is Kind.TRUE
    said = switch(body)
    return said if said is not None else _enabled(route.defaults)


def _enabled(table: Mapping[str, object]) -> bool | None:
    kwargs = table.get("chat_template_kwargs")
    said = kwargs.get("enable_thinking") if isinstance(kwargs, Mapping) else None
    return said if isinstance(said, bool) else None


def switch(body: RequestBody) -> bool | None:
    """The client's thinking switch in any dialect but Qwen's own, which the backend reads itself."""
    scan = body.scan
    if (kind := scan.kind(b"enable_thinking")) in (Kind.TRUE, Kind.FALSE):
        return kind is Kind.TRUE
    if scan.kind(b"thinking") is Kind.OBJECT:
        thinking = scan.get_object(b"thinking")
        said = thinking.raw(b"type") if thinking is not None else None
        if said in (b'"disabled"', b'"enabled"', b'"adaptive"'):
            return said != b'"disabled"'
    if scan.kind(b"reasoning_effort") is Kind.STRING:
        return _EFFORT.get(scan.get_str(b"reasoning_effort") or "")
    return None


def thinking_edits(body: RequestBody) -> list[Edit]:
    """The switch as Qwen's template reads it, where the client used another dialect."""
    if not any(key in body.scan.members for key in (b"enable_thinking", b"thinking", b"reasoning_effort")):
        return []
    said = switch(body)
    return [] if said is None else [default(_ENABLE_THINKING, said)]


# -- history -------------------------------------------------------------------------------------------------


def history_edits(
    body: RequestBody, tools: Toolset, reasoning: str | None, nudge: str | None
) -> tuple[list[Edit], HistoryRepairs | None]:
    """The messages as this backend can take them: repaired, and with the nudge behind them."""
    span = body.scan.span(b"messages")
    repairs: HistoryRepairs | None = None
    if span is None or body.scan.kind(b"messages") is not Kind.ARRAY:
        return [], None
    looks = body.scan.holds(b"messages", _TOOL_MARK)
    looks = looks or (reasoning is not None and body.scan.holds(b"messages", b'"reasoning'))
    if not looks and nudge is None:
        return [], None
    raw = body.scan.data[span[0] : span[1]]
    pieces: dict[int, bytes] = {}
    if looks:
        messages = _decode(raw)
        try:
            changed, done = repair_history(messages, tools, new_id, reasoning=reasoning)
            pieces = {
                place: dumps(new)
                for place, (new, old) in enumerate(zip(changed, messages, strict=True))
                if new is not old
            }
        except (RecursionError, MalformedStream):
            raise BodyError("messages nest too deep", "messages") from None
        repairs = done if done.total() else None
    if not pieces and nudge is None:
        return [], repairs
    return [Edit((b"messages",), _respell(raw, pieces, nudge))], repairs


def _respell(raw: bytes, pieces: Mapping[int, bytes], nudge: str | None) -> bytes:
    """The array with some elements replaced and one more at its end; every other byte as it came."""
    spans = _elements(raw)
    out: list[bytes] = []
    at = 0
    for place, new in sorted(pieces.items()):
        start, stop = spans[place]
        out += (raw[at:start], new)
        at = stop
    if nudge is not None:
        end = spans[-1][1] if spans else 1
        comma = b"," if spans else b""
        out += (raw[at:end], comma, dumps({"role": "user", "content": nudge}))
        at = end
    out.append(raw[at:])
    return b"".join(out)


def _elements(raw: bytes) -> list[tuple[int, int]]:
    """Offsets of all elements of an array, also of those that nest deeper than `items` goes."""
    spans = items(raw, (0, len(raw)))
    if _END.fullmatch(raw, spans[-1][1] if spans else 1):
        return spans
    text = raw.decode("latin-1")  # what JSON is made of is ASCII: offsets are those of the bytes
    read, spans, at = json.JSONDecoder(strict=False).raw_decode, [], 1
    try:
        while True:
            at = _BLANK.match(text, at).end()  # type: ignore[union-attr]
            if text.startswith("]", at):
                break
            _, end = read(text, at)
            spans.append((at, end))
            at = end
    except (ValueError, RecursionError):
        raise BodyError("messages is not valid JSON, or nests too deep", "messages") from None
    return spans


def nudge(choice: ToolChoice) -> str:
    """What a model is told that answered in words where it had to call a tool."""
    if choice.named is not None:
        return f"Do not answer in words. Call the tool `{choice.named.name}` now."
    return "Do not answer in words. Call one of the available tools now."


_NO_TOOLS = Toolset(None)


def _toolset(body: RequestBody) -> Toolset:
    """An agent sends the same tools with every turn: the last ones are kept, by their bytes."""
    raw = body.scan.raw(b"tools")
    if raw is None or raw == b"null":
        return _NO_TOOLS
    return _compiled(raw) if len(raw) <= MAX_KEPT_BYTES else Toolset(_decode(raw, "tools"))


@lru_cache(maxsize=KEPT_TOOLSETS)
def _compiled(raw: bytes) -> Toolset:
    return Toolset(_decode(raw, "tools"))


def _value(body: RequestBody, key: bytes) -> Any:
    raw = body.scan.raw(key)
    if raw is None or raw == b"null":
        return None
    return _decode(raw, key.decode())


def _decode(raw: bytes, name: str = "messages") -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            raise BodyError(f"{name} is not valid JSON", name) from None
