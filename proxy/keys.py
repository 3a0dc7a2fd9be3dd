"""Who has which key, and which limits: from the configuration and the store, kept up to date while the gateway runs.

Rules
1. Every LOOK_SECONDS one look at the store's log says whether somebody has written. If so, and else every TURN_SECONDS, the
   store is read, and what budgets spent is written: in a thread, never on the request path. So a change by `tierline keys`
   is in force in 0.1 s or so, within a second at the latest, and a killed gateway has lost a second of spending at most.
   When keys were used is written every USES_SECONDS.
2. What changed is put in force in one step, between two requests; what runs goes on under what it began with.
3. A store that cannot be read or written changes nothing: keys stay as last read, what was spent is written later. That is
   logged once, and counted.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from policies.limits import Quota
from proxy.access import Caller, Callers
from proxy.clock import Clock
from proxy.config import Config, ConfigError, KeySettings, Tenant, read_settings
from proxy.keystore import NOBODY, Spent, Store, StoredKey, StoreError, hash_of
from proxy.ledger import LocalLedger

log = logging.getLogger("tierline.keys")

LOOK_SECONDS = 0.1
TURN_SECONDS = 0.5
USES_SECONDS = 10.0
CLOSE_SECONDS = 5.0

Apply = Callable[[Callers, dict[str, Quota]], None]


class Keys:
    """`apply` gets who has which key, and the quota of every account; at once, and at every change. Raises StoreError
    when the store cannot be opened."""

    def __init__(self, config: Config, clock: Clock, ledger: LocalLedger, apply: Apply) -> None:
        self._config = config
        self._clock = clock
        self._ledger = ledger
        self._apply = apply
        self._store: Store | None = None
        self._stored: Sequence[StoredKey] = ()
        self._task: asyncio.Task[None] | None = None
        self._turning: asyncio.Future[list[StoredKey] | None] | None = None
        self._one = asyncio.Lock()
        self._failing = False
        self.failures = 0
        """Turns of the store that failed."""
        self._secret = secrets.token_bytes(32)
        self._used: dict[str, float] = {}
        self._used_at = clock.now()
        """When it was written last."""
        if config.server.store is not None:
            self._store = Store(config.server.store, durable=False)
            self._secret = self._store.secret
            ledger.load(self._store.budgets())
            self._stored = self._store.turn(()) or ()
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Another configuration from now on; its store is the same."""
        self._config = config
        self._apply(*read(config, self._stored, self._secret, self._used))

    def start(self) -> None:
        if self._store is not None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="keys")

    async def _run(self) -> None:
        due = self._clock.now() + TURN_SECONDS
        while (store := self._store) is not None:
            await self._clock.sleep(LOOK_SECONDS)
            if store.touched() or self._clock.now() >= due:
                await self.turn()
                due = self._clock.now() + TURN_SECONDS

    async def turn(self) -> None:
        """Write what was spent, and read the keys if they changed. One at a time, as the store has it."""
        async with self._one:
            await self._turn()

    async def _turn(self) -> None:
        if self._store is None:
            return
        spent, now, used = self._ledger.changed(), self._clock.now(), NOBODY
        if now - self._used_at >= USES_SECONDS:
            used, self._used_at = self._used.copy(), now
            self._used.clear()
        try:
            found = await self._in_thread(self._store, spent, used)
        except StoreError as error:
            self._not_written(spent, used)
            self.failures += 1
            if not self._failing:
                log.error("the store cannot be used; keys stay as they are, spending is kept here: %s", error)
            self._failing = True
            return
        except asyncio.CancelledError:
            self._not_written(spent, used)  # or once more, to the same end
            raise
        if self._failing:
            log.warning("the store can be used again")
            self._failing = False
        if found is not None:
            self._stored = found
            await self._read_again()
            alive = sum(key.revoked is None for key in found)
            log.info("the store's keys changed: %d are not revoked", alive)

    def _not_written(self, spent: Sequence[Spent], used: Mapping[str, float]) -> None:
        self._ledger.unsaved(spent)
        for ident, at in used.items():
            self._used.setdefault(ident, at)

    async def _read_again(self) -> None:
        """In a thread, for thousands of keys take a while."""
        config = self._config
        made = await asyncio.to_thread(read, config, self._stored, self._secret, self._used)
        if config is self._config:
            self._apply(*made)
        else:  # another configuration came meanwhile, and was put in force with the new keys
            self.configure(self._config)

    async def _in_thread(
        self, store: Store, spent: Sequence[Spent], used: Mapping[str, float]
    ) -> list[StoredKey] | None:
        self._turning = asyncio.get_running_loop().run_in_executor(None, store.turn, spent, used)
        return await asyncio.shield(self._turning)

    async def close(self) -> None:
        """Write what is left. Later calls do nothing."""
        store, self._store = self._store, None
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if store is None:
            return
        if self._turning is not None:
            await asyncio.gather(self._turning, return_exceptions=True)
        spent = self._ledger.changed()
        try:
            await self._in_thread(store, spent, self._used)
        except StoreError as error:
            log.error("what was spent of late could not be written: %s", error)
        store.close()


