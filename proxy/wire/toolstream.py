"""A chat stream with the tool-call engine in it: the same reader, and what it forwards is in one correct shape.

Rules
1. What the engine passes leaves as the bytes that came. What it changes is encoded anew, that event only.
2. The learned shape (see `streams`) saves the parsing, never the engine: the text of a known delta goes through it.
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
from proxy.wire.streams import ChatStream, swap_model
from proxy.wire.toolcalls import ToolEngine
from proxy.wire.toolevents import Counters, Pass

_LEAVES = {b'"%b":"' % key: key.decode() for key in ChatStream.leaf_keys}


class ToolChatStream(ChatStream):
    """`/v1/chat/completions` with tools, or with an answer that has to be put right."""

    __slots__ = ("_leaf", "_place", "_repair")

    def __init__(
        self,
        new_engine: Callable[[bool], ToolEngine],
        shape: ChatShape,
        model_swap: tuple[bytes, bytes] | None = None,
        *,
        hide_usage: bool = False,
    ) -> None:
        """new_engine: an engine for one more choice; its argument: parsed deltas may pass."""
        super().__init__(model_swap, hide_usage=hide_usage)
        self._repair = Repair(new_engine, shape)
        self._leaf: str | None = None
        self._place: tuple[int, int | None] = (0, None)  # choice, tool call

    @property
    def engines(self) -> list[ToolEngine]:
        return [state.engine for state in self._repair.choices.values()]

    def counters(self) -> Counters:
        """What was seen and done in all choices."""
        total = Counters()
        for engine in self.engines:
            total.add(engine.counters)
        return total

    def known(self, event: bytes) -> bytes | None:
        out = super().known(event)
        if out is None or self._leaf is None or self._repair.waiting:
            return None
        text = event[self._start : len(event) - self._tail_length]
        if b"\\" in text:
            return None  # escapes: the engine wants the text itself
        try:
            said = text.decode()
        except UnicodeDecodeError:
            return None
        index, call = self._place
        delta: dict[str, Any] = {self._leaf: said}
        if self._leaf == "arguments":
            delta = {"tool_calls": [{"index": call, "function": delta}]}
        found = self._repair.more(index, delta)
        return out if isinstance(found, Pass) else self._encode(found)

    def _forward(self, event: bytes, payload: dict[str, Any], keep: bool) -> bytes:
        found = self._repair.feed(payload, event if keep else b"")
        if isinstance(found, Pass):
            return super()._forward(event, payload, keep)
        return self._encode(found)

    def _learn(self, event: bytes) -> None:
        super()._learn(event)
        self._leaf = next((name for mark, name in _LEAVES.items() if self._head.endswith(mark)), None)

    def _read(self, payload: dict[str, Any]) -> tuple[bool, bool]:
        keep, teach = super()._read(payload)
        if teach:
            choice = payload["choices"][0]
            delta = choice["delta"]
            calls = delta.get("tool_calls")
            # What is learned is one text and nothing beside it: oddities are the engine's to see, each time.
            if len(delta) != 1 or (calls and not _only_arguments(calls)):
                return keep, False
            self._place = (choice.get("index", 0), calls[0]["index"] if calls else None)
        return keep, teach

    def _done(self, event: bytes) -> bytes:
        return self._encode(self._repair.close()) + event if self.complete() else b""

    def closing(self) -> bytes:
        return self._encode(self._repair.close()) + super().closing()

    def flush(self) -> bytes:
        return self._encode(self._repair.cut())

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
        return json.dumps(value, separators=(",", ":")).encode()
