"""What the running gateway says of itself, as the page shows it: conversations, and what limits leave.

Rules: read, never changed; bounded lists. A conversation is a hash, and what is no hash yet becomes one here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Protocol

from policies.fleet import Fleet
from policies.limits import MINUTE, Account, LimitKind, micros

MOST_TALKS = 200
MOST_ACCOUNTS = 500
_HEX = frozenset("0123456789abcdef")


class Accounts(Protocol):
    def every(self) -> Iterable[tuple[str, Account]]: ...


def conversations(fleet: Fleet, now: float) -> dict[str, Any]:
    """backends: what lives on each, and how much may. talks: the latest ones, with the state each is in."""
    talks, share = fleet.talks, fleet.params.working_set.kv_share
    return {
        "known": len(talks),
        "backends": [
            {
                "backend": name,
                "live": talks.live.get(name, 0),
                "tokens": round(talks.tokens.get(name, 0.0)),
                "budget": round(state.member.kv_tokens * share * state.fill),
                "kv_tokens": state.member.kv_tokens,
                "share": state.fill,
                "busy": round(state.busy(now), 4),
            }
            for name, state in fleet.states.items()
        ],
        "talks": [
            {
                "conversation": name_of(talk.key),
                "backend": talk.backend,
                "state": "running" if talk.running else "live" if talk.weight else "idle",
                "running": talk.running,
                "turns": talk.turns,
                "tokens": round(talk.context),
                "counted": round(talk.weight),
                "age_seconds": None if talk.running else round(max(0.0, now - talk.ended), 1),
                "patience_seconds": round(talk.habits.patience, 1),
            }
            for talk in talks.latest(MOST_TALKS)
        ],
    }


def name_of(key: str) -> str:
    """As records name it, where they do."""
    if len(key) == 12 and _HEX.issuperset(key):
        return key
    return hashlib.blake2b(key.encode("utf-8", "replace"), digest_size=6).hexdigest()


def standings(accounts: Accounts, now: float, wall: float) -> list[dict[str, Any]]:
    """Each limit of each account that was used since the start: how much of it is taken."""
    rows = (row for name, account in accounts.every() for row in _standings(name, account, now, wall))
    return list(islice(rows, MOST_ACCOUNTS))


def _standings(name: str, account: Account, now: float, wall: float) -> Iterator[dict[str, Any]]:
    scope, _, whose = name.partition(":")

    def row(kind: LimitKind, used: float, limit: float, seconds: float | None) -> dict[str, Any]:
        return {
            "scope": scope,
            "name": whose,
            "limit": kind.value,
            "used": used,
            "of": limit,
            "renewed_seconds": seconds,
        }

    if (most := account.quota.concurrent_requests) is not None:
        yield row(LimitKind.CONCURRENT, account.running, most, None)
    for kind, bucket in ((LimitKind.REQUESTS, account.requests), (LimitKind.TOKENS, account.tokens)):
        if bucket is not None:
            used = max(0, bucket.used - max(0, micros(now) - bucket.at) * bucket.limit)
            yield row(kind, round(used / MINUTE, 3), bucket.limit, round(used / bucket.limit / 1e6, 1))
    for budget in account.budgets:
        over = wall >= budget.ends
        held = account.held_cost if budget.costs else account.held_tokens
        used, unit = (held if over else budget.spent + held), 1e9 if budget.costs else 1
        yield row(budget.kind, used / unit, budget.limit / unit, None if over else round(budget.ends - wall))
