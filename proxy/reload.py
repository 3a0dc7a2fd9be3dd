"""Another configuration without a restart: by SIGHUP, by the admin listener, or because the file changed.

Rules
1. The file is read and checked whole, before anything is touched. With a problem in it the old configuration stays, and
   the problem is told to whoever asked and to the log.
2. What can change is swapped in one step, between two requests: `RELOADABLE`. A file that also changes something else is
   refused, and each such key is named: half a change is none. What runs goes on under what it began with.
3. What was learned (speeds, caches, tokens) stays, of a backend while its URL and its model's name do.
4. What the admin API changes is an overlay over the file: a reload reads the file anew and lays it over again. It is kept in
   `server.state`, or until the next start. Policies that were in force are remembered, to go back to.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from proxy.clock import Clock
from proxy.config import Config, ConfigError, Overlay, load, load_over
from proxy.kept import keep
from proxy.series import RELOAD_OUTCOMES

log = logging.getLogger("tierline.reload")

RELOADABLE = (
    "backends",
    "policy",
    "tiers",
    "models",
    "tenants",
    "timeouts",
    "pool",
    "health",
    "admin.key",
    "admin.keys",
    "server.allow_unauthenticated",
    "server.body_timeout",
    "server.cors_origins",
    "server.drain_timeout",
    "server.header_timeout",
    "server.keepalive_timeout",
    "server.keys",
    "server.max_body_bytes",
    "server.max_connections",
    "server.public_paths",
    "server.session_headers",
    "server.trusted_proxies",
    "server.watch_config",
    "telemetry.decisions",
    "telemetry.client_addresses",
    "telemetry.log_level",
)
"""Sections and keys that a reload takes."""

POLICIES = 10
"""How many are remembered."""

Family = tuple[str, str, tuple[str, ...], Sequence[tuple[tuple[str, ...], float]]]
"""Of the metrics: name, help, labels, values."""


@dataclass(frozen=True, slots=True)
class Reloaded:
    """problems: why nothing changed; empty when the new configuration is in force. changed: what of it is new."""

    policy: str
    changed: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PolicyInForce:
    """tables: `policy` and `tiers`, as they were written. since: seconds since the epoch. by: who put it in force."""

    digest: str
    name: str
    tables: Mapping[str, Any]
    since: float
    by: str


class Reloader:
    """`apply` puts a sound configuration in force; it is called with nothing awaited in between."""

    def __init__(self, config: Config, apply: Callable[[Config], None], clock: Clock) -> None:
        self.config = config
        self._path = config.source
        self._apply = apply
        self._clock = clock
        self._seen = self._stamp()
        self._outcomes = dict.fromkeys(RELOAD_OUTCOMES, 0)
        self._sound, self._sound_at = True, clock.wall()
        self.policies = deque([self._policy(config, "the start")], maxlen=POLICIES)
        """That were in force, the present one last."""

    @property
    def overlay(self) -> Overlay:
        """What is in force beside the file."""
        return self.config.origin.overlay

    @property
    def lasting(self) -> str:
        """How long what the admin API changes stays."""
        if self.config.server.state is not None:
            return "over restarts, in server.state"
        return "until the gateway is started again"

    def _policy(self, config: Config, by: str) -> PolicyInForce:
        merged = config.origin.merged
        tables: dict[str, Any] = {name: merged[name] for name in ("policy", "tiers") if name in merged}
        return PolicyInForce(config.policy_digest, config.policy_params.name, tables, self._clock.wall(), by)

    def change(self, overlay: Overlay, why: str) -> Reloaded:
        """Another overlay over the file as it was last read. Never raises for what is in it."""
        return self._put(lambda: load_over(self.config, overlay), why)

    def drained(self, name: str, draining: bool) -> None:
        """Noted, for the next start."""
        config = self.config
        origin = replace(config.origin, overlay=self.overlay.with_draining(name, draining))
        config.__dict__["origin"] = origin
        self._keep()

    def _keep(self) -> None:
        path = self.config.server.state
        if path is not None:
            try:
                keep(path, self.overlay)
            except OSError as error:
                log.error("server.state: what was changed is in force, and lost at the next start: %s", error)

    def reload(self, why: str) -> Reloaded:
        """Read the file again. Never raises for what is in it."""
        done = self._reload(why)
        outcome = "refused" if done.problems else "applied" if done.changed else "unchanged"
        self._outcomes[outcome] += 1
        self._sound = not done.problems
        if self._sound:
            self._sound_at = self._clock.wall()
        return done

    def _reload(self, why: str) -> Reloaded:
        old = self.config
        if self._path is None:
            return Reloaded(old.policy_digest, (), ("the configuration did not come from a file",))
        self._seen = self._stamp()
        path, overlay = self._path, self.overlay
        done = self._put(lambda: load(path, overlay=overlay), why)
        if overlay.policy is not None and not done.problems:
            log.warning(
                "the policy is the admin API's, not the file's: tierline admin policy revert ends that"
            )
        return done

    def _put(self, read: Callable[[], Config], why: str) -> Reloaded:
        """In force, or refused whole."""
        old = self.config
        try:
            new = read()
            problems, changed = fixed(old, new), differences(old, new)
            if changed and not problems:
                self._apply(new)
            if not problems:
                kept = new.origin.overlay != old.origin.overlay
                self.config = new
                if kept:
                    self._keep()
                if new.policy_digest != old.policy_digest:
                    self.policies.append(self._policy(new, why))
        except ConfigError as error:
            problems = error.problems
        except OSError as error:  # a file that was there when it was checked
            problems = (f"{error}",)
        if problems:
            log.error("reload (%s): refused, the old configuration stays: %s", why, "; ".join(problems))
            return Reloaded(old.policy_digest, (), problems)
        log.warning(
            "reload (%s): %s; policy %s",
            why,
            ", ".join(changed) or "nothing changed",
            self.config.policy_digest,
        )
        return Reloaded(self.config.policy_digest, changed)

    async def watch(self) -> None:
        """Reload whenever the file, or the policy's own, is another one. Runs until cancelled."""
        while (seconds := self.config.server.watch_config) > 0:
            await self._clock.sleep(seconds)
            if self._stamp() != self._seen:
                self.reload("the file changed")

    def counters(self) -> Iterator[Family]:
        """For the metrics."""
        outcomes = [((outcome,), count) for outcome, count in self._outcomes.items()]
        yield "tierline_config_reloads", "Reloads of the configuration, by outcome.", ("outcome",), outcomes

    def gauges(self) -> Iterator[Family]:
        yield (
            "tierline_config_reload_success",
            "1 while the file is in force as it was last read; 0: that was refused.",
            (),
            [((), float(self._sound))],
        )
        yield (
            "tierline_config_reload_success_timestamp_seconds",
            "When the file was last read without a problem.",
            (),
            [((), self._sound_at)],
        )

    def _stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        own = self.config.policy.file
        paths = (self._path, None if own is None else own.path)
        return tuple(None if path is None else _stat(path) for path in paths)


def _stat(path: str | Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def differences(old: Config, new: Config) -> tuple[str, ...]:
    """Names of what is not the same, a section of RELOADABLE keys by key."""
    found = []
    for section in type(old).model_fields:
        before, after = getattr(old, section), getattr(new, section)
        if before == after:
            continue
        if section in RELOADABLE or not hasattr(before, "model_fields_set"):
            found.append(section)
            continue
        keys = type(before).model_fields
        found += [f"{section}.{key}" for key in keys if getattr(before, key) != getattr(after, key)]
    return tuple(found)


def fixed(old: Config, new: Config) -> tuple[str, ...]:
    """What the file changes that a running gateway cannot."""
    return tuple(
        f"{name}: changed, and that takes a restart"
        for name in differences(old, new)
        if name not in RELOADABLE
    )
