"""Another policy without a restart: by SIGHUP, by the admin listener, or because the file changed.

Rules
1. The file is read and checked whole, before anything is touched. With a problem in it the old configuration stays, and
   the problem is told to whoever asked and to the log.
2. What can change is swapped in one step, between two requests: `RELOADABLE`. A file that also changes something else is
   refused: half a change is none. What runs goes on under what it began with.
3. What was learned (speeds, caches, tokens) stays.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from proxy.clock import Clock
from proxy.config import Config, ConfigError, load

log = logging.getLogger("tierline.reload")

RELOADABLE = (
    "policy",
    "tiers",
    "models",
    "tenants",
    "timeouts",
    "server.keys",
    "server.session_headers",
    "telemetry.decisions",
    "telemetry.client_addresses",
)
"""Sections and keys that a reload takes."""


@dataclass(frozen=True, slots=True)
class Reloaded:
    """problems: why nothing changed; empty when the new configuration is in force. changed: what of it is new."""

    policy: str
    changed: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


class Reloader:
    """`apply` puts a sound configuration in force; it is called with nothing awaited in between."""

    def __init__(self, config: Config, apply: Callable[[Config], None], clock: Clock) -> None:
        self.config = config
        self._path = config.source
        self._apply = apply
        self._clock = clock
        self._seen = self._stamp()

    def reload(self, why: str) -> Reloaded:
        """Read the file again. Never raises for what is in it."""
        old = self.config
        if self._path is None:
            return Reloaded(old.policy_digest, (), ("the configuration did not come from a file",))
        self._seen = self._stamp()
        try:
            new = load(self._path)
            problems = fixed(old, new)
        except ConfigError as error:
            problems = error.problems
        if problems:
            log.error("reload (%s): refused, the old configuration stays: %s", why, "; ".join(problems))
            return Reloaded(old.policy_digest, (), problems)
        changed = differences(old, new)
        if changed:
            self.config = new
            self._apply(new)
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
