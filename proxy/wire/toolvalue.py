"""Where a value in Qwen's XML ends: whether a tag inside it is structure or what the value says.

Rules: a closer ends a value only when what follows it is structure (or the end). A whole quoted call is counted over,
and so are parameters quoted in any dialect, with the closers behind them. An opener ends a value only at a line start
and for a parameter that is declared and was not given yet. At most LOOKAHEAD characters are looked over.
"""

from __future__ import annotations

import re

from proxy.wire import patterns
from proxy.wire.coerce import Spec, Tool, Toolset
from proxy.wire.jsonstring import End

BLANK = re.compile(r"\s*")
KEY = re.compile(r"<parameter(?:\s{1,8}name)?\s{0,8}=\s*[\"']?([^>\n<\"']{0,256}+)[\"']?[^\S\n]*+(>|\n)")
KEY_AND_MORE = patterns.compile(  # other attributes beside the name
    r"<parameter(?:\s{1,8}name)?\s{0,8}=\s*[\"']?([^\s>\n<\"'=]{1,256}+)[\"']?"
    r"(?:\s{1,8}[\w-]{1,32}=(?:\"[^\"\n<>]{0,64}\"|'[^'\n<>]{0,64}'))++[^\S\n]*+(>|\n)"
)
KEY_START = re.compile(r"<parameter(?:(?:\s{1,8}name)?\s{0,8}=|\s{1,8}n?a?m?e?\s{0,8}\Z)[^>\n<]{0,260}\Z")
FOREIGN = r"function_invocation|function_calls?|function_call|tool_calls|invoke|parameters|arguments"
CLOSERS = ("</parameter>", "</function>", "</tool_call>")
ANY_CLOSER = re.compile(rf"</(?:parameter|function|tool_call|{FOREIGN})\s*>")
END_TOKEN = re.compile(r"<\|(?:im_end|endoftext)\|>")
VARIANTS = tuple(f"</{name}>" for name in FOREIGN.replace("?", "").split("|")) + (
    "<|im_end|>",
    "<|endoftext|>",
)
TAGS = (*CLOSERS, "<parameter=", "<parameter ", "<tool_call>", "<function=", "<function name=", *VARIANTS)
VALUE_TAG = re.compile(  # in a value: a tag that matters, or what may become one
    r"<(?:/(?:parameter|function|tool_call)>|parameter[= >]|tool_call>|function(?: name)?="
    r"|\|(?:im_end|endoftext)\|>|[/a-z_|= ]{0,14}\Z)"
)
FOLLOWERS = ("<parameter=", "<parameter ", "</function>", "</tool_call>", *VARIANTS)
NEXT_CALL = re.compile(r"<tool_call>\s*(?:<function=([^>\n<]*)[>\n]|[{\[])|<function=([^>\n<]*)[>\n]")
NEXT_CALL_START = re.compile(
    r"<tool_call>\s*(?:<f?u?n?c?t?i?o?n?\Z|<function=[^>\n<]{0,128}\Z|\Z)|<function=[^>\n<]{0,128}\Z"
)
LOOKAHEAD = 512  # characters looked over behind a closer before it counts as one

TEXT, CLOSE, WAIT = 0, 1, -1  # what a tag inside a value is: literal, the value's end, not to be known yet


def begins_tag(text: str, tags: tuple[str, ...] = TAGS) -> bool:
    """Whether `text` is a beginning of one of `tags`, so that more of it may come."""
    return any(tag.startswith(text) for tag in tags)


def read_key(buffer: str, index: int) -> re.Match[str] | None:
    """A parameter's tag: group 1 is its name, group 2 what it ends with."""
    return KEY.match(buffer, index) or KEY_AND_MORE.match(buffer, index)


