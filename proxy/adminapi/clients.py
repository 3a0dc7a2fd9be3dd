"""Keys of the store, and how far limits are used.

Rules: the store is opened for one call, in a thread: the event loop never waits for a disk. A key is shown once, in the
answer that made it. What is changed here lasts, since the store does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from proxy.adminapi.gear import ApiError, Call, Gear
from proxy.config import check_key, moment
from proxy.keyrows import row
from proxy.keystore import NoSuchKey, Store, StoredKey, StoreError

T = TypeVar("T")
LASTS = "over restarts, in server.store"


async def keys(gear: Gear, call: Call) -> object:
    def read(store: Store) -> list[dict[str, object]]:
        uses, budgets, now = store.uses(), store.budgets(), gear.clock.wall()
        return [row(key, now, uses.get(key.label), budgets) for key in store.read()]

    return {"keys": await _with_store(gear, read)}


async def add(gear: Gear, call: Call) -> object:
    settings = dict(call.body)
    name = settings.pop("name")
    tenant = settings.pop("tenant", None) or name
    expires = _expires(gear, settings)
    settings = {key: value for key, value in settings.items() if value not in (None, [])}
    _check(gear, name, tenant, settings)

    def do(store: Store) -> tuple[StoredKey, str]:
        try:
            return store.add(gear.clock.wall(), name, tenant, settings, expires)
        except ValueError as error:
            raise ApiError(409, str(error), "key_exists", "name") from None

    made, text = await _changed(gear, do)
    call.log("key %s (%s) is made", made.label, name)
    return {**row(made, gear.clock.wall(), None, []), "secret": text, "lasts": LASTS}


async def change(gear: Gear, call: Call) -> object:
    given = dict(call.body)
    expires = _expires(gear, given) if "expires" in given else None

    def changed(key: StoredKey) -> tuple[Mapping[str, object], float | None]:
        merged = {**key.settings, **given}
        limits = given.get("limits")
        if isinstance(limits, dict):
            before = key.settings.get("limits")
            merged["limits"] = {**(before if isinstance(before, Mapping) else {}), **limits}
            merged["limits"] = {kind: value for kind, value in merged["limits"].items() if value is not None}
        settings = {name: value for name, value in merged.items() if value not in (None, [], {})}
        _check(gear, key.name, key.tenant, settings)
        return settings, expires if "expires" in call.body else key.expires

    return await _change(gear, call, call.params["key"], changed)


async def set_limits(gear: Gear, call: Call) -> object:
    scope, _, which = call.params["account"].partition(":")
    if scope != "key":
        why = "Limits of tenants and models stand in the configuration file: change them there, and reload."
        raise ApiError(409, why, "not_in_store", "account")
    limits = {kind: value for kind, value in call.body.items() if value is not None}

    def changed(key: StoredKey) -> tuple[Mapping[str, object], float | None]:
        settings = {name: value for name, value in key.settings.items() if name != "limits"}
        if limits:
            settings["limits"] = limits
        _check(gear, key.name, key.tenant, settings)
        return settings, key.expires

    return await _change(gear, call, which, changed)


async def revoke(gear: Gear, call: Call) -> object:
    which = call.params["key"]
    gone = await _changed(gear, lambda store: store.revoke(gear.clock.wall(), which))
    call.log("key %s (%s) is revoked", gone.label, gone.name)
    return {**row(gone, gear.clock.wall(), None, []), "lasts": LASTS}


async def rotate(gear: Gear, call: Call) -> object:
    which, grace = call.params["key"], float(call.body.get("grace_seconds", 0.0))
    made, text = await _changed(gear, lambda store: store.rotate(gear.clock.wall(), which, grace))
    call.log("key %s (%s) has another text, the old one works %g s more", made.label, made.name, grace)
    return {**row(made, gear.clock.wall(), None, []), "secret": text, "lasts": LASTS}


async def limits(gear: Gear, call: Call) -> object:
    found = [(name, gear.standing(name)) for name in gear.accounts()]
    return {"accounts": [{"account": name, **standing} for name, standing in found if standing is not None]}


async def one_limit(gear: Gear, call: Call) -> object:
    name = call.params["account"]
    standing = gear.standing(name)
    if standing is None:
        message = f"Nothing limits {name[:200]!r}: key:NAME, tenant:NAME or model:NAME."
        raise ApiError(404, message, "account_not_found", "account")
    return {"account": name, **standing}


# -- inside --------------------------------------------------------------------------------------------------


async def _with_store(gear: Gear, do: Callable[[Store], T]) -> T:
    def run() -> T:
        store = gear.store()
        try:
            return do(store)
        finally:
            store.close()

    try:
        return await asyncio.to_thread(run)
    except NoSuchKey:
        message = (
            "No key that is not revoked has this beginning or name."  # perhaps a key: not to be repeated
        )
        raise ApiError(404, message, "key_not_found", "key") from None
    except StoreError as error:
        raise ApiError(503, f"The store of keys cannot be used: {error}", "store_failed") from None


async def _changed(gear: Gear, do: Callable[[Store], T]) -> T:
    """And in force, when the answer comes."""
    done = await _with_store(gear, do)
    await gear.keys_changed()
    return done


async def _change(
    gear: Gear,
    call: Call,
    which: str,
    changed: Callable[[StoredKey], tuple[Mapping[str, object], float | None]],
) -> object:
    now = await _changed(gear, lambda store: store.change(which, changed))
    call.log("key %s (%s) is changed", now.label, now.name)
    return {**row(now, gear.clock.wall(), None, []), "lasts": LASTS}


def _check(gear: Gear, name: str, tenant: str, settings: Mapping[str, object]) -> None:
    problems = check_key(gear.config, name, tenant, settings)
    if problems:
        raise ApiError(409, "; ".join(problems), "key_refused", problems[0].partition(": ")[0])


def _expires(gear: Gear, settings: dict[str, Any]) -> float | None:
    text = settings.pop("expires", None)
    if text is None:
        return None
    until = moment(text)
    if until <= gear.clock.wall():
        raise ApiError(409, f"expires: {text} is over", "key_refused", "expires")
    return until
