"""What a console showed, as an SVG that looks the same everywhere.

Rules
1. It asks nobody for fonts: whatever monospaced one is there will do.
2. Words that stand apart are placed apart, so that columns stay straight where a viewer's font is wider or its
   leading spaces get lost.
"""

from __future__ import annotations

import html
import re

from rich.console import Console
from rich.terminal_theme import MONOKAI

CELL = 12.2  # units that rich gives a character
SPACE = "\N{NO-BREAK SPACE}"  # rich draws with these

_TEXT = re.compile(
    r'<text class="(?P<style>[^"]*)" x="(?P<x>[\d.]+)" y="(?P<y>[\d.]+)" textLength="[\d.]+"(?P<more>[^>]*)>'
    r"(?P<text>[^<]*)</text>"
)
_WORD = rf"[^{SPACE}\n]+"
_APART = re.compile(rf"{_WORD}(?:{SPACE}{_WORD})*")  # words with one space between them


def picture(console: Console, title: str) -> str:
    """All that a recording console has printed."""
    svg = console.export_svg(title=title, clear=False, theme=MONOKAI)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    return _TEXT.sub(_apart, svg)


def _apart(line: re.Match[str]) -> str:
    """A piece of a line as one element for each group of words."""
    made = []
    for words in _APART.finditer(html.unescape(line["text"])):
        x, length = float(line["x"]) + CELL * words.start(), CELL * len(words[0])
        place = f'x="{x:.1f}" y="{line["y"]}" textLength="{length:.1f}"'
        text = html.escape(words[0]).replace(SPACE, "&#160;")
        made.append(f'<text class="{line["style"]}" {place}{line["more"]}>{text}</text>')
    return "".join(made)
