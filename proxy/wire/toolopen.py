"""Reads how a call begins: `<tool_call>` with a function tag or JSON behind it, or a function tag alone.

Rules: an opening counts when its name is complete and declared and structure follows it; anything else is text.
Pure functions of the buffer; what must be waited for is bounded by LIMIT and the longest name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum

from proxy.wire.coerce import Tool, Toolset

WRAPPER = "<tool_call>"
LIMIT = 192  # characters of an opening beside the tool's name
BLANK = re.compile(r"\s*")
NAMED = re.compile(
    r"<function(?:\s*=|\s+name\s*=)[^\S\n]*[\"']?(?P<name>[^>\n<\"']+?)[\"']?[^\S\n]*(?:/?>|(?=\n))"
    r"|<function>\s*(?P<element>[^<>\n]+?)\s*(?:</function>|(?=<parameter)|(?=\n\s*<parameter))"
)
NAMED_START = re.compile(
    r"<function(?:\s*|\s*=[^>\n<]*|\s+n?a?m?e?\s*|\s+name\s*=[^>\n<]*|>[^<>]*(?:<[/parametfunctio]*)?)\Z"
)
NAME_PART = re.compile(r"<function(?:\s*=|\s+name\s*=|>)[^\S\n]*([^>\n<]*)\Z")
FOLLOWERS = ("<parameter=", "<parameter ", "</function", "</tool_call>", "</parameter>", "{")


class Opening(Enum):
    """What an opener is: TEXT, not to be known yet, a call in XML, or the beginning of JSON."""

    TEXT = 0
    WAIT = 1
    XML = 2
    JSON = 3


@dataclass(frozen=True, slots=True)
class Found:
    """`end`: where the call's inside begins. `tool`: known as soon as the name is; WAIT then wants what follows."""

    kind: Opening
    end: int = 0
    tool: Tool | None = None
    wrapped: bool = False
    repaired: bool = False
    suspected: bool = False

    def at_end(self) -> Found:
        """Nothing follows: the name is enough."""
        return replace(self, kind=Opening.XML)


TEXT, WAIT = Found(Opening.TEXT), Found(Opening.WAIT)


def read_opening(buffer: str, index: int, tools: Toolset) -> Found:
    """What begins at `index`, where "<" stands."""
    if len(buffer) - index > LIMIT + tools.longest:
        buffer = buffer[: index + LIMIT + tools.longest]
        waiting = TEXT
    else:
        waiting = WAIT
    at = index
    while buffer.startswith(WRAPPER, at):
        at = BLANK.match(buffer, at + len(WRAPPER)).end()  # type: ignore[union-attr]
    wrapped, doubled = at > index, buffer.count(WRAPPER, index, at) > 1
    rest = buffer[at:]
    if wrapped and rest[:1] in ("{", "["):
        return Found(Opening.JSON, at, wrapped=True)
    suspected = rest.startswith("<<function")
    if suspected:
        at, rest = at + 1, rest[1:]
    if not rest.startswith("<function"):
        unclear = wrapped and (not rest or WRAPPER.startswith(rest) or "<<function".startswith(rest))
        return waiting if unclear or "<function".startswith(rest) else TEXT
    found = _read_name(buffer, at, tools, waiting)
    if found.kind is Opening.TEXT or found.tool is None:
        return found
    return replace(
        found, wrapped=wrapped, repaired=not wrapped or doubled or found.repaired, suspected=suspected
    )


def _read_name(buffer: str, at: int, tools: Toolset, waiting: Found) -> Found:
    named = NAMED.match(buffer, at)
    if not named:
        part = NAME_PART.match(buffer, at)
        hopeless = part is not None and not tools.may_become(part.group(1))
        return waiting if NAMED_START.match(buffer, at) and not hopeless else TEXT
    name = named.group("name") or named.group("element")
    tool = tools.find(name)
    if tool is None:
        return TEXT
    follows = BLANK.match(buffer, named.end()).end()  # type: ignore[union-attr]
    rest = buffer[follows : follows + 12]
    repaired = name != tool.name or not named.group().endswith(">")
    if rest.startswith(FOLLOWERS):
        return Found(Opening.XML, named.end(), tool, repaired=repaired)
    if not rest or any(f.startswith(rest) for f in FOLLOWERS):
        return Found(waiting.kind, named.end(), tool, repaired=repaired)
    return TEXT
