"""What is in force, where it comes from, and reading it again; why a request went where it went; the metrics."""

from __future__ import annotations

from dataclasses import replace

from proxy import __version__
from proxy.adminapi.gear import ApiError, Call, Gear, Raw, put
from proxy.config import NOTHING, effective


async def health(gear: Gear, call: Call) -> object:
    return {"status": "ok"}


async def version(gear: Gear, call: Call) -> object:
    return {"version": __version__}


async def config(gear: Gear, call: Call) -> object:
    return {
        **effective(gear.config),
        "policy_digest": gear.config.policy_digest,
        "from_admin_api": {**gear.configured.overlay.plain(), "lasts": gear.configured.lasting},
    }


async def changes(gear: Gear, call: Call) -> object:
    return {**gear.configured.overlay.plain(), "lasts": gear.configured.lasting}


async def revert(gear: Gear, call: Call) -> object:
    """Back to the file, but for who is drained: that ends one by one."""
    overlay = replace(NOTHING, draining=gear.configured.overlay.draining)
    done = put(gear, call, overlay, "everything as in the file")
    return {"policy": done.policy, "changed": list(done.changed)}


async def reload(gear: Gear, call: Call) -> object:
    done = gear.configured.reload(f"asked {call.by}")
    if done.problems:
        raise ApiError(409, "; ".join(done.problems), "config_refused")
    return {"policy": done.policy, "changed": list(done.changed)}


async def explain(gear: Gear, call: Call) -> object:
    ident = call.params["request_id"]
    story = gear.stories.find(ident)
    if story is None:
        message = f"Nothing is remembered of request {ident[:200]!r}: only the last ones are."
        raise ApiError(404, message, "request_not_found", "request_id")
    return story


async def metrics(gear: Gear, call: Call) -> object:
    found = gear.metrics.render(call.accept)
    return Raw(*(found if isinstance(found, tuple) else await found))
