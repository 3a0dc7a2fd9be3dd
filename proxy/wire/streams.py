"""What a streamed answer says, read as it passes: content, finish, usage, errors, its proper end.

Rules
1. `feed(data)` returns the bytes to forward. What needs no change is the very object that came in.
2. One event is parsed to learn its shape; the events that follow it differ from it in one string only. So the
   bytes before and after that string are remembered (`Shape`), and an event with the same head and tail and a string
   in between is known to be a content delta without parsing it. Anything else is parsed.
3. Nothing is decided here. The reader says what it saw (`content`, `finish`, `usage`, `error`, `ended`); the relay
   decides what that means.
4. An event that is not the endpoint's shape raises `MalformedStream`: the backend's fault.
"""

from __future__ import annotations

import json
import re
from enum import IntEnum
from operator import is_
from typing import Any, NamedTuple

import orjson

from proxy.wire import patterns
from proxy.wire.sse import EventTooLong, Splitter, fields

_STRING_REST = patterns.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_INSIDE = patterns.compile(rb'[^"\\\n]*+(?:\\[^\n][^"\\\n]*+)*+')
"""The inside of a JSON string, on one line."""
_DONE = b"[DONE]"


class Inside(IntEnum):
    """Which insides of a JSON string pass unseen."""

    ANY = 0  # on one line
    TEXT = 1  # without line ends and what may open a call or code
    ASCII = 2  # printable and without escapes


FITS = (
    _INSIDE.fullmatch,
    patterns.compile(rb'[^"\\\n<`~]*+(?:\\["\\/bfrt][^"\\\n<`~]*+)*+').fullmatch,
    re.compile(rb"[ !#-\[\]-~]*+").fullmatch,
)
"""By `Inside`: of bytes, start and stop, None if what stands there must be seen."""


class MalformedStream(ValueError):
    """The backend sent something that is not an event stream of its endpoint."""


