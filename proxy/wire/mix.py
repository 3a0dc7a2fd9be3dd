"""What a prompt's text is made of, counted in a sample of its bytes.

Rules: a sample of at most `_MOST` bytes in even steps, so that a long prompt costs what a short one does; escapes of
JSON count as what they stand for. Pictures and other base64 are left out. No tokenizer, nothing is decoded.
"""

from __future__ import annotations

from typing import NamedTuple

from proxy.wire.errors import Api
from proxy.wire.request import TEXT, RequestBody, texts

_WHOLE, _WINDOW = 2048, 256
_FEW, _MANY, _LONG = 8, 16, 16384


def _classes() -> bytes:
    table = bytearray(b"p" * 128 + b"w" * 128)
    for letters, name in (
        (b"abcdefghijklmnopqrstuvwxyz", b"l"),
        (b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", b"u"),
        (b"0123456789", b"d"),
        (b" ", b"s"),
        (b"\n\r\t", b"n"),
    ):
        for letter in letters:
            table[letter] = name[0]
    return bytes(table)


_CLASS = _classes()
_IS_LETTER = bytes(1 if c in b"lu" else 0 for c in _CLASS)
_IS_MARK = bytes(1 if c == b"p"[0] else 0 for c in _CLASS)


class Counts(NamedTuple):
    """As in `policies.calibrate.Mix`, which says what each is."""

    letters: float
    digits: float
    spaces: float
    lines: float
    wide: float
    marks: float
    words: float
    groups: float
    escapes: float
    humps: float
    gaps: float
    tools: float
    messages: float
    begun: float


def count_mix(body: RequestBody) -> Counts:
    """Of everything that the model reads; of tool declarations the size only."""
    sizes = body.sizes
    length = max(0, sizes.text_bytes - sizes.media_bytes)
    sample = _sample(body, length)
    scale = length / len(sample) if sample else 0.0
    sample = sample.replace(b"\\n", b"\n").replace(b'\\"', b'"')
    kinds = sample.translate(_CLASS)
    small, capitals = kinds.count(b"l"), kinds.count(b"u")
    digits, lines, wide, marks = kinds.count(b"d"), kinds.count(b"n"), kinds.count(b"w"), kinds.count(b"p")
    return Counts(
        (small + capitals) * scale,
        digits * scale,
        (len(kinds) - small - capitals - digits - lines - wide - marks) * scale,
        lines * scale,
        wide * scale,
        marks * scale,
        sample.translate(_IS_LETTER).count(b"\0\1") * scale,
        sample.translate(_IS_MARK).count(b"\0\1") * scale,
        sample.count(b"\\u") * scale,
        kinds.count(b"lu") * scale,
        kinds.count(b"ss") * scale,
        float(sizes.tools_bytes),
        float(sizes.messages),
        1.0 if body.api is not Api.COMPLETIONS else 0.0,
    )


def _sample(body: RequestBody, length: int) -> bytes:
    """The text itself where it is short, else windows of it. Spans of base64 are no text."""
    data = body.scan.data
    spans = [span for key in TEXT[body.api] if (span := body.scan.span(key)) is not None]
    if body.sizes.media_bytes:
        spans = [part for begin, end in spans for part in texts(data, begin, end)]
    if length <= _WHOLE:
        return b"".join([data[begin:end] for begin, end in spans])
    step = length // (_FEW if length < _LONG else _MANY)
    parts = []
    at = step // 2
    for begin, end in spans:
        while at + _WINDOW <= end - begin:
            parts.append(data[begin + at : begin + at + _WINDOW])
            at += step
        at = max(0, at - (end - begin))
    return b"".join(parts)
