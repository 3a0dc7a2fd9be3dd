"""A profile in a file: what `tierline bench` writes, and a backend's `profile = "FILE.toml"` reads.

Rules: text in, a `Profile` out, or every problem of it at once; no file is opened here. The keys are the fields of
`Measured`, in its units; rows are arrays of numbers in the order their types name. What was not measured is left out.
Nothing is borrowed from another profile: a file stands alone. Its latency is that of prompts in the prefix cache.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from policies.measured import Limit, LimitKind, Measured, Quality, SpecKind, Speculation
from policies.profile import Profile, build

_TEXTS = ("name", "title", "weights", "image", "decode_source", "latency_source", "prefill_source")
_WHOLE = ("tensor_parallel", "window_tokens", "kv_tokens", "max_num_seqs", "batched_tokens")
_FLAGS = ("disqualified",)
_LEAST_COLUMNS = {"decode": (3, 3), "latency": (4, 6), "prefill": (2, 2)}
"""Numbers in a row: at least, at most. TOML has no null: what is not known at a row's end is left out."""
_WHOLE_COLUMNS = {"decode": 2, "latency": 2, "prefill": 1}
"""How many of a row's first numbers are whole: streams and tokens."""


class BadProfile(ValueError):
    """The text is no profile. `problems`: one line each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


def read(text: str) -> Profile:
    """Raises `BadProfile` with everything that is wrong."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadProfile([str(error)]) from None
    problems = list(_problems(table))
    if problems:
        raise BadProfile(problems)
    return build(_measured(table), {})


def table(own: Measured) -> dict[str, object]:
    """What `read` takes back: plain data, in the order of `Measured`, without what is not known."""
    spec, quality = own.speculation, own.quality
    plain: dict[str, object] = {
        **{name: getattr(own, name) for name in _TEXTS[:4] if getattr(own, name)},
        **{name: getattr(own, name) for name in _WHOLE if getattr(own, name) is not None},
        **{name: True for name in _FLAGS if getattr(own, name)},
        **{f"{part}_source": source for part in _LEAST_COLUMNS if (source := getattr(own, f"{part}_source"))},
        **{part: [_row(row) for row in getattr(own, part)] for part in _LEAST_COLUMNS if getattr(own, part)},
        "quality": {
            name: value
            for name in ("method", "reference", "kl_bits", "kl_nats")
            if (value := getattr(quality, name)) is not None and value is not False
        },
    }
    if spec.draft_tokens:
        points = [list(point) for point in spec.acceptance]
        plain["speculation"] = {
            "kind": spec.kind.value,
            "draft_tokens": spec.draft_tokens,
            "acceptance": points,
        }
    if own.limits:
        plain["limits"] = [
            {"kind": one.kind.value, "note": one.note}
            | ({} if one.context_tokens is None else {"context_tokens": one.context_tokens})
            for one in own.limits
        ]
    return plain


def _row(row: tuple[float | None, ...]) -> list[float | None]:
    """Less the unknown at its end; one in the middle keeps its place as 0."""
    known = list(row)
    while known and known[-1] is None:
        known.pop()
    return [0.0 if value is None else value for value in known]


def _measured(table: Mapping[str, Any]) -> Measured:
    quality, spec = table.get("quality", {}), table.get("speculation", {})
    rows = {part: tuple(map(tuple, table.get(part, ()))) for part in _LEAST_COLUMNS}
    latency = tuple((*row, *[None] * (6 - len(row))) for row in rows["latency"])
    return Measured(
        **{name: table[name] for name in (*_TEXTS, *_WHOLE, *_FLAGS) if name in table}
        | {"title": table.get("title", table["name"]), "weights": table.get("weights", "unknown")},
        quality=Quality(**{"method": "not measured", **quality}),
        speculation=Speculation(
            SpecKind(spec.get("kind", SpecKind.OTHER if spec else SpecKind.NONE)),
            spec.get("draft_tokens", 0),
            tuple((int(x), float(share)) for x, share in spec.get("acceptance", ())),
        ),
        decode=rows["decode"],
        latency=latency,
        prefill=rows["prefill"],
        limits=tuple(
            Limit(LimitKind(one["kind"]), one.get("note", ""), one.get("context_tokens"))
            for one in table.get("limits", ())
        ),
    )