def _decode(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        try:
            return json.loads(data)  # lone surrogates, NaN: legal enough to pass on
        except (ValueError, RecursionError) as exc:
            raise MalformedStream(f"event data is not JSON: {exc}") from None


class Kept(NamedTuple):
    """What is kept of deltas that pass unseen. between: what stands between the string and the ids of its tokens, which
    stand before the tail; empty where there are no ids. ids, texts: get what stood there, as it came."""

    between: bytes
    ids: list[bytes]
    texts: list[bytes]


IDS_FIT = re.compile(rb"\d{1,18}(?:,\d{1,18})*").fullmatch
"""Ids as vLLM spells them."""


class Shape(NamedTuple):
    """Content deltas that differ in one string only: `head`, the inside of that string, `tail`.

    renamed: head and tail as the client is to see them, None: as they came. parts: gets the string where it is
    collected; it is ASCII then. kept: so that another backend could go on with the answer.
    """

    head: bytes
    tail: bytes
    renamed: tuple[bytes, bytes] | None
    inside: Inside = Inside.ANY
    parts: list[str] | None = None
    kept: Kept | None = None

    def find(self, event: bytes) -> tuple[int, int] | None:
        """Where the string of an event stands that is of this head and tail."""
        begin, end = len(self.head), len(event) - len(self.tail)
        if begin >= end or not (event.startswith(self.head) and event.endswith(self.tail)):
            return None
        return begin, end

    def forward(self, event: bytes, begin: int, end: int) -> bytes:
        """The bytes to send for an event whose string stands there."""
        if self.renamed is None:
            return event
        return self.renamed[0] + event[begin:end] + self.renamed[1]


class StreamReader:
    """Base: framing, the learned shape, the bytes to forward. Subclasses read one decoded event."""

    __slots__ = (
        "_held",
        "_shape",
        "_splitter",
        "_swap",
        "content",
        "ended",
        "error",
        "events",
        "finish_reason",
        "lacks_call",
        "notable",
        "opening",
        "response_id",
        "usage",
    )

    leaf_keys: tuple[bytes, ...] = ()
    """Keys whose string value is the changing part of a content delta."""

    def __init__(self, model_swap: tuple[bytes, bytes] | None = None) -> None:
        """model_swap: (backend's name, public name), when the answer shall carry the public one."""
        self._splitter = Splitter()
        self._shape: Shape | None = None
        self._held = False  # part of an event waits in the splitter
        self._swap = model_swap
        self.content = False
        """A content-bearing delta came since the relay last reset this."""
        self.notable = False
        """Something happened that the relay must act on: an error, an abort, the end mark."""
        self.opening = True
        """What came so far only opens the answer, a role or a name for it, and says nothing: it can be opened again."""
        self.events = 0
        """Events parsed: at least one when any came, comments not counted."""
        self.ended = False
        """The protocol's own end mark was seen ([DONE], message_stop, response.completed …)."""
        self.error: Any = None
        """The decoded payload of an error event."""
        self.lacks_call = False
        """The answer must hold a tool call, and none has begun."""
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] | None = None
        self.response_id: str | None = None

    @property
    def pending(self) -> bytes:
        return self._splitter.pending

    @property
    def passing(self) -> Shape | None:
        """The shape of what may pass without being fed, until something is fed. See rule 2."""
        return None if self._held or self.ended else self._shape

    def known(self, event: bytes) -> bytes | None:
        """The bytes to forward if this is one whole content delta of the shape last learned, else None, and then it is
        for `feed`. Sets nothing: the caller knows that content came."""
        shape = self._shape
        if shape is None or self._held or (place := shape.find(event)) is None:
            return None
        if FITS[shape.inside](event, *place) is None:
            return None
        return shape.forward(event, *place)

    def feed(self, data: bytes) -> bytes:
        """The bytes to forward for whatever came. Sets what the relay looks at: `content`, `notable` …"""
        out = self.known(data)
        if out is not None:
            self.content = True
            return out
        return self._feed(data)

    def _feed(self, data: bytes) -> bytes:
        """Any number of events, cut anywhere; not one that is `known`."""
        aligned = not self._held
        try:
            events = self._splitter.feed(data)
        except EventTooLong as exc:
            raise MalformedStream(str(exc)) from None
        self._held = False
        outs = []
        for event in events:
            if self.ended:  # not part of the answer: passes unread
                outs.append(event)
                continue
            # Several events in one read: a burst, or llama-server's habit. A lone one has been looked at.
            out = None if aligned and len(event) == len(data) else self.known(event)
            if out is None:
                out = self._event(event)
            else:
                self.content = True
            outs.append(out)
            if self.error is not None:
                break  # whatever follows an error is not part of the answer
        self._held = bool(self._splitter.pending)
        if aligned and not self._held and all(map(is_, outs, events)) and len(outs) == len(events):
            return data
        return b"".join(outs)

    def _event(self, event: bytes) -> bytes:
        """The bytes to forward for one event."""
        name, data = fields(event)
        if data is None:
            return event
        if data.startswith(_DONE):
            return self._done(event)
        payload = _decode(data)
        if not isinstance(payload, dict):
            raise MalformedStream("event data is not an object")
        self.events += 1
        if (
            payload.get("error")
            or name == b"error"
            or payload.get("object") == "error"
            or payload.get("type") == "error"
        ):
            self.error = payload
            self.notable = True
            return b""
        keep, teach = self._read(payload)
        if teach and keep:
            self._learn(event)
        return self._forward(event, payload, keep)

    def _forward(self, event: bytes, payload: dict[str, Any], keep: bool) -> bytes:
        """The bytes to send for a decoded event; keep: the client is to see it."""
        if not keep:
            return b""
        return event if self._swap is None else swap_model(event, *self._swap)

    def flush(self) -> bytes:
        """What is still held of an answer that broke off."""
        return b""

    def _done(self, event: bytes) -> bytes:
        """What to forward of a [DONE]. Nothing where it is no end mark: it would make half an answer look whole."""
        return b""

    def _read(self, payload: dict[str, Any]) -> tuple[bool, bool]:
        """Take in one event. Returns (forward it, it is a plain content delta worth learning)."""
        raise NotImplementedError

    def complete(self) -> bool:
        """True when the answer is whole, [DONE] or not."""
        raise NotImplementedError

    @property
    def aborted(self) -> bool:
        """vLLM ends what it gives up with a clean-looking finish_reason "abort"."""
        return self.finish_reason == "abort"

    def closing(self) -> bytes:
        """What a whole answer still lacks at its end."""
        return b""

    def _learn(self, event: bytes) -> None:
        for key in self.leaf_keys:
            mark = b'"%b":"' % key
            at = event.find(mark)
            if at < 0:
                continue
            at += len(mark)
            rest = _STRING_REST.match(event, at)
            if rest is None or rest.end() == at + 1:
                continue  # empty: not the leaf that carries content
            head, tail = event[:at], event[rest.end() - 1 :]
            renamed = None
            if self._swap is not None:
                renamed = swap_model(head, *self._swap), swap_model(tail, *self._swap)
            self._shape = Shape(head, tail, renamed)
            return


