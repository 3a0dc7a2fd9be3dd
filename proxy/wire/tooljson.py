"""One call written as JSON: {"name": …, "arguments": {…}}, the keys in any order, loosely spelled.

Rules: `tool` is set as soon as the name is complete and declared; until then nothing is said, and `rejected` means
that this is no call (the caller has the text and releases it). Arguments stream from there, typed by the tool's schema;
their last brace waits for the call's own end, so that a cut call cannot be run. For a named tool_choice the object may
be the bare arguments. Parameters beside the name, not in an object of their own, are the arguments if no others come.
"""

from __future__ import annotations

import json
import re

from proxy.wire.coerce import ANY, Tool, Toolset, quote
from proxy.wire.jsonfix import JsonRewriter, decode_string
from proxy.wire.jsonstring import BLANK, End

ENVELOPE_KEY = re.compile(r"[\s,]*([\"']?)([A-Za-z_]\w{0,31})\1\s*:\s*")
KEY_START = re.compile(r"[\s,]*(?:[\"']?(?:[A-Za-z_]\w{0,31})?[\"']?\s*)?\Z")
SEPARATORS = re.compile(r"[\s,]*")
SPACE = re.compile(r"\s*")
NAMES = frozenset({"name", "function", "tool_name"})
ARGUMENTS = frozenset({"arguments", "parameters", "args", "input"})
OTHERS = frozenset({"id", "type", "call_id", "index", "tool_call_id"})
DOUBLED = re.compile(r"\{\s*\{")