class ValueEnd:
    """The state of a value's reading, and `_judge` for a tag in it."""

    __slots__ = (
        "_attributes",
        "_functions",
        "_inline",
        "_inner",
        "_inner_lines",
        "_openers",
        "_own_line",
        "_passed",
        "_quoted",
        "_spec",
        "_tools",
        "_used",
        "_wrappers",
        "tool",
    )

    def __init__(self, tool: Tool, tools: Toolset) -> None:
        self.tool = tool
        self._tools = tools
        self._used: set[str] = set()
        self._spec: Spec = tool.spec
        self._attributes = False  # the call's own parameters are written `<parameter name=…>`
        self._begin_value(tool.spec)

    def _begin_value(self, spec: Spec) -> None:
        self._spec = spec
        self._functions = self._wrappers = 0  # quoted openers inside the value, not closed yet
        self._quoted = False  # a parameter of the quoted call is open
        self._inner = 0  # parameter tags inside the value that are its text and were not closed yet
        self._inner_lines = 0  # those of them that began a line
        self._inline = 0  # `<tool_call>` inside a line of the value, not closed yet
        self._openers = 0  # `<function=` inside a line of the value, not closed yet
        self._own_line = False  # it began on a line of its own, its closer will stand on one
        self._passed = 0  # closers to come that are the value's text

    def _judge(self, buffer: str, tag: int, line: bool, end: End) -> int:
        """What the tag at `tag` is: TEXT, CLOSE or WAIT. `line`: it begins a line."""
        if self._spec.scalar and buffer.startswith(
            (*CLOSERS, "<parameter=", "<tool_call>", "<function="), tag
        ):
            return CLOSE
        if self._passed and buffer.startswith(CLOSERS, tag):
            self._passed -= 1
            return TEXT
        if buffer.startswith("</parameter>", tag):
            return self._judge_parameter_end(buffer, tag, line, end)
        if buffer.startswith("</function>", tag):
            return self._judge_function_end(buffer, tag, end)
        if buffer.startswith("</tool_call>", tag):
            if self._wrappers:
                self._wrappers -= 1
                return TEXT
            return self._followed(buffer, tag + len("</tool_call>"), end, ("<tool_call>",))
        if buffer.startswith(("<parameter=", "<parameter ", "<parameter>"), tag):
            self._quoted = self._quoted or (self._functions > 0 and line)
            verdict = self._judge_parameter(buffer, tag, end) if line and not self._functions else TEXT
            if verdict == TEXT and not (line and self._functions):
                self._inner += 1
                self._inner_lines += line
            return verdict
        if buffer.startswith("<tool_call>", tag):
            self._wrappers += line
            self._inline += not line
            return TEXT
        if buffer.startswith(("<function=", "<function name="), tag):
            self._functions += line
            self._openers += not line
            return TEXT
        token = END_TOKEN.match(buffer, tag)
        if token:
            return self._followed(buffer, token.end(), end, ())
        rest = buffer[tag : tag + 32]
        if not begins_tag(rest):
            return TEXT
        if end is End.MORE:
            return WAIT
        return CLOSE if len(rest) > 1 and begins_tag(rest, CLOSERS) else TEXT

    def _judge_parameter_end(self, buffer: str, tag: int, line: bool, end: End) -> int:
        """Structure if only closers lead from here to a next parameter, the call's end, a next call or the end."""
        at = tag
        while buffer.startswith("</parameter>", at):
            at = BLANK.match(buffer, at + len("</parameter>")).end()  # type: ignore[union-attr]
        if self._functions and self._quoted:
            verdict = self._judge_quoted_end(buffer, at, end)
            self._quoted = verdict != TEXT
            return verdict
        if self._inner_lines if line else self._inner:
            return self._judge_inner_end(buffer, tag, line, end)
        rest = buffer[at : at + LOOKAHEAD]
        if not rest or at - tag > LOOKAHEAD:
            return CLOSE if end is not End.MORE or at - tag > LOOKAHEAD else WAIT
        if rest.startswith("<parameter ") and not self._attributes:
            return self._judge_parameter(buffer, at, end)
        if rest.startswith(FOLLOWERS) or self._next_call(rest):
            return CLOSE
        waits = begins_tag(rest, (*FOLLOWERS, "</parameter>", "<tool_call>", "<function="))
        if end is End.MORE and (waits or NEXT_CALL_START.match(rest)):
            return WAIT
        return CLOSE if waits else TEXT

    def _judge_inner_end(self, buffer: str, tag: int, line: bool, end: End) -> int:
        """Where the value holds a parameter's tag a closer may be that one's: it is when the closers of something
        quoted, or more of the text, come before the call goes on or ends. On lines of their own the function's closer
        and the words behind it are the call's, unless a function was opened inside a line."""
        walked: list[str] = []
        at = tag
        while closer := ANY_CLOSER.match(buffer, at):
            name = closer.group()
            if at - tag > LOOKAHEAD or (name == "</tool_call>" and not (self._inline or self._wrappers)):
                return CLOSE
            if name == "</parameter>" and walked:
                return self._pass_over(walked)
            walked.append(name)
            at = BLANK.match(buffer, closer.end()).end()  # type: ignore[union-attr]
        rest = buffer[at : at + LOOKAHEAD]
        if END_TOKEN.match(rest):
            return CLOSE
        if self._next_call(rest):
            own = (line and not self._openers) or not self._own_line
            return CLOSE if own else self._pass_over(walked)
        if rest.startswith(("<parameter=", "<parameter ")):
            own = self._attributes if rest.startswith("<parameter ") else buffer[at - 1] == "\n"
            verdict = CLOSE if own else self._judge_parameter(buffer, at, end)
            return self._pass_over(walked) if verdict == TEXT else verdict
        waits = not rest or begins_tag(rest, (*FOLLOWERS, "</parameter>", "<tool_call>", "<function="))
        if end is End.MORE and (waits or NEXT_CALL_START.match(rest)):
            return WAIT
        own = line and "</function>" in walked and not self._openers
        return CLOSE if waits or own else self._pass_over(walked)

    def _pass_over(self, closers: list[str]) -> int:
        """The first of these closers, and all of them, are the value's text."""
        self._inner -= 1
        self._inner_lines = min(self._inner_lines, self._inner)
        if "</function>" in closers and self._functions:
            self._functions -= 1
        elif "</function>" in closers and self._openers:
            self._openers -= 1
        if "</tool_call>" in closers and self._inline:
            self._inline -= 1
        elif "</tool_call>" in closers:
            self._wrappers -= 1
        self._passed = sum(closer in CLOSERS for closer in closers[1:])
        return TEXT

    def _judge_quoted_end(self, buffer: str, at: int, end: End) -> int:
        """Inside a quoted call a closer is text, unless nothing but closers is left of the whole answer."""
        ended, start = False, at
        while closer := ANY_CLOSER.match(buffer, at):
            if ended and closer.group() == "</parameter>":
                return TEXT  # the outer call's own closers follow
            ended = ended or closer.group() == "</function>"
            at = BLANK.match(buffer, closer.end()).end()  # type: ignore[union-attr]
        rest = buffer[at : at + 32]
        if not rest and at - start <= 2 * LOOKAHEAD:
            return WAIT if end is End.MORE else CLOSE if end is End.STOP else TEXT
        return WAIT if end is End.MORE and begins_tag(rest, CLOSERS) else TEXT

    def _judge_function_end(self, buffer: str, tag: int, end: End) -> int:
        if self._functions:
            self._functions -= 1
            return TEXT
        return self._followed(buffer, tag + len("</function>"), end, ("</tool_call>", "<tool_call>"))

    def _judge_parameter(self, buffer: str, tag: int, end: End) -> int:
        """A parameter that opens at a line start: the next one if it is declared and was not used."""
        found = read_key(buffer, tag)
        if found:
            key = found.group(1).strip()
            return CLOSE if key in self.tool.spec.keys and key not in self._used else TEXT
        return WAIT if end is End.MORE and KEY_START.match(buffer, tag) else TEXT

    def _followed(self, buffer: str, at: int, end: End, tags: tuple[str, ...]) -> int:
        """CLOSE if one of `tags`, or nothing, follows; at a cut nobody knows what would have followed."""
        after = BLANK.match(buffer, at).end()  # type: ignore[union-attr]
        if after - at > LOOKAHEAD:
            return TEXT
        rest = buffer[after : after + 32]
        if not rest:
            return CLOSE if end is End.STOP else WAIT
        if rest.startswith(tags) or END_TOKEN.match(rest):
            return CLOSE
        waiting = begins_tag(rest, (*tags, "<|im_end|>", "<|endoftext|>"))
        return WAIT if waiting and end is not End.STOP else TEXT

    def _next_call(self, rest: str) -> bool:
        found = NEXT_CALL.match(rest)
        name = found and (found.group(1) or found.group(2))
        return bool(found) and (name is None or self._tools.find(name) is not None)