def swap_model(data: bytes, old: bytes, new: bytes) -> bytes:
    """Put the public name where the backend wrote its own. Inside strings quotes are escaped, so an unescaped
    `"model":"…"` is a member wherever it stands."""
    for colon in (b":", b": "):
        data = data.replace(b'"model"%b"%b"' % (colon, old), b'"model"%b"%b"' % (colon, new))
    return data


def choice_index(choice: dict[str, Any]) -> int:
    """Which choice this is; what is no number is the first one."""
    index = choice.get("index")
    return index if type(index) is int else 0


def text_of(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _only_role(delta: Any) -> bool:
    """Whether a delta has nothing in it but who speaks."""
    if not isinstance(delta, dict):
        return not delta
    return not any(value for key, value in delta.items() if key != "role")


class ChatStream(StreamReader):
    """`/v1/chat/completions`: choices[].delta, a finish_reason a choice, usage alone at the end, [DONE]."""

    __slots__ = ("_hide_usage", "finish")
    leaf_keys: tuple[bytes, ...] = (b"content", b"reasoning", b"reasoning_content", b"arguments")

    def __init__(self, model_swap: tuple[bytes, bytes] | None = None, *, hide_usage: bool = False) -> None:
        """hide_usage: the usage event was asked for by the gateway, not by the client."""
        super().__init__(model_swap)
        self._hide_usage = hide_usage
        self.finish: dict[int, str | None] = {}
        """finish_reason of every choice seen, None while it runs."""

    def _read(self, payload: dict[str, Any]) -> tuple[bool, bool]:
        choices = payload.get("choices")
        usage = payload.get("usage")
        if usage:
            self.usage = usage
        if self.response_id is None:
            self.response_id = text_of(payload.get("id"))
        if not choices:
            if choices is None and usage is None:
                raise MalformedStream("a chunk without choices")
            return not (usage and self._hide_usage), False
        if not isinstance(choices, list):
            raise MalformedStream("choices are not a list")
        plain, says = len(choices) == 1 and not usage, not self.opening
        for choice in choices:
            try:
                index = choice_index(choice)
                finish = choice.get("finish_reason")
                if self._has_content(choice):
                    self.content = says = True
                else:
                    plain = False
                    says = says or bool(finish) or not _only_role(choice.get("delta"))
            except (AttributeError, TypeError):
                raise MalformedStream("a choice is not an object") from None
            if finish is not None and not isinstance(finish, str):
                raise MalformedStream("a finish_reason is not a string")
            if finish == "abort":
                # vLLM's clean-looking end of what it gives up; see `aborted`.
                self.finish[index] = self.finish_reason = finish
                self.notable = True
                return False, False
            if finish:
                plain = False
                self.finish[index] = self.finish_reason = finish
            else:
                plain = plain and finish is None
                self.finish.setdefault(index, None)
        self.opening = not says
        return True, plain

    def _has_content(self, choice: dict[str, Any]) -> bool:
        delta = choice.get("delta")
        if not delta:
            return False
        return bool(
            delta.get("content")
            or delta.get("reasoning")
            or delta.get("reasoning_content")
            or delta.get("tool_calls")
            or delta.get("refusal")
            or delta.get("function_call")
            or delta.get("audio")
        )

    @property
    def aborted(self) -> bool:
        return super().aborted or "abort" in self.finish.values()

    def complete(self) -> bool:
        return bool(self.finish) and None not in self.finish.values() and not self.aborted

    def _done(self, event: bytes) -> bytes:
        self.events += 1
        self.ended = self.notable = True
        return event if self.complete() else b""

    def closing(self) -> bytes:
        return b"" if self.ended else b"data: [DONE]\n\n"


class CompletionsStream(ChatStream):
    """`/v1/completions`: choices[].text."""

    __slots__ = ()
    leaf_keys = (b"text",)

    def _has_content(self, choice: dict[str, Any]) -> bool:
        return bool(choice.get("text"))