def failures_counter(count: int) -> tuple[str, str, tuple[str, ...], list[tuple[tuple[str, ...], int]]]:
    """For the metrics."""
    text = "Times that the store of keys and budgets could not be read or written."
    return "tierline_store_failures", text, (), [((), count)]


def read(
    config: Config, stored: Sequence[StoredKey], secret: bytes, used: dict[str, float] | None = None
) -> tuple[Callers, dict[str, Quota]]:
    """Who has which key, and what each key, tenant and model is limited to. Keys with the same settings share what is made
    of them: most do."""
    keys: list[tuple[bytes, Caller, float | None]] = []
    quotas = {f"model:{name}": model.limits.quota for name, model in config.models.items()}
    quotas |= {f"tenant:{name}": tenant.limits.quota for name, tenant in config.tenants.items()}
    for key in config.server.keys:
        caller = _caller(config, key.name, key.of_tenant, key)
        keys.append((hash_of(key.digest, secret), caller, key.expires_at))
        quotas[f"key:{key.name}"] = key.limits.quota
    quotas = {name: quota for name, quota in quotas.items() if quota}
    known: dict[tuple[str, str], tuple[Caller, Quota | None]] = {}
    for row in stored:
        if row.revoked is not None:
            continue
        like = row.tenant, repr(row.settings)
        if like not in known:
            try:
                settings = read_settings(row.settings, f"key {row.label}")
            except ConfigError as error:
                log.error("a key of the store lets nobody in: %s", error)
                continue
            known[like] = _caller(config, row.label, row.tenant, settings), settings.limits.quota or None
        caller, quota = known[like]
        caller = replace(caller, ident=row.label)
        if quota is not None:
            quotas[f"key:{row.label}"] = quota
        for hashed, until in row.hashes:
            times = [time for time in (row.expires, until) if time is not None]
            keys.append((hashed, caller, min(times) if times else None))
    return Callers(keys, secret, required=config.server.store is not None, used=used), quotas


def _caller(config: Config, ident: str, tenant: str, settings: KeySettings) -> Caller:
    """A key under its tenant: both have to allow, and the key's own value wins."""
    over = config.tenants.get(tenant) or Tenant()
    priority = settings.priority if settings.priority is not None else over.priority
    reserve = settings.reserve_tokens if settings.reserve_tokens is not None else over.reserve_tokens
    return Caller(
        ident,
        tenant,
        _both(settings.models, over.models),
        _both(settings.tiers, over.tiers),
        priority or 0,
        settings.tool_format or over.tool_format,
        reserve,
    )


def _both(one: Sequence[str], other: Sequence[str]) -> frozenset[str] | None:
    """What both lists allow; an empty one allows all. None: all."""
    if one and other:
        return frozenset(one) & frozenset(other)
    return frozenset(one or other) or None