# -- what can be wrong -----------------------------------------------------------------------------------------


def _problems(table: Mapping[str, object]) -> Iterator[str]:
    known = {*_TEXTS, *_WHOLE, *_FLAGS, *_LEAST_COLUMNS, "quality", "speculation", "limits"}
    for name in table:
        if name not in known:
            yield f"{name}: a profile has no such key (known: {', '.join(sorted(known))})"
    yield from _kinds(table, dict.fromkeys(_TEXTS, _is_text), "a text")
    yield from _kinds(table, dict.fromkeys(_WHOLE, _is_count), "a whole number, at least 1")
    yield from _kinds(table, dict.fromkeys(_FLAGS, _is_flag), "true or false")
    for name in ("name", "window_tokens", "kv_tokens", *_LEAST_COLUMNS):
        if name not in table:
            yield f"{name}: missing"
    for part, (least, most) in _LEAST_COLUMNS.items():
        yield from _rows(part, table.get(part, ()), least, most)
    yield from _quality(table.get("quality", {}))
    yield from _speculation(table.get("speculation", {}))
    limits = table.get("limits", [])
    for index, one in enumerate(limits if isinstance(limits, list) else [None]):
        if not isinstance(one, dict) or one.get("kind") not in list(LimitKind):
            yield f"limits[{index}].kind: expected one of {', '.join(LimitKind)}"
        elif not _is_count(one.get("context_tokens", 1)):
            yield f"limits[{index}].context_tokens: expected a whole number, at least 1"


def _kinds(
    table: Mapping[str, object], checks: Mapping[str, Callable[[object], bool]], what: str
) -> Iterator[str]:
    for name, fits in checks.items():
        if name in table and not fits(table[name]):
            yield f"{name}: expected {what}"


def _rows(part: str, rows: object, least: int, most: int) -> Iterator[str]:
    if not isinstance(rows, list):
        if rows != ():
            yield f"{part}: expected an array of rows"
        return
    if not rows:
        yield f"{part}: has no row"
    whole = _WHOLE_COLUMNS[part]
    seen: list[tuple[float, ...]] = []
    for index, row in enumerate(rows):
        place = f"{part}[{index}]"
        if not isinstance(row, list) or not least <= len(row) <= most or not all(map(_is_number, row)):
            yield f"{place}: expected {least if least == most else f'{least} to {most}'} numbers, none below 0"
            continue
        if not all(isinstance(value, int) for value in row[:whole]) or (whole == 2 and row[0] < 1):
            yield f"{place}: streams (at least 1) and tokens are whole numbers"
        elif min(row[whole:least]) <= 0:
            yield f"{place}: rates and times are above 0"
        elif tuple(row[:whole]) in seen:
            yield f"{place}: measured twice"
        seen.append(tuple(row[:whole]))
    if part == "prefill" and seen != sorted(seen):
        yield f"{part}: rows go from the shortest prompt to the longest"


def _quality(quality: object) -> Iterator[str]:
    if not isinstance(quality, dict):
        yield "quality: expected a table"
        return
    fits = {"method": _is_text, "reference": _is_flag, "kl_bits": _is_number, "kl_nats": _is_number}
    for name, value in quality.items():
        if name not in fits or not fits[name](value):
            yield f"quality.{name}: expected method (text), reference (true or false), kl_bits or kl_nats (numbers)"


def _speculation(spec: object) -> Iterator[str]:
    if not isinstance(spec, dict):
        yield "speculation: expected a table"
        return
    if spec and spec.get("kind", SpecKind.OTHER) not in list(SpecKind):
        yield f"speculation.kind: expected one of {', '.join(SpecKind)}"
    if spec and not _is_count(spec.get("draft_tokens")):
        yield "speculation.draft_tokens: expected a whole number, at least 1"
    points = spec.get("acceptance", [])
    sound = isinstance(points, list) and all(
        isinstance(p, list) and len(p) == 2 and all(map(_is_number, p)) and p[1] <= 1 for p in points
    )
    if not sound or [p[0] for p in points] != sorted({p[0] for p in points}):
        yield "speculation.acceptance: expected [context tokens, share 0..1] by growing context"
    for name in spec:
        if name not in ("kind", "draft_tokens", "acceptance"):
            yield f"speculation.{name}: known are kind, draft_tokens and acceptance"


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 1 << 53


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e18
