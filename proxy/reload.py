"""Another configuration without a restart: by SIGHUP, by the admin listener, or because the file changed.

Rules
1. The file is read and checked whole, before anything is touched. With a problem in it the old configuration stays, and
   the problem is told to whoever asked and to the log.
2. What can change is swapped in one step, between two requests: `RELOADABLE`. A file that also changes something else is
   refused, and each such key is named: half a change is none. What runs goes on under what it began with.
3. What was learned (speeds, caches, tokens) stays, of a backend while its URL and its model's name do.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from proxy.clock import Clock
from proxy.config import Config, ConfigError, load
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

Family = tuple[str, str, tuple[str, ...], Sequence[tuple[tuple[str, ...], float]]]
"""Of the metrics: name, help, labels, values."""


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
        self._outcomes = dict.fromkeys(RELOAD_OUTCOMES, 0)
        self._sound, self._sound_at = True, clock.wall()

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
        try:
            new = load(self._path)
            problems, changed = fixed(old, new), differences(old, new)
            if changed and not problems:
                self._apply(new)
                self.config = new
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
