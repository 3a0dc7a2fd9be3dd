"""`python -m proxy.replay.whatif`: the live page's replay, one job as JSON on stdin, the outcome as JSON on stdout.

Rules: the lowest priority there is, no change of anything. Problems of the candidate are part of the outcome; the exit
code is not 0 only for what is a fault of ours. Modelled outcomes compare two models, and neither is what happened.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson

from policies.router import Router
from policies.simulation import Served
from policies.simulation.score import quantile
from proxy.config import Config, ConfigError, load_with
from proxy.recordrow import COLUMNS, plain
from proxy.replay.choices import Choices, replay
from proxy.replay.model import CannotModel, scored, turns
from proxy.replay.model import traffic as traffic_of
from proxy.replay.records import Recorded, recorded

MOST = 3000
"""Records; the latest ones."""
MOST_MOVED = 50


def main() -> None:
    os.nice(19)
    job = orjson.loads(sys.stdin.buffer.read())
    sys.stdout.buffer.write(orjson.dumps(outcome(job)))


def outcome(job: dict[str, Any]) -> dict[str, Any]:
    """config, store: paths. since: seconds since the epoch. active, candidate: TOML."""
    try:
        table = tomllib.loads(job["candidate"]).get("policy", {})
        if isinstance(table, dict) and table.get("file") is not None:
            return {
                "problems": [
                    "policy.file: a policy of one's own is not tried here; use tierline replay --policy"
                ]
            }
        old, new = _config(job["config"], job["active"]), _config(job["config"], job["candidate"])
    except tomllib.TOMLDecodeError as error:
        return {"problems": [f"candidate: {error}"]}
    except ConfigError as error:
        return {"problems": list(error.problems)}
    records, cut = _read(job["store"], job["since"])
    if not records:
        return {"problems": ["nothing was recorded in the last hour"]}
    tiers = {name: tier for name in new.tiers if (tier := new.tier(name)) is not None}
    choices = replay(records, Router(new.policy_params.router, new.policy.ranking), tiers)
    found: dict[str, Any] = {
        "records": len(records),
        "cut": cut,
        "policy": {"before": old.policy_digest, "after": new.policy_digest},
        "decisions": _decisions(records, choices),
    }
    try:
        found["model"] = {"before": _model(records, old), "after": _model(records, new)}
    except CannotModel as error:
        found["not_modelled"] = str(error)
    return found


def _config(path: str, text: str) -> Config:
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        try:
            return load_with(path, file.name)
        except ConfigError as error:
            raise ConfigError([line.replace(file.name, "candidate") for line in error.problems]) from None


def _read(store: str, since: float) -> tuple[list[Recorded], bool]:
    columns = ", ".join(COLUMNS)
    with closing(sqlite3.connect(f"{Path(store).absolute().as_uri()}?mode=ro", uri=True)) as db:
        rows = db.execute(f"SELECT {columns} FROM requests ORDER BY id DESC LIMIT ?", (MOST,)).fetchall()
    found = [recorded(plain(row)) for row in rows if row[0] >= since]
    found.sort(key=lambda record: record.at)
    return found, len(found) == MOST


def _decisions(records: Sequence[Recorded], choices: Choices) -> dict[str, Any] | None:
    """Exact, for the state that the recorded policy brought about. None: they were not recorded."""
    if not choices.decisions:
        return None
    was = Counter(trace.decision.backend for record in records for trace in record.traces)
    now = was.copy()
    for moved in choices.moved:
        now[moved.was] -= 1
        now[moved.now] += 1
    names = sorted({*was, *now}, key=str)
    return {
        "made": choices.decisions,
        "same": choices.same,
        "cost_before": choices.cost_was,
        "cost_after": choices.cost_now,
        "backends": [{"backend": name, "before": was[name], "after": now[name]} for name in names],
        "moved": [
            {
                "request_id": moved.request_id,
                "before": moved.was,
                "after": moved.now,
                "ttft_before": moved.ttft_was,
                "ttft_after": moved.ttft_now,
            }
            for moved in choices.moved[:MOST_MOVED]
        ],
    }


def _model(records: Sequence[Recorded], config: Config) -> dict[str, Any]:
    found = traffic_of(records, config)
    served = turns(found, config)
    score = scored(served, found, config)
    return {
        "answered": score.answered,
        "shed": score.shed_once,
        "goodput": _number(score.goodput),
        "ttft50": _number(score.ttft50),
        "ttft95": _number(score.ttft95),
        "tpot95": _number(score.tpot95),
        "waited95": _number(score.waited95),
        "cached": _number(score.cached),
        "backends": [_backend(backend.name, served) for backend in config.backends],
    }


def _backend(name: str, served: Sequence[Served]) -> dict[str, Any]:
    mine = [one for one in served if one.machine == name]
    ttft = sorted([one.ttft for one in mine if one.ttft is not None])
    tpot = sorted([one.tpot for one in mine if one.tpot is not None])
    waited = sorted([one.sent - one.asked for one in mine if one.sent is not None])
    return {
        "backend": name,
        "requests": len(mine),
        "ttft50": _number(quantile(ttft, 0.5)),
        "ttft95": _number(quantile(ttft, 0.95)),
        "tpot50": _number(quantile(tpot, 0.5)),
        "waited95": _number(quantile(waited, 0.95)),
    }


def _number(value: float) -> float | None:
    """JSON has no nan."""
    return value if value == value else None


if __name__ == "__main__":
    main()