class JsonCall:
    """`step` reads from a buffer that begins with the object's brace; `out` collects argument text."""

    __slots__ = (
        "_arguments",
        "_bare",
        "_beside",
        "_depth",
        "_early",
        "_found",
        "_last",
        "_reader",
        "_sent",
        "_state",
        "_take",
        "_tools",
        "complete",
        "done",
        "duplicates",
        "failures",
        "named",
        "out",
        "rejected",
        "repairs",
        "suspected",
        "tool",
    )

    def __init__(self, tools: Toolset, named: Tool | None = None) -> None:
        self._tools = tools
        self.named = named
        self.tool: Tool | None = None
        self._state = self._open
        self._depth = 0  # braces of the envelope that are open
        self._bare = False  # the whole object is the arguments
        self._reader: JsonRewriter | None = None
        self._take = self._ignore
        self._arguments = False  # the arguments were read
        self._found = ""  # the key whose value comes next
        self._beside: list[str] = []  # parameters beside the name
        self._early = ""  # arguments that came before the name
        self._last = ""  # their final brace, until the call ends
        self._sent = False
        self.out: list[str] = []
        self.done = self.complete = self.rejected = False
        self.repairs = self.failures = self.duplicates = self.suspected = 0

    def step(self, buffer: str, index: int, end: End) -> int:
        while not (self.done or self.rejected):
            state = self._state
            reached = state(buffer, index, end)
            if reached == index and self._state == state:
                break
            index = reached
        return index

    def stop(self, end: End) -> None:
        """The stream ended inside the object."""
        if self.done or self.rejected:
            return
        if self.tool is None and self._bare is False:
            self.rejected = True
            return
        if end is End.CUT:
            self._fail()
            return
        if self._reader is not None:
            self._reader.finish()
            if self._reader.broken:
                self._fail()
                return
            self._finish_value()
        self.repairs += 1
        self._close()

    def _open(self, buffer: str, index: int, end: End) -> int:
        if self.named is not None and self._open_named(buffer, index, end):
            return index
        if self.named is None or ENVELOPE_KEY.match(buffer, index + 1):
            self._depth = 1
            self._state = self._key
            return index + 1
        return index

    def _open_named(self, buffer: str, index: int, end: End) -> bool:
        """Whether the object is the named tool's bare arguments (or whether that is not to be known yet)."""
        spec = self.named.spec if self.named else ANY
        found = ENVELOPE_KEY.match(buffer, index + 1)
        if not found and end is End.MORE and KEY_START.match(buffer, index + 1):
            return True
        key = found.group(2) if found else ""
        if key in spec.keys or key not in NAMES | ARGUMENTS | OTHERS:
            self._bare = True
            if key == "name":
                self._read(ANY, self._unwrap)
            else:
                self.tool = self.named
                self._read(spec, self._ignore)
            return True
        return False

    def _read(self, spec: object, take: object) -> None:
        self._reader = JsonRewriter(spec, live=False)  # type: ignore[arg-type]
        self._take = take  # type: ignore[assignment]
        self._state = self._value

    def _unwrap(self, text: str) -> None:
        """A whole object for a named tool that has a property "name": bare arguments, or an envelope after all?"""
        assert self.named is not None
        value = json.loads(text)
        inner = next((value[k] for k in ARGUMENTS if k in value and k not in self.named.spec.keys), None)
        wrapped = value.get("name") == self.named.name and isinstance(inner, dict)
        self.tool = self.named
        self._emit(rewrite(self.tool, json.dumps(inner, ensure_ascii=False) if wrapped else text))

    # The envelope

    def _key(self, buffer: str, index: int, end: End) -> int:
        found = ENVELOPE_KEY.match(buffer, index)
        if found:
            self.repairs += found.group(1) != '"'
            self._found = found.group(2)
            self._state = self._before_value
            return found.end()
        if end is End.MORE and KEY_START.match(buffer, index) and len(buffer) - index < 64:
            return index
        return self._after(buffer, index, end)

    def _before_value(self, buffer: str, index: int, end: End) -> int:
        """Behind the colon; blanks are read once, however many there are."""
        at = SPACE.match(buffer, index).end()  # type: ignore[union-attr]
        if at < len(buffer) or end is not End.MORE:
            self._start_value(self._found, buffer, at)
        return at

    def _after(self, buffer: str, index: int, end: End) -> int:
        """No key: the envelope ends here, or this is no call, or what was forgotten is forgiven."""
        at = SEPARATORS.match(buffer, index).end()  # type: ignore[union-attr]
        if at >= len(buffer):
            return at
        if buffer[at] == "}":
            self._depth -= 1
            if not self._depth:
                self._close()
            return at + 1
        if buffer[at] == "{" and self.tool is None and not self._early:
            self.repairs += 1  # a doubled first token
            return at + 1
        if self.tool is not None and self._arguments and buffer[at] in "<]":
            self.repairs += 1  # the envelope's own brace is missing
            self._close()
            return at
        if self.tool is None:
            self.rejected = True
        else:
            self._fail()
        return at

    def _start_value(self, key: str, buffer: str, index: int) -> None:
        first = buffer[index : index + 1]
        if key == "function" and first == "{":
            self._state = self._nested
        elif key in NAMES and first in "\"'":
            self._read(ANY, self._name)
        elif key in ARGUMENTS and not self._arguments:
            self._arguments = True
            if first in "\"'":
                self._read(ANY, self._encoded)
            elif self.tool is not None and first == "{":
                self._read(self.tool.spec, self._ignore)
            else:
                self._read(ANY, self._whole)
        elif self.tool is not None and key in self.tool.spec.keys:
            self._read(ANY, self._put_beside)
        elif self.tool is not None or key in OTHERS or key in ARGUMENTS:
            self._read(ANY, self._skip)
        else:
            self.rejected = True

    def _nested(self, buffer: str, index: int, end: End) -> int:
        self._depth += 1
        self._state = self._key
        return index + 1

    def _value(self, buffer: str, index: int, end: End) -> int:
        reader = self._reader
        assert reader is not None
        reached = reader.step(buffer, index, End.MORE)
        if self._take == self._ignore:
            self._emit(reader.take())
        if reader.broken:
            if self.tool is None:
                self.rejected = True
            else:
                self._fail()
        elif reader.done:
            self._finish_value()
        return reached

    def _finish_value(self) -> None:
        reader = self._reader
        if reader is None:
            return
        self._reader = None
        self.repairs += reader.repairs
        self.failures += reader.failures
        self.duplicates += reader.duplicates
        self.suspected += reader.suspected
        self._state = self._key
        text = reader.take()
        if self._take == self._ignore:
            self._emit(text)
        else:
            self._take(text)
        if self._bare and not self.done:
            self._close()

    # What becomes of a value

    def _ignore(self, text: str) -> None: ...

    def _skip(self, text: str) -> None: ...

    def _put_beside(self, text: str) -> None:
        self._beside.append(f"{quote(self._found)}: {text}")

    def _name(self, text: str) -> None:
        if self.tool is not None:
            return
        self.tool = self._tools.find(json.loads(text))
        if self.tool is None:
            self.rejected = True
        elif self._early:
            self._emit(rewrite(self.tool, self._early))

    def _whole(self, text: str) -> None:
        self._early = "{}" if text == "null" else text
        if self.tool is not None:
            self._emit(rewrite(self.tool, self._early))

    def _encoded(self, text: str) -> None:
        """Arguments given as a string that holds JSON, maybe more than once."""
        self.repairs += 1
        inner: str = json.loads(text)
        for _ in range(3):
            again = decode_string(inner.strip()) if inner.lstrip()[:1] in ("'", '"') else None
            if again is None:
                break
            inner = again
        self._whole(inner.strip() or "{}")

    def _emit(self, text: str) -> None:
        """Argument text, all but the brace that would complete it."""
        text = self._last + text
        self._last = ""
        if text.endswith("}"):
            text, self._last = text[:-1], "}"
        if text:
            self._sent = True
            self.out.append(text)

    def _close(self) -> None:
        if self.tool is None:
            self.rejected = True
            return
        if not self._sent and self._beside and not self._arguments:
            self.repairs += 1
            self._emit(rewrite(self.tool, f"{{{', '.join(self._beside)}}}"))
        elif not self._sent:
            self.out.append("{")
            self._last = "}"
        self.out.append(self._last)
        self.done, self.complete = True, self._last == "}"

    def _fail(self) -> None:
        if not self._sent:
            self.out.append("{")
        self.done = True


def rewrite(tool: Tool, text: str) -> str:
    """A whole arguments object as valid JSON of the tool's types; unterminated if it cannot be mended."""
    if text.strip().lower() in ("", "null", "none", "[]"):
        return "{}"
    rewriter = JsonRewriter(tool.spec, live=False)
    start = BLANK.match(text).end()  # type: ignore[union-attr]
    if text[start : start + 1] != "{":
        return "{"
    end = rewriter.step(text, start, End.STOP)
    if not rewriter.done and not rewriter.broken:
        rewriter.held = text[end:]
        rewriter.finish()
    return rewriter.take()
