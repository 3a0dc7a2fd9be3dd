"""What the admin API acts on, and what a call of it is.

Rules: the API knows these few methods and nothing of the gateway behind them. A call that cannot be done raises `ApiError`;
whoever asked is in every line of the log that tells of a change (`Call.log`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxy.clock import Clock
from proxy.config import Config, Overlay
from proxy.keystore import Store
from proxy.reload import PolicyInForce, Reloaded

log = logging.getLogger("tierline.admin")

Shown = Mapping[str, object]


class PoolAdmin(Protocol):
    """What the pool does for an operator."""

    def snapshot(self) -> Sequence[Shown]:
        """One mapping a backend, the view that routing has of it."""
        ...

    def set_draining(self, name: str, draining: bool) -> None:
        """Raises KeyError for a name that is not configured."""
        ...


class Exposition(Protocol):
    def render(self, accept: str = "") -> tuple[bytes, str] | Awaitable[tuple[bytes, str]]:
        """At once, or when it has been gathered from other processes."""
        ...


class Configured(Protocol):
    """What is in force, and how to change it: `proxy.reload.Reloader`."""

    config: Config

    @property
    def overlay(self) -> Overlay: ...

    @property
    def lasting(self) -> str: ...

    @property
    def policies(self) -> Sequence[PolicyInForce]: ...

    def reload(self, why: str) -> Reloaded: ...

    def change(self, overlay: Overlay, why: str) -> Reloaded: ...

    def drained(self, name: str, draining: bool) -> None: ...


class Stories(Protocol):
    def find(self, request_id: str) -> dict[str, object] | None: ...


async def _nothing() -> None: ...


def _no_store() -> Store:
    raise ApiError(409, "server.store: not set, so there are no keys to change here", "no_key_store")


@dataclass(slots=True)
class Gear:
    """store: opens the keys' store, in a thread of its own. keys_changed: has them read again. standing: of an account, None
    for one that nothing limits; accounts: that are limited."""

    pool: PoolAdmin
    metrics: Exposition
    configured: Configured
    stories: Stories
    clock: Clock
    store: Callable[[], Store] = _no_store
    keys_changed: Callable[[], Awaitable[None]] = _nothing
    accounts: Callable[[], Sequence[str]] = tuple
    standing: Callable[[str], Shown | None] = lambda name: None
    busy: set[str] = field(default_factory=set)
    """What only one may do at a time, and somebody does."""

    @property
    def config(self) -> Config:
        return self.configured.config

    def table(self, name: str) -> Mapping[str, Any] | None:
        """Of [[backends]], as it is written; None: there is none of this name."""
        tables = self.config.origin.merged.get("backends", ())
        return next((table for table in tables if table["name"] == name), None)


@dataclass(slots=True)
class Call:
    """who: the name of the admin key. remote: the address. body: as it was read from JSON, checked against the route's
    model."""

    who: str
    remote: str
    params: Mapping[str, str]
    body: dict[str, Any]
    accept: str = ""

    @property
    def by(self) -> str:
        return f"by {self.who} from {self.remote}"

    def log(self, what: str, *values: object) -> None:
        """A change that was made."""
        log.warning(f"{what}, by %s from %s", *values, self.who, self.remote)


class ApiError(Exception):
    """status, message, code and param of an answer in OpenAI's shape."""

    def __init__(self, status: int, message: str, code: str | None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param


@dataclass(frozen=True, slots=True)
class Raw:
    """An answer that is no JSON of ours."""

    body: bytes
    content_type: str


def put(gear: Gear, call: Call, overlay: Overlay, what: str) -> Reloaded:
    """In force, or ApiError with what is wrong."""
    done = gear.configured.change(overlay, f"{what}, {call.by}")
    if done.problems:
        source = gear.config.origin.source
        lines = [line.removeprefix(f"{source}: ") for line in done.problems]
        raise ApiError(409, "; ".join(lines), "config_refused", lines[0].partition(": ")[0])
    call.log("%s: %s", what, ", ".join(done.changed) or "nothing changed")
    return done
