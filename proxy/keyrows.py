"""A key of the store for people: what the command line and the admin API show of it. Nothing in it is secret."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.keystore import Spent, StoredKey


def date(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="minutes").replace("+00:00", "Z")


def left(key: StoredKey, now: float, budgets: Sequence[Spent]) -> dict[str, float]:
    """Of each budget of this key, as of now."""
    from policies.limits import BILLION, COSTS, Account
    from proxy.config import ConfigError, read_settings

    try:
        account = Account(read_settings(key.settings, key.label).limits.quota)
    except ConfigError:
        return {}
    spent = {row.kind: row for row in budgets if row.account == f"key:{key.label}"}
    rests: dict[str, float] = {}
    for budget in account.budgets:
        if (row := spent.get(budget.kind.value)) is not None:
            budget.resume(row.begins, row.spent)
        budget.roll(now)
        rest = max(0, budget.limit - budget.spent)
        rests[budget.kind.value] = rest / BILLION if budget.kind in COSTS else rest
    return rests


def row(key: StoredKey, now: float, used: float | None, budgets: Sequence[Spent]) -> dict[str, object]:
    state = "revoked" if key.revoked is not None else "expired" if over(key.expires, now) else "active"
    if state == "active" and len([until for _, until in key.hashes if not over(until, now)]) > 1:
        state = "rotating"
    return {
        "key": key.label,
        "name": key.name,
        "tenant": key.tenant,
        "made": date(key.made),
        "expires": None if key.expires is None else date(key.expires),
        "used": None if used is None else date(used),
        "state": state,
        "settings": key.settings,
        "left": left(key, now, budgets),
    }


def over(until: float | None, now: float) -> bool:
    return until is not None and until <= now
