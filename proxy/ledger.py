"""Where what was used is kept: the interface that the limiter asks, and the one in this process.

Rules: accounts go by name (`key:NAME`, `tenant:NAME`, `model:NAME`). Which limits an account has is said beforehand, and
may change at any time. The maths is `policies.limits`; `sharedledger`, which gateways share, does the same elsewhere, which
is why `enter` may wait. Each `enter` that refused nothing is followed by exactly one `settle`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from policies import limits
from policies.limits import Account, Amount, LimitKind, Quota, Refusal, Standing
from proxy.clock import Clock
from proxy.keystore import Spent

Names = tuple[str, ...]


Entry = tuple[Refusal | None, Standing | None, Standing | None]
"""Why not, None if it was let in; what is left of requests and of tokens a minute, None where nobody limits that."""


class Ledger(Protocol):
    def configure(self, quotas: Mapping[str, Quota]) -> None:
        """These accounts, and no others, from now on."""
        ...

    async def enter(self, names: Names, ask: Amount) -> Entry:
        """All of these accounts pay, or none. Each must have been configured."""
        ...

    def settle(self, names: Names, ask: Amount, used: Amount) -> None:
        """What was let in has ended. Never waits, never fails."""
        ...


class LocalLedger:
    """Of one process. Budgets go in and out as rows (`load`, `changed`), for a store to keep; the rest begins anew."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._quotas: Mapping[str, Quota] = {}
        self._accounts: dict[str, Account] = {}
        self._together: dict[Names, tuple[Account, ...]] = {}
        self._kept: dict[tuple[str, str], Spent] = {}
        """Of budgets that no account has now, and what the store had."""
        self._leaving: list[Spent] = []
        """Rows that are to be kept, whatever has become of their accounts."""

    def load(self, rows: Iterable[Spent]) -> None:
        """What earlier processes spent. To be called before the first account is configured."""
        self._kept = {(row.account, row.kind): row for row in rows}

    def configure(self, quotas: Mapping[str, Quota]) -> None:
        self._leaving += self.changed()
        self._quotas, self._together = quotas, {}
        for name, account in tuple(self._accounts.items()):
            self._keep(name, account)
            quota = quotas.get(name)
            if quota is None and not account.running:
                del self._accounts[name]
            else:  # what runs will be settled
                self._set(name, account, quota or Quota())

    def _set(self, name: str, account: Account, quota: Quota) -> None:
        account.configure(quota)
        for budget in account.budgets:
            row = self._kept.pop((name, budget.kind.value), None)
            if row is not None:
                budget.resume(row.begins, row.spent)

    def _keep(self, name: str, account: Account) -> None:
        for budget in account.budgets:
            self._kept[name, budget.kind.value] = Spent(name, budget.kind.value, budget.begins, budget.spent)

    def accounts(self, names: Names) -> tuple[Account, ...]:
        return self._together.get(names) or self._find(names)

    def every(self) -> Iterable[tuple[str, Account]]:
        """Those that were used so far."""
        return self._accounts.items()

    async def enter(self, names: Names, ask: Amount) -> Entry:
        return self.enter_now(names, ask)

    def enter_now(self, names: Names, ask: Amount) -> Entry:
        """`enter`, which waits for nothing here."""
        accounts = self._together.get(names) or self._find(names)
        refusal = limits.enter(accounts, self._clock.now(), self._clock.wall(), ask)
        requests, tokens = limits.standings(accounts)
        return refusal, requests, tokens

    def take(self, names: Names, ask: Amount) -> None:
        """As a request that is let in, whether it fits or not."""
        at = limits.micros(self._clock.now())
        for account in self.accounts(names):
            account.refill(at)
            account.take(ask)

    def settle(self, names: Names, ask: Amount, used: Amount) -> None:
        accounts = self._together.get(names) or self._find(names)
        limits.settle(accounts, self._clock.now(), self._clock.wall(), ask, used)

    def _find(self, names: Names) -> tuple[Account, ...]:
        """Accounts are made when they are first used: there may be thousands of keys."""
        for name in names:
            if name not in self._accounts:
                self._accounts[name] = account = Account(Quota())
                self._set(name, account, self._quotas.get(name) or Quota())
        found = self._together[names] = tuple([self._accounts[name] for name in names])
        return found

    def limited(self) -> list[str]:
        """Accounts that something limits."""
        return list(self._quotas)

    def standing(self, name: str) -> dict[str, object] | None:
        """Its limits and how far each is used, as this process knows it; None: nothing limits it."""
        quota = self._quotas.get(name)
        if quota is None:
            return None
        account = self._accounts.get(name)
        if account is None:  # not used since the start
            account = Account(quota)
            for budget in account.budgets:
                if (row := self._kept.get((name, budget.kind.value))) is not None:
                    budget.resume(row.begins, row.spent)
        limits_ = {kind.value: value for kind in LimitKind if (value := getattr(quota, kind)) is not None}
        return {"limits": limits_, "used": limits.usage(account, self._clock.now(), self._clock.wall())}

    def changed(self) -> list[Spent]:
        """Budgets from which something was spent since the last time."""
        rows, self._leaving = self._leaving, []
        for name, account in self._accounts.items():
            if account.changed:
                account.changed = False
                rows += [
                    Spent(name, b.kind.value, b.begins, min(b.spent, 2**63 - 1)) for b in account.budgets
                ]
        return rows

    def unsaved(self, rows: Iterable[Spent]) -> None:
        """They were not kept: they will be among the next."""
        for row in rows:
            account = self._accounts.get(row.account)
            if account is None:
                self._leaving.append(row)
            else:
                account.changed = True
