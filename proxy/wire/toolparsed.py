"""Tool deltas that the backend parsed: their ids, indexes, names and arguments put right.

Rules: a delta belongs to a call by id first, by index second. A new id on a used index is a new call, a known id on
a new index the same one, until its arguments are whole. What has no name and goes on with open arguments belongs to
them, whatever its id or index. Null, empty and "null" names and ids are absent; a repeated name is ignored, pieces of
a declared one are put together. A call leaves with the next index, one id and its name, in one event, as soon as the
name is known. Equal calls are two calls. An undeclared name without arguments is no call: a parser took markup that
was only mentioned for one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from proxy.wire.coerce import Joiner, Tool, Toolset
from proxy.wire.jsonfix import JsonRewriter
from proxy.wire.jsonstring import End
from proxy.wire.toolargs import Arguments
from proxy.wire.toolevents import CallArguments, CallEnd, CallStart, Counters, Event

BEGINNINGS = ("{", '"', "<")  # of whole arguments
NO_ARGUMENTS = "{} \t\r\n"  # all that arguments without a member consist of


class CallDelta(NamedTuple):
    """One entry of `tool_calls`, absent and void values None.

    slot: its index. fresh: from a whole message, always a new call.
    """

    slot: int | None
    id: str | None
    name: str | None
    arguments: str
    fresh: bool = False


class _Call:
    """A call as the backend tells it; `out` is its index on the way out, -1 until it was sent."""

    __slots__ = ("arguments", "ended", "id", "joiner", "name", "out", "undeclared", "waiting")

    def __init__(self) -> None:
        self.id: str | None = None
        self.name: str | None = None
        self.undeclared: str | None = None  # a name that waits for arguments
        self.arguments: Arguments | None = None
        self.out = -1
        self.waiting = ""  # arguments that came before the name
        self.joiner = Joiner()
        self.ended = False

    @property
    def begun(self) -> bool:
        """Whether some of its arguments came."""
        return self.arguments is not None and self.arguments.begun


class ParsedCalls:
    """`feed` deltas; `finish` ends what is open. `next_index`: of the next call, parsed or not."""

    def __init__(
        self,
        tools: Toolset,
        named: Tool | None,
        take_id: Callable[[str | None], str],
        counters: Counters,
        *,
        exact: bool,
    ) -> None:
        self._tools = tools
        self._named = named
        self._take_id = take_id
        self._counters = counters
        self._exact = exact
        self._calls: list[_Call] = []
        self._by_id: dict[str, _Call] = {}
        self._by_index: dict[int, _Call] = {}
        self.next_index = 0
        self.follows_parsed = False

    @property
    def any(self) -> bool:
        """A call came, with a name or without."""
        return bool(self._calls)

    def streaming(self, slot: int | None) -> JsonRewriter | None:
        """The reader of a call's arguments that may leave as they come, with the index they came with."""
        call = self._by_index.get(slot) if slot is not None and self._exact else None
        return call.arguments.rewriter if call and call.arguments and call.out == slot else None

    def feed(self, delta: CallDelta) -> tuple[list[Event], bool]:
        """The events of a delta, and whether they say just what it says."""
        call = self._find(delta)
        events: list[Event] = []
        same = self._exact and call.out in (-1, delta.slot)
        if call.name is None:
            name = self._name(call, delta)
            same = same and name == delta.name
            delta = delta._replace(name=name)
        if call.name is None and delta.name is not None:
            same = self._start(call, delta, events) and same
        elif call.out < 0:
            call.waiting += delta.arguments
            return [], False
        elif delta.name is not None or delta.id is not None:
            same = False
        assert call.arguments is not None
        text = call.waiting + call.joiner.join(delta.arguments)
        call.waiting = ""
        said = call.arguments.feed(text) if text and not call.ended else ""
        if said:
            events.append(CallArguments(call.out, said))
        if not self._exact and call.arguments.done and not call.ended:
            self._end(call, End.STOP, events)
        return events, same and said == delta.arguments

    def _name(self, call: _Call, delta: CallDelta) -> str | None:
        """The call's name, once it may be told."""
        name = delta.name or call.undeclared
        if delta.name is not None and call.undeclared is not None:
            name = self._joined(call.undeclared, delta.name) or delta.name
        if name is not None and self._tools.find(name) is None:
            call.undeclared = name
            if not (call.waiting + delta.arguments).strip(NO_ARGUMENTS):
                return None
        return name

    def _joined(self, piece: str, more: str) -> str | None:
        """The name of which a piece was told before: told anew and longer, or the rest of a declared one."""
        if more.startswith(piece):
            return more
        whole = piece + more
        return whole if self._tools.find(whole) or self._tools.may_become(whole) else None

    def _start(self, call: _Call, delta: CallDelta, events: list[Event]) -> bool:
        """Sends the call's head; true if the delta's own says the same."""
        written = delta.name or ""
        tool = self._tools.find(written)
        self._counters.undeclared += tool is None
        tool = tool or Tool(written, None)
        call.name, call.arguments = written, Arguments(tool, self._tools)
        call.out = self.next_index
        self.next_index += 1
        self._counters.parsed += 1
        identifier = self._take_id(call.id)
        self._counters.repaired_ids += identifier != call.id or call.out != delta.slot
        events.append(CallStart(call.out, identifier, tool.name))
        return (
            identifier == delta.id and tool.name == delta.name and call.out == delta.slot and not call.waiting
        )

    def _find(self, delta: CallDelta) -> _Call:
        call = None if delta.fresh else self._known(delta)
        if call is None:
            call = _Call()
            self._calls.append(call)
        if delta.id is not None and call.id is None:
            call.id = delta.id
            self._by_id[delta.id] = call
        if delta.slot is not None:
            self._by_index[delta.slot] = call
        return call

    def _known(self, delta: CallDelta) -> _Call | None:
        call = self._by_id.get(delta.id) if delta.id is not None else None
        if call is None:
            last = self._calls[-1] if self._calls else None
            call = self._by_index.get(delta.slot) if delta.slot is not None else last
            if call is None:
                return last if last and delta.id is None and _strays_from(last, delta) else None
            if delta.id is not None and call.id is not None and not _goes_on(call, delta):
                return None
        if delta.name is not None and self._renamed(call, delta.name):
            return None
        if call.arguments is None or not call.arguments.done:
            return call
        moved = (
            delta.name is not None and delta.slot is not None and self._by_index.get(delta.slot) is not call
        )
        whole = delta.arguments.lstrip()[:1] in BEGINNINGS and (delta.name or delta.id) is not None
        return None if moved or whole else call

    def _renamed(self, call: _Call, name: str) -> bool:
        """Whether a name is another than the call's."""
        if call.name is None and call.undeclared is not None:
            return self._joined(call.undeclared, name) is None
        return call.name not in (None, name)

    def finish(self, end: End) -> list[Event]:
        """Ends every open call; one without a name is the named tool's, or nobody's."""
        events: list[Event] = []
        for call in self._calls:
            if call.out < 0:
                name = self._named.name if self._named else self._only()
                if name is None or not call.waiting.strip() or call.undeclared is not None:
                    self._counters.undeclared += call.undeclared is not None
                    self._counters.dropped += 1
                    continue
                self.feed_name(call, name, events)
            if not call.ended:
                self._end(call, end, events)
        return events

    def _only(self) -> str | None:
        names = list(self._tools.by_name)
        return names[0] if len(names) == 1 else None

    def feed_name(self, call: _Call, name: str, events: list[Event]) -> None:
        """Sends a call whose name the backend never told."""
        waiting, call.waiting = call.waiting, ""
        self._start(call, CallDelta(None, call.id, name, ""), events)
        assert call.arguments is not None
        said = call.arguments.feed(waiting)
        if said:
            events.append(CallArguments(call.out, said))

    def _end(self, call: _Call, end: End, events: list[Event]) -> None:
        arguments = call.arguments
        assert arguments is not None
        call.ended = True
        said = arguments.finish(end)
        if said:
            events.append(CallArguments(call.out, said))
        events.append(CallEnd(call.out, arguments.complete))
        count, rewriter = self._counters, arguments.rewriter
        count.cut += not arguments.complete
        count.repaired_arguments += arguments.mended
        if rewriter is not None:
            count.repaired_values += rewriter.repairs > 0
            count.failures += rewriter.failures
            count.duplicates += rewriter.duplicates
            count.suspected += rewriter.suspected


def _strays_from(call: _Call, delta: CallDelta) -> bool:
    """Whether a delta on an index that nobody uses, without id or name, is more of this call."""
    begins = delta.arguments.lstrip().startswith("{")
    return _goes_on(call, delta) and not (begins and call.begun)


def _goes_on(call: _Call, delta: CallDelta) -> bool:
    """Whether a delta is more of a call's arguments although its id or index is not the call's."""
    arguments = call.arguments
    return bool(delta.name is None and delta.arguments and arguments is not None and not arguments.done)
