"""Arguments of a call that the backend parsed: text in pieces, valid typed JSON out.

Rules: an object leaves as it comes, repaired on the way (see jsonfix). Anything else is collected, for it may be the
object in disguise: a JSON string of it, the model's markup, a fence, an envelope around it, or nothing at all.
What is none of these is kept as it came and does not count as complete. A cut text never decodes.
"""

from __future__ import annotations

import json
import re

from proxy.wire.coerce import ANY, Tool, Toolset
from proxy.wire.jsonfix import JsonRewriter, decode_string
from proxy.wire.jsonstring import End
from proxy.wire.tooljson import ARGUMENTS, rewrite
from proxy.wire.toolxml import XmlCall

UNDECIDED = re.compile(r"\{\s*(?:\"(?:n(?:a(?:m(?:e\"?)?)?)?)?)?\s*\Z")
ENVELOPE = re.compile(r"\{\s*\"name\"\s*:")
FUNCTION = re.compile(r"<function(?:\s+name)?\s*=\s*[\"']?[^>\n<]*>?")


class Arguments:
    """`feed` pieces, then `finish`; `done` once the object is whole, `complete` when it can be run."""

    __slots__ = (
        "_brief",
        "_collected",
        "_empty",
        "_head",
        "_opened",
        "_rewriter",
        "_tools",
        "complete",
        "mended",
        "tool",
    )

    def __init__(self, tool: Tool, tools: Toolset) -> None:
        self.tool = tool
        self._tools = tools
        self._head = ""  # the beginning, until it is known what this is
        self._opened = False  # the head's brace was sent
        self._brief = ""  # what was sent, its first characters
        self._empty = False  # an empty object came, its brace was not sent
        self._rewriter: JsonRewriter | None = None
        self._collected: list[str] | None = None
        self.complete = False
        self.mended = False  # what came was not an object

    @property
    def done(self) -> bool:
        return self._rewriter is not None and self._rewriter.done and not self._empty

    @property
    def begun(self) -> bool:
        return bool(self._head)

    @property
    def rewriter(self) -> JsonRewriter | None:
        return self._rewriter

    def feed(self, text: str) -> str:
        rewriter = self._rewriter
        if self._empty:
            return self._refill(text)
        if rewriter is not None:
            return "" if rewriter.done or rewriter.broken else self._watch(rewriter.feed(text))
        if self._collected is not None:
            self._collected.append(text)
            return ""
        return self._decide(text)

    def _decide(self, text: str) -> str:
        head = self._head = (self._head + text).lstrip()
        if not head:
            return ""
        if head[0] != "{":
            self._collected = [head]
            return ""
        if self.tool.spec.keys and "name" not in self.tool.spec.keys:
            if UNDECIDED.match(head):
                opened, self._opened = self._opened, True
                return "" if opened else "{"
            if ENVELOPE.match(head):
                self._collected = [head]
                return ""
        self._rewriter = JsonRewriter(self.tool.spec, live=True)
        return self._watch(self._rewriter.feed(head)[self._opened :])

    def _watch(self, said: str) -> str:
        """An empty object for a tool that needs arguments may stand before the real ones: its brace waits."""
        if len(self._brief) < 4:
            self._brief += "".join(said.split())[:4]
            if self.done and self._brief in ("{}", "}") and self.tool.schema.get("required"):
                self._empty = True
                rest = self._rewriter.held if self._rewriter else ""
                return said.rstrip().removesuffix("}") + self._refill(rest)
        return said

    def _refill(self, text: str) -> str:
        text = text.lstrip()
        if not text.startswith("{"):
            return ""
        self._empty = False
        self._rewriter = JsonRewriter(self.tool.spec, live=True)
        self._brief = "full"
        return self._rewriter.feed(text).removeprefix("{")

    def finish(self, end: End) -> str:
        """What is still to be sent when the text ended."""
        rewriter = self._rewriter
        if self._empty:
            self.complete = True
            return "}"
        if end is End.CUT:
            self.complete = self.done
            return "" if rewriter is not None or self._opened else "{"
        if rewriter is None:
            return self._rescue()
        if not rewriter.done and not rewriter.broken:
            rewriter.finish()
        self.complete = rewriter.done
        return rewriter.take()

    def _rescue(self) -> str:
        raw = self._head if self._collected is None else "".join(self._collected)
        found = unwrap(raw, self.tool, self._tools)
        self.mended = True
        if found is None:
            return "" if self._opened else raw if not _decodes(raw) else "{"
        self.complete = found.endswith("}")
        return found[self._opened :]


