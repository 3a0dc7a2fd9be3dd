"""Backends: which there are and how they are; drain, add, change, remove.

Rules: a change goes through the same check and the same step as a reload of the file. What is given is the table of
[[backends]] as it would stand in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.adminapi.gear import ApiError, Call, Gear, Shown, put
from proxy.config import Added


async def all_of_them(gear: Gear, call: Call) -> object:
    return {"backends": list(gear.pool.snapshot())}


async def one(gear: Gear, call: Call) -> object:
    name = call.params["name"]
    return {**_shown(gear, name), "configured": gear.table(name)}


async def drain(gear: Gear, call: Call) -> object:
    return _drained(gear, call, True)


async def undrain(gear: Gear, call: Call) -> object:
    return _drained(gear, call, False)


async def add(gear: Gear, call: Call) -> object:
    table = dict(call.body)
    name, models = table["name"], tuple(table.pop("models", ()))
    if gear.table(name) is not None:
        raise ApiError(409, f"A backend is named {name!r} already: change it.", "backend_exists", "name")
    for model in models:
        if model not in gear.config.models:
            raise ApiError(409, f"No model is named {model!r}.", "model_not_found", "models")
    return _put(gear, call, name, table, models, "backend %s is added")


async def change(gear: Gear, call: Call) -> object:
    name = call.params["name"]
    before = gear.table(name)
    if before is None:
        raise _unknown(name)
    known = gear.configured.overlay.backends.get(name)
    models = known.models if known is not None else ()
    return _put(gear, call, name, _merged(before, call.body), models, "backend %s is changed")


async def remove(gear: Gear, call: Call) -> object:
    name = call.params["name"]
    if gear.table(name) is None:
        raise _unknown(name)
    overlay = gear.configured.overlay.without_backend(name).with_draining(name, False)
    if _in_file(gear, name) is not None:
        overlay = overlay.with_backend(name, None)
    done = put(gear, call, overlay, f"backend {name} is removed")
    return {"name": name, "changed": list(done.changed), "lasts": gear.configured.lasting}


def _put(
    gear: Gear, call: Call, name: str, table: Mapping[str, Any], models: tuple[str, ...], what: str
) -> object:
    overlay = gear.configured.overlay
    if table == _in_file(gear, name) and not models:
        overlay = overlay.without_backend(name)  # as the file has it
    else:
        overlay = overlay.with_backend(name, Added(table, models))
    done = put(gear, call, overlay, what % name)
    return {**_shown(gear, name), "changed": list(done.changed), "lasts": gear.configured.lasting}


def _drained(gear: Gear, call: Call, draining: bool) -> object:
    name = call.params["name"]
    before = _shown(gear, name)
    gear.pool.set_draining(name, draining)
    gear.configured.drained(name, draining)
    call.log("backend %s: draining %s -> %s", name, before.get("draining"), draining)
    return {**_shown(gear, name), "lasts": gear.configured.lasting}


def _merged(before: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """null takes a key away; tables change key by key."""
    merged = dict(before)
    for key, value in changes.items():
        below = merged.get(key)
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict) and isinstance(below, dict):
            merged[key] = _merged(below, value)
        else:
            merged[key] = value
    return merged


def _in_file(gear: Gear, name: str) -> Mapping[str, Any] | None:
    tables = gear.config.origin.document.get("backends", ())
    return next((table for table in tables if table["name"] == name), None)


def _shown(gear: Gear, name: str) -> Shown:
    for backend in gear.pool.snapshot():
        if backend["name"] == name:
            return backend
    raise _unknown(name)


def _unknown(name: str) -> ApiError:
    return ApiError(404, f"No backend is named {name[:200]!r}.", "backend_not_found", "name")
