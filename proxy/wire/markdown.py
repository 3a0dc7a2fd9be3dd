"""Which text is shown code: inside a fence, or behind an odd number of backticks on its line.

Rules: fed with content only, in order, never with values of calls. A fence opens with three or more backticks or
tildes at a line start, however far indented; a fence line with a language inside an open fence opens one more
(models write Markdown in Markdown), a bare one closes one.
"""

from __future__ import annotations

import re

MARKS = re.compile(r"`+|~+|[^`~]+")
FENCE_LINE = re.compile(r"^[^\S\n]*(`{3,}|~{3,})([^\n]*)\n", re.MULTILINE)
INFO = 80  # characters of a fence line that are kept


class Markdown:
    """`advance` over text; then `literal`: what follows is code; `line_start`: it would begin a line."""

    __slots__ = ("_char", "_count", "_fences", "_info", "_plain", "_ticks", "line_start", "settled")

    def __init__(self) -> None:
        self._fences: list[tuple[str, int]] = []
        self._reset()

    def _reset(self) -> None:
        self._ticks = 0  # backticks on this line
        self._char, self._count = "", 0  # the marks this line begins with
        self._info = ""  # what follows them
        self._plain = False  # the line begins with something else
        self.line_start = True
        self.settled = False  # text without marks or newlines changes nothing at all

    @property
    def quiet(self) -> bool:
        """True while text without marks needs only `skip`."""
        return not (self._ticks or self._count)

    @property
    def literal(self) -> bool:
        if self._count >= 3 and not self._plain:
            return not self._fences or bool(self._info.strip())
        return bool(self._fences) or self._ticks % 2 == 1

    def skip(self, text: str) -> None:
        """`advance` over text without marks, on a line without marks."""
        line = text.rfind("\n") + 1
        if line:
            self._plain = False
            if line == len(text):
                self.line_start, self.settled = True, False
                return
            text = text[line:]
        self.line_start = False
        self._plain = self.settled = self._plain or not text.isspace()

    def advance(self, text: str) -> None:
        if self.quiet and "`" not in text and "~" not in text:
            if text:
                self.skip(text)
            return
        first = text.find("\n")
        if first < 0:
            self._line(text)
            return
        self._line(text[:first])
        self._newline()
        last = text.rfind("\n") + 1
        for fence in FENCE_LINE.finditer(text, first + 1, last):  # of whole lines only fences have an effect
            marks = fence.group(1)
            self._char, self._count, self._info = marks[0], len(marks), fence.group(2)[:INFO]
            self._newline()
        self._line(text[last:])

    def _line(self, text: str) -> None:
        for piece in MARKS.findall(text):
            self._piece(piece)

    def _piece(self, piece: str) -> None:
        self.line_start = self.settled = False
        mark = piece[0] in "`~"
        self._ticks += len(piece) if piece[0] == "`" else 0
        if mark and not self._plain and not self._info and self._char in ("", piece[0]):
            self._char, self._count = piece[0], self._count + len(piece)
        elif self._count:
            self._info += piece[: INFO - len(self._info)] if len(self._info) < INFO else ""
        elif mark or not piece.isspace():
            self._plain = True

    def _newline(self) -> None:
        if self._count >= 3:
            info = self._info.strip()
            if self._fences and not info:
                if self._fences[-1][0] == self._char and self._count >= self._fences[-1][1]:
                    self._fences.pop()
            elif self._char == "~" or "`" not in info:
                self._fences.append((self._char, self._count))
        self._reset()
