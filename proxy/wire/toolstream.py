"""A chat stream with the tool-call engine in it: the same reader, and what it forwards is in one correct shape.

Rules
1. What the engine passes leaves as the bytes that came. What it changes is encoded anew, that event only.
2. The learned shape (see `streams`) saves the parsing, not the engine: the text of a known delta goes straight to it,
   unless the engine said that such text changes nothing (`passing`).
3. A choice's last chunk waits for the next event, since only the last finish_reason counts; `closing` and `flush`
   send what waits. `flush` is for a stream that broke: it completes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import orjson

from proxy.wire.chatdelta import ChatShape
from proxy.wire.chatdelta import ChatStream as Repair
from proxy.wire.streams import ChatStream, MalformedStream, Shape, choice_index, swap_model
from proxy.wire.toolcalls import FinishedCall, ToolEngine
from proxy.wire.toolevents import Counters, Event, Pass

_LEAVES = {b'"%b":"' % key: key.decode() for key in ChatStream.leaf_keys}


class ToolChatStream(ChatStream):
    """`/v1/chat/completions` with tools, or with an answer that has to be put right."""

    __slots__ = ("_demanded", "_end", "_free", "_index", "_leaf", "_repair", "_say", "_slot", "_withheld")

    def __init__(
        self,
        new_engine: Callable[[bool], ToolEngine],
        shape: ChatShape,
        model_swap: tuple[bytes, bytes] | None = None,
        *,
        hide_usage: bool = False,
        demanded: Callable[[FinishedCall], bool] | None = None,
    ) -> None:
        """new_engine: an engine for one more choice; its argument: parsed deltas may pass. demanded: what
        must be called; nothing leaves before such a call begins, and an answer without one is not whole."""
        super().__init__(model_swap, hide_usage=hide_usage)
        self._repair = Repair(new_engine, shape)
        self.lacks_call = demanded is not None
        self._demanded = demanded
        self._withheld: list[bytes] = []
        self._end = b""
        self._say: Callable[[str], list[Event] | Pass | None] | None = None  # takes the text of a known delta
        self._free: Shape | None = None  # what `passing` said last
        self._leaf = ""  # its key
        self._index = 0  # its choice
        self._slot = -1  # its tool call

    @property
    def engines(self) -> list[ToolEngine]:
        return [state.engine for state in self._repair.choices.values()]

    @property
    def calls(self) -> list[FinishedCall]:
        return [call for engine in self.engines for call in engine.calls]

    def counters(self) -> Counters:
        """What was seen and done in all choices."""
        total = Counters()
        for engine in self.engines:
            total.add(engine.counters)
        return total

    @property
    def passing(self) -> Shape | None:
        shape = super().passing
        state = self._repair.choices.get(self._index)
        if shape is None or self._say is None or self.lacks_call or self._repair.waiting or state is None:
            return None
        free = state.engine.unseen(self._leaf, self._slot)
        if free is None:
            return None
        found = self._free
        if (
            found is None
            or found[:2] != shape[:2]
            or found.inside is not free[0]
            or found.parts is not free[1]
        ):
            found = self._free = shape._replace(inside=free[0], parts=free[1])
        return found

    def known(self, event: bytes) -> bytes | None:
        shape, say = self._shape, self._say
        if (
            shape is None
            or say is None
            or self._held
            or self.lacks_call
            or self._repair.waiting
            or (place := shape.find(event)) is None
        ):
            return None
        text = _text_of(event[place[0] : place[1]])
        found = say(text) if text else None
        if found is None:
            return None
        if isinstance(found, Pass):
            return shape.forward(event, *place)
        # `say` has taken the text: there is no way back to `feed` from here.
        return self._encode(self._repair.said(self._index, found))

    def feed(self, data: bytes) -> bytes:
        lacked = self.lacks_call
        out = super().feed(data)
        if not lacked:
            return out
        self._withheld.append(out)
        if not self._called():
            self.content = False  # nobody has seen it yet
            return b""
        return self._release()

    def complete(self) -> bool:
        if not super().complete():
            return False
        if self.lacks_call:
            # All choices have ended: a call that only the end makes of what was held is made now.
            self._end += self._encode(self._repair.close())
        return not self.lacks_call or self._called()

    def _called(self) -> bool:
        return self._demanded is None or any(map(self._demanded, self.calls))

    def _release(self) -> bytes:
        self.lacks_call = False
        out = b"".join(self._withheld)
        self._withheld.clear()
        self.content = self.content or bool(out)
        return out

    def _forward(self, event: bytes, payload: dict[str, Any], keep: bool) -> bytes:
        try:
            found = self._repair.feed(payload, event if keep else b"")
        except RecursionError:
            raise MalformedStream("event data nests too deep") from None
        if isinstance(found, Pass):
            return super()._forward(event, payload, keep)
        return self._encode(found)

    def _learn(self, event: bytes) -> None:
        super()._learn(event)
        head = self._shape.head if self._shape is not None else b""
        self._leaf = next((name for mark, name in _LEAVES.items() if head.endswith(mark)), "")
        self._say = self._repair.short_way(self._index, self._leaf, self._slot)

    def _read(self, payload: dict[str, Any]) -> tuple[bool, bool]:
        keep, teach = super()._read(payload)
        if teach:
            choice = payload["choices"][0]
            delta = choice["delta"]
            calls = delta.get("tool_calls")
            # What is learned is one text and nothing beside it: oddities are the engine's to see, each time.
            if len(delta) != 1 or (calls and not _only_arguments(calls)):
                return keep, False
            self._index, self._slot = choice_index(choice), calls[0]["index"] if calls else -1
        return keep, teach

    def _done(self, event: bytes) -> bytes:
        done = super()._done(event)
        return self._take_end() + done if done else b""

    def closing(self) -> bytes:
        end = b"" if self.ended else self._take_end()  # else it went out before [DONE]
        return self._release() + end + super().closing()

    def _take_end(self) -> bytes:
        """What the end of the choices makes of what was held."""
        end, self._end = self._end, b""
        return end + self._encode(self._repair.close())

    def flush(self) -> bytes:
        return b"" if self.lacks_call else self._encode(self._repair.cut())

    def _encode(self, found: Iterable[object]) -> bytes:
        parts = []
        for item in found:
            if isinstance(item, bytes):
                parts.append(item if self._swap is None else swap_model(item, *self._swap))
            elif isinstance(item, dict):
                self._seen(item)
                parts.append(b"data: %b\n\n" % dumps(item, self._swap))
        return b"".join(parts)

    def _seen(self, chunk: dict[str, Any]) -> None:
        """The reason that was sent is the one to record."""
        for choice in chunk.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


def _text_of(leaf: bytes) -> str | None:
    """What the inside of a JSON string says; None where it is none, or more than plain text and escapes."""
    try:
        if b"\\" in leaf:
            said = orjson.loads(b'"%b"' % leaf)
            return said if isinstance(said, str) else None
        text = leaf.decode()
    except ValueError:
        return None
    return None if '"' in text or "\n" in text else text


def _only_arguments(calls: Any) -> bool:
    """More of one call's arguments, spelled as it should be."""
    entry = calls[0] if isinstance(calls, list) and len(calls) == 1 else None
    if not isinstance(entry, dict) or set(entry) != {"index", "function"} or type(entry["index"]) is not int:
        return False
    function = entry["function"]
    return isinstance(function, dict) and set(function) == {"arguments"}


def dumps(value: dict[str, Any], model_swap: tuple[bytes, bytes] | None = None) -> bytes:
    """One chunk or answer, compact; numbers beyond 64 bits and lone surrogates as Python's json writes them."""
    if model_swap is not None and "model" in value:
        value = {**value, "model": model_swap[1].decode()}
    try:
        return orjson.dumps(value)
    except TypeError:
        try:
            return json.dumps(value, separators=(",", ":")).encode()
        except RecursionError:
            raise MalformedStream("event data nests too deep") from None
