"""A prompt's tokens from what its text is made of, learned from the usage that backends report.

Rules: no tokenizer and no text: counts in, tokens out, and the error that the last predictions had. One `Calibration` for
each model; it keeps a regression for each kind of content, for code and prose are cut differently. What it says is an
expected value: the bounds stay those of `estimate`, which are true whatever was learned.

tokens = Σ weight × count. Weights minimise the relative error of what was reported, older reports weighing less, pulled to
the default weights (those of Qwen's vocabulary, times a factor) as long as there are few.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from statistics import median, quantiles
from typing import NamedTuple


class Mix(NamedTuple):
    """What a prompt's text is made of, in bytes or occurrences, for all of it (a sample is scaled up).

    letters, digits, spaces, lines (line ends, tabs), wide (bytes beyond ASCII), marks (all else): bytes by class. words,
    groups: runs of letters, of marks. escapes: `\\u` escapes. humps: capitals behind a small letter. gaps: pairs of
    spaces. tools: bytes of tool declarations. messages: how many. begun: 1, the template's own.
    """

    letters: float = 0.0
    digits: float = 0.0
    spaces: float = 0.0
    lines: float = 0.0
    wide: float = 0.0
    marks: float = 0.0
    words: float = 0.0
    groups: float = 0.0
    escapes: float = 0.0
    humps: float = 0.0
    gaps: float = 0.0
    tools: float = 0.0
    messages: float = 0.0
    begun: float = 1.0


DEFAULT = Mix(0.14, 1.09, 0.23, 0.4, 0.21, 0.16, 0.19, 0.64, 0.5, 0.1, -0.2, 0.25, 3.0, 5.0)
"""Tokens for each of these, about as Qwen's vocabulary has it."""


class ContentKind(StrEnum):
    """What a prompt mostly is; each has weights of its own. Closed; a metric label."""

    TEXT = "text"
    CODE = "code"
    JSON = "json"
    WIDE = "wide"  # Chinese and other scripts beyond ASCII, escaped or not


def kind_of(mix: Mix) -> ContentKind:
    """By shares of the text: a quarter beyond ASCII; else many marks, mostly in short groups (quotes, braces, commas
    of JSON); else more marks or indentation than prose has."""
    size = mix.letters + mix.digits + mix.spaces + mix.lines + mix.wide + mix.marks
    if mix.wide + 6 * mix.escapes > 0.25 * size:
        return ContentKind.WIDE
    if mix.marks > 0.2 * size:
        return ContentKind.JSON
    return ContentKind.CODE if mix.marks + mix.gaps > 0.12 * size else ContentKind.TEXT


MEMORY = 0.995
"""Weight that a report keeps with each later one of its kind: about the last two hundred count."""
PULL = 0.3
"""Reports that the default weights are worth."""
FEW = 5
"""Reports of a model from which it is believed."""
RECENT = 100
"""Predictions whose error is kept."""
SOLVE_OFTEN, SOLVE_EVERY = 16, 32
"""Reports up to which each one counts at once; later they are put together."""
SETTLED, SETTLED_EVERY, AGREED = 400, 8, 0.08
"""Reports of a kind after which only every eighth is learned from if it agrees with the estimate, within that relative
error: learning costs every request."""
UNKNOWN_ERROR = 0.3
"""Stated while nothing was reported: the default's error on text of any kind."""
OUTLIER = 0.25
"""A relative error beyond which a report counts for less: a template that drops thinking, a prompt cut by the server."""

_N = len(DEFAULT)
_RANGE = range(_N)


