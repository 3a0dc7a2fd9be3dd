"""Records out of the database, for other programs.

Rules: JSON lines are those of `telemetry.records`, key by key. In Parquet each key is a column, what is nested is JSON text,
`time` a timestamp; pyarrow is imported here only (`tierline[parquet]`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import islice
from typing import IO, Any

import orjson

from proxy.recordrow import KEYS

BATCH = 10_000

_INTS = frozenset(
    {"attempts", "in_flight", "reserved_tokens", "charged_tokens", "status", "bytes_in", "bytes_out"}
) | {key for key in KEYS if key.startswith(("prompt_tokens", "completion_tokens", "cached_tokens"))}
_FLOATS = frozenset({"prompt_tokens_error", "backoff_seconds"}) | {k for k in KEYS if k.endswith("_seconds")}
_FLAGS = frozenset({"stream", "tools"})
NESTED = frozenset({"drops", "failures", "continuation", "hedge", "tool_counts", "decisions"})


def json_lines(records: Iterable[dict[str, Any]], out: IO[bytes]) -> int:
    """How many there were."""
    count = 0
    for count, record in enumerate(records, 1):  # noqa: B007 (the last one is the answer)
        out.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
    return count


def parquet(records: Iterable[dict[str, Any]], path: str) -> int:
    """How many there were. Raises ImportError without pyarrow."""
    import pyarrow as pa
    from pyarrow import parquet as pq

    def kind(key: str) -> Any:
        if key == "time":
            return pa.timestamp("us", tz="UTC")
        if key in _FLOATS:
            return pa.float64()
        if key in _INTS:
            return pa.int64()
        return pa.bool_() if key in _FLAGS else pa.string()

    schema = pa.schema([(key, kind(key)) for key in KEYS])
    count = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for batch in _batches(records):
            count += len(batch)
            writer.write_table(pa.Table.from_pylist([_flat(record) for record in batch], schema=schema))
    return count


def _batches(records: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    left = iter(records)
    while batch := list(islice(left, BATCH)):
        yield batch


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    flat = dict(record)
    flat["time"] = datetime.fromisoformat(record["time"])
    for key in NESTED:
        if flat[key] is not None:
            flat[key] = orjson.dumps(flat[key]).decode()
    return flat
