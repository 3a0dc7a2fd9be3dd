"""The policy: which is in force, whether another one would do, put it in force, go back.

Rules
1. A candidate stands in place of the tables [policy] and [tiers], both of them, as `tierline replay --policy` has it.
2. Replay is the command's, in a process of its own that gives way to this one; one at a time, for some minutes at most.
3. Python of a policy's own is named by the file alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proxy.adminapi.gear import ApiError, Call, Gear, put
from proxy.config import Config, ConfigError, load_over
from proxy.reload import PolicyInForce, differences
from proxy.tomltext import toml_lines

REPLAY_SECONDS = 300.0
REPORT_LINES = 200


async def show(gear: Gear, call: Call) -> object:
    *before, now = map(_told, gear.configured.policies)
    merged = gear.config.origin.merged
    tables = {name: merged[name] for name in ("policy", "tiers") if name in merged}
    where = "the configuration file" if gear.configured.overlay.policy is None else "the admin API"
    return {**now, "from": where, "tables": tables, "before": before[::-1]}


async def check(gear: Gear, call: Call) -> object:
    candidate = _candidate(gear, call)
    old = gear.config
    return {
        "policy": candidate.policy_digest,
        "in_force": old.policy_digest,
        "changed": list(differences(old, candidate)),
    }


async def replay(gear: Gear, call: Call) -> object:
    candidate = _candidate(gear, call)
    return {"policy": candidate.policy_digest, **await _replayed(gear, call)}


async def activate(gear: Gear, call: Call) -> object:
    candidate = _candidate(gear, call)
    answer: dict[str, object] = {}
    if call.body.get("replay"):
        answer["replay"] = found = await _replayed(gear, call)
        if not found["passed"]:
            raise ApiError(
                409, f"The replay says that it is worse: {found['worse']}", "policy_worse", "replay"
            )
    return {**answer, **_activated(gear, call, _tables(call), f"policy {candidate.policy_digest}")}


async def rollback(gear: Gear, call: Call) -> object:
    *before, now = gear.configured.policies
    digest = call.body.get("digest")
    found = [one for one in before if (one.digest == digest if digest else one.digest != now.digest)]
    if not found:
        what = f"No policy {digest!r}" if digest else "No other policy"
        raise ApiError(409, f"{what} was in force before, of those remembered.", "policy_not_found", "digest")
    return _activated(gear, call, found[-1].tables, f"back to policy {found[-1].digest}")


async def revert(gear: Gear, call: Call) -> object:
    done = put(gear, call, gear.configured.overlay.with_policy(None), "the policy of the file")
    return {"policy": done.policy, "changed": list(done.changed)}


def _activated(gear: Gear, call: Call, tables: Mapping[str, Any], what: str) -> dict[str, object]:
    document = gear.config.origin.document
    own = {name: document[name] for name in ("policy", "tiers") if name in document}
    overlay = gear.configured.overlay.with_policy(None if tables == own else tables)
    done = put(gear, call, overlay, what)
    return {"policy": done.policy, "changed": list(done.changed), "lasts": gear.configured.lasting}


def _tables(call: Call) -> dict[str, Any]:
    return {name: call.body[name] for name in ("policy", "tiers") if call.body.get(name) is not None}


def _candidate(gear: Gear, call: Call) -> Config:
    """Checked with everything else; nothing of it is in force."""
    tables = _tables(call)
    try:
        return load_over(gear.config, gear.configured.overlay.with_policy(tables))
    except ConfigError as error:
        source = gear.config.origin.source
        lines = [line.removeprefix(f"{source}: ") for line in error.problems]
        raise ApiError(409, "; ".join(lines), "config_refused", lines[0].partition(": ")[0]) from None


def _told(policy: PolicyInForce) -> dict[str, object]:
    return {"policy": policy.digest, "name": policy.name, "since": policy.since, "by": policy.by}


async def _replayed(gear: Gear, call: Call) -> dict[str, Any]:
    """What `tierline replay --gate` says of the records that this gateway writes."""
    config = gear.config
    records = config.telemetry.records_path
    if records is None or config.source is None:
        why = 'telemetry.records: must be a file ("file:PATH"), and the configuration too, for a replay'
        raise ApiError(409, why, "nothing_to_replay", "telemetry.records")
    if "replay" in gear.busy:
        raise ApiError(409, "A replay is under way: wait for its end.", "replay_runs")
    gear.busy.add("replay")
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = _written(_tables(call), folder)
            margin = call.body.get("margin_percent", 5.0)
            command = [sys.executable, "-m", "proxy", "replay", str(records), "--config", str(config.source)]
            command += ["--policy", path, "--gate", "--margin", str(margin)]
            command += ["--decisions-only"] if call.body.get("decisions_only") else []
            return await _run(gear, command)
    finally:
        gear.busy.discard("replay")


def _written(tables: Mapping[str, Any], folder: str) -> str:
    """A file of the candidate; one of defaults names one of them, or it would hold no policy at all."""
    path = Path(folder, "candidate.toml")
    path.write_text("\n".join(toml_lines(tables or {"policy": {"calibrate": True}})), "utf-8")
    return str(path)


async def _run(gear: Gear, command: list[str]) -> dict[str, Any]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    try:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, 10)
        async with gear.clock.timeout_at(gear.clock.now() + REPLAY_SECONDS):
            out, err = await process.communicate()
    except TimeoutError:
        raise ApiError(409, f"The replay took longer than {REPLAY_SECONDS:g} s.", "replay_too_long") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    told = err.decode("utf-8", "replace").strip()
    if process.returncode not in (0, 1):
        raise ApiError(409, f"The replay failed: {told[:2000]}", "replay_failed")
    worse = [line.removeprefix("worse: ") for line in told.splitlines() if line.startswith("worse: ")]
    if process.returncode == 1 and not worse:
        raise ApiError(409, f"The replay failed: {told[-2000:]}", "replay_failed")
    report = out.decode("utf-8", "replace").splitlines()[:REPORT_LINES]
    return {"passed": process.returncode == 0, "worse": worse, "report": report}
