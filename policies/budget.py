"""How many retries there may be: a share of the requests of late, and a floor.

A fleet that fails makes every request come twice; without a bound the retries alone keep it down. So retries are paid
for: every request adds `share` of one, a retry takes one, and `floor` a second are free, so that a quiet fleet can
always move a request. Counts fade over WINDOW seconds, so no burst is saved up for later.

Rules: no clock: `now` never goes back. A retry is charged to the backend that failed: one that fails all the time cannot
spend what the others may need. The sum of all bounds the fleet. A retry that cannot be paid is not made: the client is
told what failed.
"""

from __future__ import annotations

from math import exp

from policies.retry import RetryParams

WINDOW = 10.0
"""Seconds over which counts fade to a third."""


class Account:
    """Of one backend: requests sent to it, and retries after it failed; fading counts."""

    __slots__ = ("_at", "requests", "retries")

    def __init__(self) -> None:
        self.requests = self.retries = self._at = 0.0

    def fade(self, now: float) -> None:
        if now > self._at:
            share = exp((self._at - now) / WINDOW)
            self.requests *= share
            self.retries *= share
            self._at = now


class Budget:
    """Of a fleet. Names it has not heard of begin with nothing but the floor."""

    def __init__(self, params: RetryParams) -> None:
        self.params = params
        self._accounts: dict[str, Account] = {}

    def sent(self, now: float, name: str) -> None:
        """A request's first attempt goes to this backend."""
        self._account(now, name).requests += 1.0

    def retried(self, now: float, name: str) -> None:
        """A further attempt is made, because this backend failed."""
        self._account(now, name).retries += 1.0

    def allows(self, now: float, name: str) -> bool:
        """Whether one more retry after a failure of this backend can be paid, by it and by the fleet."""
        own = self._account(now, name)
        accounts = self._accounts.values()
        for account in accounts:
            account.fade(now)
        return self._pays(own.requests, own.retries) and self._pays(
            sum([account.requests for account in accounts]), sum([account.retries for account in accounts])
        )

    def _pays(self, requests: float, retries: float) -> bool:
        params = self.params
        return retries + 1.0 <= params.budget_share * requests + params.budget_floor * WINDOW

    def _account(self, now: float, name: str) -> Account:
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = Account()
        account.fade(now)
        return account
