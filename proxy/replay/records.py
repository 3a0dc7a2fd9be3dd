"""Records read back: what was asked, what was decided, what became of it.

Rules: one line of JSON each, in any order; a line that is no record is told with its number. Decisions are there if
`telemetry.decisions` was on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from policies.trace import Trace
from proxy.decisions import read


class BadRecords(Exception):
    """What is wrong, in one line."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request. at: seconds since the epoch, when it was accepted. ttft: seconds from accept to the first token."""

    request_id: str
    at: float
    tier: str | None
    tenant: str | None
    conversation: str | None
    backend: str | None
    policy: str | None
    outcome: str
    stream: bool
    tools: bool
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    estimate: int | None
    ttft: float | None
    tpot: float | None
    traces: tuple[Trace, ...]
    raw: dict[str, Any]


def read_records(path: Path) -> list[Recorded]:
    """By arrival."""
    try:
        found = list(_lines(path))
    except OSError as error:
        raise BadRecords(f"{path} cannot be read: {error.strerror}") from None
    if not found:
        raise BadRecords(f"{path} holds no record")
    return sorted(found, key=lambda record: record.at)


def _lines(path: Path) -> Iterator[Recorded]:
    with path.open("rb") as lines:
        for number, text in enumerate(lines, 1):
            if not text.strip():
                continue
            try:
                yield recorded(orjson.loads(text))
            except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
                raise BadRecords(f"line {number} is no record of Tierline: {error!r}") from None


def recorded(data: dict[str, Any]) -> Recorded:
    """A record, from the keys of its line. Raises KeyError, TypeError or ValueError."""
    return Recorded(
        data["request_id"],
        datetime.fromisoformat(data["time"]).timestamp(),
        data["tier"],
        data["tenant"],
        data.get("conversation") or data["session"],
        data["backend"],
        data.get("policy"),
        data["outcome"],
        data["stream"],
        data["tools"],
        data["prompt_tokens"],
        data["completion_tokens"],
        data["cached_tokens"],
        data["prompt_tokens_estimate"],
        data["ttft_seconds"],
        data["tpot_seconds"],
        tuple(read(decision) for decision in data.get("decisions") or ()),
        data,
    )
