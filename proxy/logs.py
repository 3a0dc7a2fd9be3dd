"""The log, on stderr: one set-up for every process of the gateway.

Rules: a message is one line, whatever it holds. What others say (a file, a backend, a client) can neither begin a line that
looks like ours nor move the cursor of who reads it. A traceback keeps its lines.
"""

from __future__ import annotations

import json
import logging
import re
from datetime import UTC, datetime

# Control characters, and what turns the reading direction or breaks a line: a terminal or a log's reader would obey them.
_ODD = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def harmless(text: str) -> str:
    """The text with each such character written out."""
    return _ODD.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class ConsoleFormatter(logging.Formatter):
    """For people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = harmless(record.message)
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, and the traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, str] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": harmless(record.getMessage()),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up_logging(level: str, style: str) -> None:
    """Send every logger to stderr. level: as in telemetry.log_level. style: "console" or "json"."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if style == "json" else ConsoleFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
