"""Reading recorded traffic. What the rows mean is `policies.simulation.traces`.

Rules: the format is told by the first line. `BadTrace` says which line is wrong and why.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path

import orjson

from policies.simulation.traces import HASHED_TOKENS, Row, Trace, trace


class BadTrace(ValueError):
    """A file that is no trace of a known kind."""


def read_trace(path: Path) -> Trace:
    """A Mooncake trace (a JSON object a line) or an Azure one (CSV with a head); named by its file."""
    with path.open(encoding="utf-8", newline="") as file:
        try:
            first = file.readline()
            file.seek(0)
            rows = list(mooncake(file) if first.lstrip().startswith("{") else azure(file))
        except UnicodeDecodeError:
            raise BadTrace("not text") from None
    if not rows:
        raise BadTrace("no requests in it")
    return trace(path.stem, rows)


def mooncake(lines: Iterable[str]) -> Iterator[Row]:
    """`timestamp` ms, `input_length`, `output_length`, `hash_ids` of the prompt's blocks of 512 tokens."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            one = orjson.loads(line)
            prompt, hashes = int(one["input_length"]), tuple(map(int, one["hash_ids"]))
            row = Row(float(one["timestamp"]) / 1000.0, prompt, int(one["output_length"]), hashes)
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise BadTrace(f"line {number}: {error!r}") from None
        if row.prompt < 1 or row.output < 1 or row.at < 0:
            raise BadTrace(f"line {number}: a time, a prompt and an output are needed")
        if len(hashes) != -(-prompt // HASHED_TOKENS):
            raise BadTrace(
                f"line {number}: {len(hashes)} hashes for {prompt} tokens; one for {HASHED_TOKENS} is expected"
            )
        yield row


def azure(lines: Iterable[str]) -> Iterator[Row]:
    """`TIMESTAMP`, `ContextTokens`, `GeneratedTokens`."""
    reader = csv.DictReader(lines)
    if reader.fieldnames is None or not {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= set(
        reader.fieldnames
    ):
        raise BadTrace(
            "neither a Mooncake trace nor an Azure one (TIMESTAMP, ContextTokens, GeneratedTokens)"
        )
    begin: datetime | None = None
    for number, one in enumerate(reader, 2):
        try:
            # Seven digits of a second are written there; Python reads six.
            at = datetime.fromisoformat(one["TIMESTAMP"][:26])
            prompt, output = int(one["ContextTokens"]), int(one["GeneratedTokens"])
        except (TypeError, ValueError) as error:
            raise BadTrace(f"line {number}: {error}") from None
        begin = begin or at
        yield Row(max(0.0, (at - begin).total_seconds()), max(1, prompt), max(1, output))
