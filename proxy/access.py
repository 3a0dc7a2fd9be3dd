"""Who is calling: API keys, known by their hash.

Rules: only sha256 digests are held, so nothing here can print or leak a key; a presented key is hashed and looked
up, which takes the same time for every key. Names, not keys, go into records and logs. Whether a request needs a
key at all is the caller's question: an empty ring knows nobody.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping

_BEARER = re.compile(r"[ \t]*bearer[ \t]+(\S+)[ \t]*", re.IGNORECASE | re.ASCII)
_DIGEST = re.compile("[0-9a-f]{64}")


def digest(key: str) -> str:
    """sha256 in hex, as the configuration holds it. Bytes that are not UTF-8 hash as they came."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


class KeyRing:
    """Keys by digest. `keys`: (name, sha256 in hex); falsy when there are none."""

    def __init__(self, keys: Iterable[tuple[str, str]]) -> None:
        self._names: dict[str, str] = {}
        for name, sha256 in keys:
            sha256 = sha256.lower()
            if not _DIGEST.fullmatch(sha256):
                raise ValueError(f"key {name!r}: expected a sha256 digest of 64 hex digits")
            if sha256 in self._names:
                raise ValueError(f"keys {self._names[sha256]!r} and {name!r} are the same key")
            self._names[sha256] = name

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
