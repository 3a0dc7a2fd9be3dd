"""Who is calling: API keys, known by their hash, and what each may do.

Rules: only hashes are held, so nothing here can print or leak a key; a presented key is hashed and looked up, which
takes the same time for every key. Names, not keys, go into records and logs. An empty ring knows nobody; whether a
request needs a key at all is the caller's question.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256

from multidict import istr

from proxy.keystore import digest, keyed

_BEARER = re.compile(r"[ \t]*bearer[ \t]+(\S+)[ \t]*", re.IGNORECASE | re.ASCII)
_AUTHORIZATION = istr("Authorization")
_DIGEST = re.compile("[0-9a-f]{64}")


class KeyRing:
    """Keys by digest. `keys`: (name, sha256 in hex); falsy when there are none."""

    def __init__(self, keys: Iterable[tuple[str, str]]) -> None:
        self._names: dict[str, str] = {}
        for name, given in keys:
            found = given.lower()
            if not _DIGEST.fullmatch(found):
                raise ValueError(f"key {name!r}: expected a sha256 digest of 64 hex digits")
            if found in self._names:
                raise ValueError(f"keys {self._names[found]!r} and {name!r} are the same key")
            self._names[found] = name

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"KeyRing({', '.join(sorted(self._names.values()))})"

    def identify(self, headers: Mapping[str, str]) -> str | None:
        """The name of the key that a request carries, or None.

        OpenAI clients send `Authorization: Bearer`, Anthropic's `x-api-key`; some send both, one of them a
        placeholder, so either may be the valid one. `headers` is case-insensitive, as aiohttp's is.
        """
        for key in _presented(headers):
            name = self._names.get(digest(key))
            if name is not None:
                return name
        return None


def _presented(headers: Mapping[str, str]) -> Iterator[str]:
    authorization = headers.get("Authorization")
    if authorization is not None and (match := _BEARER.fullmatch(authorization)):
        yield match[1]
    key = headers.get("x-api-key")
    if key is not None and key.strip():
        yield key.strip()


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose key a request came with, and what that may do. ident: the key, as records and limits call it. models, tiers:
    None is all. priority: the highest that its requests may ask for. reserve_tokens: what of an answer is reserved at most;
    None: the gateway's."""

    ident: str | None = None
    tenant: str | None = None
    models: frozenset[str] | None = None
    tiers: frozenset[str] | None = None
    priority: int = 0
    tool_format: str | None = None
    reserve_tokens: int | None = None

    @property
    def whose(self) -> str | None:
        """Whose a stored response of its is: the tenant's, which every key has; None: everybody's."""
        return self.tenant or self.ident

    def sees(self, model: str) -> bool:
        return self.models is None or model in self.models


ANYBODY = Caller()
"""Where no key is asked for."""


class Callers:
    """Who has which key. Made anew at every change, and put in force in one step.

    keys: (keyed hash, who, until when this hash opens). secret: of the hash. required: a key is asked for, also when
    nobody has one. used: gets when each of them was used last.
    """

    def __init__(
        self,
        keys: Iterable[tuple[bytes, Caller, float | None]] = (),
        secret: bytes = b"",
        *,
        required: bool = False,
        used: dict[str, float] | None = None,
    ) -> None:
        self._used = {} if used is None else used
        self._keyed = keyed(secret)
        self._by_hash = {hashed: (caller, until) for hashed, caller, until in keys}
        self.required = required or bool(self._by_hash)

    def __repr__(self) -> str:
        return f"Callers({', '.join(sorted({str(caller.ident) for caller, _ in self._by_hash.values()}))})"

    def find(self, headers: Mapping[str, str], wall: float) -> Caller | None:
        """Whose key a request carries, in either header; None: nobody's, or it has expired."""
        given = headers.get(_AUTHORIZATION)
        if given is not None and given.startswith(
            "Bearer "
        ):  # as nearly everybody writes it, without a look at the rest
            caller = self._find(given[7:], wall)
            if caller is not None:
                return caller
        for key in _presented(headers):
            caller = self._find(key, wall)
            if caller is not None:
                return caller
        return None

    def _find(self, key: str, wall: float) -> Caller | None:
        hashed = self._keyed.copy()  # as `hash_of`
        hashed.update(sha256(key.encode("utf-8", "surrogateescape")).hexdigest().encode())
        found = self._by_hash.get(hashed.digest())
        if found is None:
            return None
        caller, until = found
        if until is not None and wall >= until:
            return None
        self._used[caller.ident or ""] = wall
        return caller
