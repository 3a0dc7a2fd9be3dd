"""One line in the log for each request that ended (`telemetry.log_requests`): for who reads logs.

Rules: off the response path, as records are; nothing secret and nothing personal: no key, tenant, session, address or path's
query. A name that a client made up is shown escaped and cut, so that it can neither break a line nor a terminal.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import orjson

from proxy.clock import Clock
from proxy.config import Config
from proxy.record import Measures, Record
from proxy.recorder import Batches

NAME = "tierline.requests"
MOST = 80
"""Characters that are shown of a name."""


class RequestLog:
    """Writes them with a thread, at most half a second late."""

    def __init__(self, clock: Clock, style: str, write: Callable[[str], object] | None = None) -> None:
        self._line = json_line if style == "json" else console_line
        self._write = write or sys.stderr.write
        self._lines = Batches(clock, self._flush, "lines of requests", 0.5, 20_000)

    def _flush(self, lines: Sequence[str]) -> None:
        self._write("".join(lines))

    def add(self, record: Record, derived: Measures) -> None:
        """Take a closed record. Never blocks."""
        if self._lines.room():
            self._lines.put(self._line(record, derived))

    async def close(self) -> None:
        await self._lines.close()


def request_log(config: Config, clock: Clock) -> RequestLog | None:
    telemetry = config.telemetry
    if not telemetry.log_requests or not logging.getLogger(NAME).isEnabledFor(logging.INFO):
        return None
    return RequestLog(clock, telemetry.log_format)


def fields(record: Record, derived: Measures) -> dict[str, object]:
    """What is said, in its order; what a request has not is left out. Seconds and tokens."""
    said = {
        "request_id": record.request_id,
        "outcome": record.outcome.value,
        "status": record.status,
        "api": record.api,
        "model": _name(record.model),
        "tier": record.tier,
        "backend": record.backend,
        "reason": record.reason,
        "attempts": record.attempts if record.attempts > 1 else None,
        "error": _name(record.error) if record.status is None or record.status >= 400 else None,
        "queue_wait_seconds": _round(derived.queue_wait),
        "ttft_seconds": _round(derived.ttft),
        "e2e_seconds": _round(derived.e2e),
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
    }
    return {key: value for key, value in said.items() if value is not None}


def json_line(record: Record, derived: Measures) -> str:
    head = {"time": _ended(record).isoformat(timespec="milliseconds"), "level": "info", "logger": NAME}
    line = {**head, "message": "request", **fields(record, derived)}
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE).decode()


def console_line(record: Record, derived: Measures) -> str:
    """As the other lines of the log: local time, level, logger; then key=value."""
    time = _ended(record).astimezone()
    said = " ".join(
        f"{key.removesuffix('_seconds')}={value}" for key, value in fields(record, derived).items()
    )
    return f"{time:%Y-%m-%d %H:%M:%S},{time.microsecond // 1000:03d} INFO    {NAME}: {said}\n"


def _ended(record: Record) -> datetime:
    seconds = 0.0 if record.finished_at is None else record.finished_at - record.accepted_at
    return datetime.fromtimestamp(record.time + seconds, UTC)


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _name(text: str | None) -> str | None:
    if text is None or (len(text) <= MOST and text.isascii() and text.isprintable() and " " not in text):
        return text
    return text[:MOST].encode("unicode_escape").decode().replace(" ", "\\x20")