def _in_prose(text: str, tool: Tool) -> str | None:
    """An object of nothing but declared parameters, with words before it."""
    start = text.find("{")
    value = _load(text[start:]) if start >= 0 else None
    if not isinstance(value, dict) or not value or not set(value) <= tool.spec.keys:
        return None
    return rewrite(tool, text[start:])


def _decodes(raw: str) -> bool:
    try:
        json.loads(raw)
    except (ValueError, RecursionError):
        return False
    return True


def unwrap(raw: str, tool: Tool, tools: Toolset, nested: int = 0) -> str | None:
    """The arguments object that `raw` is in disguise, None if it is none."""
    text = raw.strip()
    if text.lower() in ("", "null", "none", "undefined", "{", "[]"):
        return "{}"
    if nested > 4:
        return None
    if text[0] in "\"'":
        inner = decode_string(text)
        return None if inner is None else unwrap(inner, tool, tools, nested + 1)
    if text[0] == "{":
        return _object(text, tool)
    if text[0] == "[":
        return _array(text, tool, tools, nested)
    tag = min(
        (at for at in map(text.find, ("<tool_call>", "<function", "<parameter=")) if at >= 0), default=-1
    )
    if tag >= 0:
        return _markup(text[tag:], tool, tools, nested)
    if not text.startswith("```"):
        return _in_prose(text, tool)
    fenced = text.partition("\n")[2] if "\n" in text else text[3:]
    return unwrap(fenced.rstrip().rstrip("`"), tool, tools, nested + 1)


def _object(text: str, tool: Tool) -> str | None:
    """An object: the arguments, or an envelope whose name is not one of the tool's own parameters."""
    if "name" not in tool.spec.keys:
        value = _load(text)
        if isinstance(value, dict) and isinstance(value.get("name"), str):
            inner = next(
                (value[key] for key in ("arguments", "parameters", "args", "input") if key in value), None
            )
            if isinstance(inner, str):
                return unwrap(inner, tool, Toolset(None), 3)
            if isinstance(inner, dict):
                return rewrite(tool, json.dumps(inner, ensure_ascii=False))
            if set(value) <= {"name", "id", "type"} | ARGUMENTS and value["name"] == tool.name:
                return "{}"
    return rewrite(tool, text)


def _load(text: str) -> object:
    rewriter = JsonRewriter(ANY, live=False)
    end = rewriter.step(text, 0, End.STOP)
    if not rewriter.done and not rewriter.broken:
        rewriter.held = text[end:]
        rewriter.finish()
    return json.loads(rewriter.take()) if rewriter.done else None


def _array(text: str, tool: Tool, tools: Toolset, nested: int) -> str | None:
    value = _load(text)
    if not isinstance(value, list) or len(value) != 1 or not isinstance(value[0], dict):
        return None
    return unwrap(json.dumps(value[0], ensure_ascii=False), tool, tools, nested + 1)


def _markup(text: str, tool: Tool, tools: Toolset, nested: int) -> str | None:
    """The model's own XML or tagged JSON, put into the arguments by a parser that could not read it."""
    inner = text.removeprefix("<tool_call>").lstrip()
    if inner[:1] in ("{", "["):
        return unwrap(inner.partition("</tool_call>")[0], tool, tools, nested + 1)
    function = FUNCTION.match(inner)
    call = XmlCall(tool, tools)
    body = inner[function.end() :] if function else inner
    end = call.step(body, 0, End.STOP)
    call.stop(End.STOP)
    return "".join(call.out) if call.complete and end else None