class _Regression:
    """Least squares over relative errors: sums only, solved now and then."""

    __slots__ = ("_products", "_scale", "count", "errors", "seen", "spread", "typical", "weights")

    def __init__(self) -> None:
        # Σ x·xᵀ (its upper half) and, last, Σ x·y: counts and tokens over the tokens. Instead of fading the old
        # reports, each new one weighs more than the last, by `_scale`.
        self._products = [[0.0] * (_N + 1) for _ in _RANGE]
        self._scale = 1.0
        self.weights: Sequence[float] = DEFAULT
        self.count = self.seen = 0
        self.errors: list[float] = []
        self.typical = self.spread = UNKNOWN_ERROR

    def learn(self, mix: Mix, tokens: float) -> None:
        expected = _dot(self.weights, mix)
        self.errors.append(abs(expected / tokens - 1.0))
        del self.errors[:-RECENT]
        # Over the larger of the two, or a report that is far too small would weigh most.
        size = max(tokens, expected) if self.count >= FEW else tokens
        error = abs(expected - tokens) / size
        weight = self._scale * (1.0 if error <= OUTLIER or self.count < FEW else (OUTLIER / error) ** 2)
        x = (*[value / size for value in mix], tokens / size)
        for i in _RANGE:
            if x[i]:
                row, scaled = self._products[i], weight * x[i]
                for j in range(i, _N + 1):
                    row[j] += scaled * x[j]
        self.count += 1
        self._scale /= MEMORY
        if self._scale > 1e6:
            self._products = [[value / self._scale for value in row] for row in self._products]
            self._scale = 1.0
        if self.count <= SOLVE_OFTEN or self.count % SOLVE_EVERY == 0:
            self.weights = self._solved()
            self.typical = median(self.errors)
            self.spread = quantiles(self.errors, n=10)[-1] if self.count > 1 else UNKNOWN_ERROR

    def agrees(self, mix: Mix, tokens: float) -> bool:
        """A report from which there is little to learn."""
        return abs(_dot(self.weights, mix) / tokens - 1.0) <= AGREED

    def _solved(self) -> list[float]:
        """(Σ x·xᵀ + pull) w = Σ x·y + pull × default, the default scaled to what was seen."""
        rows = [[value / self._scale for value in row] for row in self._products]
        for i in _RANGE:
            for j in range(i):
                rows[i][j] = rows[j][i]
        seen = min(float(self.count), 1.0 / (1.0 - MEMORY))
        expected = sum([DEFAULT[i] * rows[i][_N] for i in _RANGE])
        square = sum([DEFAULT[i] * _dot(rows[i], DEFAULT) for i in _RANGE])
        scale = (expected + 1.0) / (square + 1.0)
        for i in _RANGE:
            pull = PULL * rows[i][i] / seen + 1e-9
            rows[i][i] += pull
            rows[i][_N] += pull * scale * DEFAULT[i]
        return _solve(rows)


class Calibration:
    """What was learned of one model's tokens. `tokens` is None until enough was reported."""

    __slots__ = ("_all", "_kinds")

    def __init__(self) -> None:
        self._all = _Regression()
        self._kinds = {kind: _Regression() for kind in ContentKind}

    def predict(self, mix: Mix) -> tuple[float | None, float, float]:
        """(expected tokens, median relative error of late, the error that one in ten exceeded)."""
        found = self._kinds[kind_of(mix)]
        if found.count < FEW:
            found = self._all
        if found.count < FEW:
            return None, UNKNOWN_ERROR, UNKNOWN_ERROR
        return max(1.0, _dot(found.weights, mix)), found.typical, found.spread

    def learn(self, mix: Mix, tokens: int) -> None:
        """A backend reported the prompt's tokens. Not for prompts with media: what those hold nobody counted."""
        if tokens > 0:
            kind = self._kinds[kind_of(mix)]
            kind.seen += 1
            if kind.count >= SETTLED and kind.seen % SETTLED_EVERY and kind.agrees(mix, tokens):
                return
            kind.learn(mix, tokens)
            # The model's overall weights speak for kinds that were seen too little.
            if self._all.count < 64 or kind.count % 8 == 0:
                self._all.learn(mix, tokens)

    def errors(self) -> dict[ContentKind, float]:
        """Median relative error of late, of the kinds that were seen."""
        return {kind: found.typical for kind, found in self._kinds.items() if found.count >= FEW}


def _dot(weights: Sequence[float], mix: Mix) -> float:
    total = 0.0
    for weight, count in zip(weights, mix, strict=False):
        total += weight * count
    return total


def _solve(rows: list[list[float]]) -> list[float]:
    """Gauss, with the largest pivot; the matrix is symmetric and positive."""
    for i in _RANGE:
        pivot = max(range(i, _N), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        top = rows[i]
        for below in rows[i + 1 :]:
            factor = below[i] / top[i]
            if factor:
                for j in range(i, _N + 1):
                    below[j] -= factor * top[j]
    found = [0.0] * _N
    for i in reversed(_RANGE):
        row = rows[i]
        rest = sum([row[j] * found[j] for j in range(i + 1, _N)])
        found[i] = (row[_N] - rest) / row[i]
    return found
