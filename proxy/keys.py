"""Who has which key, and which limits: from the configuration and the store, kept up to date while the gateway runs.

Rules
1. The store is looked at every TURN_SECONDS, and what budgets spent is written then: in a thread, never on the request path.
   So a change by `tierline keys` is in force within a second, and a killed gateway has lost a second of spending at most.
2. What changed is put in force in one step, between two requests; what runs goes on under what it began with.
3. A store that cannot be read or written changes nothing: keys stay as last read, what was spent is written later. That is
   logged once, and counted.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

from policies.limits import Quota
from proxy.access import Caller, Callers
from proxy.clock import Clock
from proxy.config import Config, ConfigError, KeySettings, Tenant, read_settings
from proxy.keystore import Spent, Store, StoredKey, StoreError, hash_of
from proxy.ledger import LocalLedger

log = logging.getLogger("tierline.keys")

TURN_SECONDS = 0.5
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
        self._failing = False
        self.failures = 0
        """Turns of the store that failed."""
        self._secret = secrets.token_bytes(32)
        if config.server.store is not None:
            self._store = Store(config.server.store, durable=False)
            self._secret = self._store.secret
            ledger.load(self._store.budgets())
            self._stored = self._store.turn(()) or ()
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Another configuration from now on; its store is the same."""
        self._config = config
        self._apply(*read(config, self._stored, self._secret))

    def start(self) -> None:
        if self._store is not None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="keys")

    async def _run(self) -> None:
        while True:
            await self._clock.sleep(TURN_SECONDS)
            await self.turn()

    async def turn(self) -> None:
        """Write what was spent, and read the keys if they changed."""
        if self._store is None:
            return
        spent = self._ledger.changed()
        try:
            found = await self._in_thread(self._store, spent)
        except StoreError as error:
            self._ledger.unsaved(spent)
            self.failures += 1
            if not self._failing:
                log.error("the store cannot be used; keys stay as they are, spending is kept here: %s", error)
            self._failing = True
            return
        except asyncio.CancelledError:
            self._ledger.unsaved(spent)  # written once more, to the same end
            raise
        if self._failing:
            log.warning("the store can be used again")
            self._failing = False
        if found is not None:
            self._stored = found
            await self._read_again()
            alive = sum(key.revoked is None for key in found)
            log.info("the store's keys changed: %d are not revoked", alive)

    async def _read_again(self) -> None:
        """In a thread, for thousands of keys take a while."""
        config = self._config
        made = await asyncio.to_thread(read, config, self._stored, self._secret)
        if config is self._config:
            self._apply(*made)
        else:  # another configuration came meanwhile, and was put in force with the new keys
            self.configure(self._config)

    async def _in_thread(self, store: Store, spent: Sequence[Spent]) -> list[StoredKey] | None:
        self._turning = asyncio.get_running_loop().run_in_executor(None, store.turn, spent)
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
            await self._in_thread(store, spent)
        except StoreError as error:
            log.error("what was spent of late could not be written: %s", error)
        store.close()


def failures_counter(count: int) -> tuple[str, str, tuple[str, ...], list[tuple[tuple[str, ...], int]]]:
    """For the metrics."""
    text = "Times that the store of keys and budgets could not be read or written."
    return "tierline_store_failures", text, (), [((), count)]


def read(config: Config, stored: Sequence[StoredKey], secret: bytes) -> tuple[Callers, dict[str, Quota]]:
    """Who has which key, and what each key, tenant and model is limited to. Keys with the same settings share what is made
    of them: most do."""
    keys: list[tuple[bytes, Caller, float | None]] = []
    quotas = {f"model:{name}": model.limits.quota for name, model in config.models.items()}
    quotas |= {f"tenant:{name}": tenant.limits.quota for name, tenant in config.tenants.items()}
    for key in config.server.keys:
        caller = _caller(config, key.name, key.of_tenant, key)
        keys.append((hash_of(key.digest, secret), caller, None))
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
    return Callers(keys, secret, required=config.server.store is not None), quotas


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
