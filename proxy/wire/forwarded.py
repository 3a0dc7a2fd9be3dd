"""Who a request comes from, where proxies stand in front: X-Forwarded-For, Forwarded, X-Forwarded-Proto.

Rules
1. Believed word by word from the nearest end: what a trusted address says of who talked to it. The first address that is
   not trusted is the client; what stands before it that client may have made up.
2. Where both headers are there and do not say the same, neither is believed: most proxies write one of them and pass the
   other on as the client sent it.
3. What cannot be read ends the walk: then the last address that could be is the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple

Networks = tuple[IPv4Network | IPv6Network, ...]
Headers = Sequence[tuple[bytes, bytes]]

MOST_HOPS = 32
"""Proxies in a row; a longer list is none."""

_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_PAIR = re.compile(rf'[ \t]*({_TOKEN})=({_TOKEN}|"(?:[^"\\]|\\.)*")[ \t]*([;,]|\Z)')
_PORT = re.compile(r"(.*):\d{1,5}", re.DOTALL)


class Client(NamedTuple):
    """address: as text. secure: it came by TLS, to us or to a trusted proxy."""

    address: str
    secure: bool


def networks(texts: Iterable[str]) -> Networks:
    """Raises ValueError for what is neither a network nor an address."""
    return tuple(ip_network(text) for text in texts)


def trusts(trusted: Networks, address: str) -> bool:
    """Whether an address is in one of the networks."""
    found = _address(address)
    return found is not None and any(found in network for network in trusted)


def client_of(peer: str, secure: bool, headers: Headers, trusted: Networks) -> Client:
    """peer: who is connected. secure: by TLS."""
    if not trusts(trusted, peer):
        return Client(peer, secure)
    hops: list[str] = []
    schemes: list[str] = []
    named: list[str] = []
    named_schemes: list[str] = []
    spoke = wrote = False
    for name, value in headers:
        lower = name.lower()
        text = value.decode("latin-1")
        if lower == b"x-forwarded-for":
            wrote = True
            hops += [hop.strip() for hop in text.split(",")]
        elif lower == b"x-forwarded-proto":
            schemes += [scheme.strip().lower() for scheme in text.split(",")]
        elif lower == b"forwarded":
            spoke = True
            for element in _elements(text):
                named.append(element.get("for", "unknown"))
                if "proto" in element:
                    named_schemes.append(element["proto"].lower())
    address = _walk(peer, hops, trusted)
    if spoke:
        other = _walk(peer, named, trusted)
        address = peer if wrote and other != address else other
    said = {list_[-1] for list_ in (schemes, named_schemes) if list_}
    scheme = said.pop() if len(said) == 1 else None
    return Client(address, scheme == "https" if scheme in ("http", "https") else secure)


def _walk(peer: str, hops: Sequence[str], trusted: Networks) -> str:
    """From the nearest on, as long as who speaks is trusted."""
    at = peer
    if len(hops) > MOST_HOPS:
        return at
    for hop in reversed(hops):
        found = _address(hop)
        if found is None:
            break
        at = str(found)
        if not any(found in network for network in trusted):
            break
    return at


def _address(text: str) -> IPv4Address | IPv6Address | None:
    """Of an address, with or without a port; one of IPv4 that is written as one of IPv6 is one of IPv4."""
    if len(text) > 64 or "%" in text:
        return None
    if text.startswith("["):
        inside, _, rest = text[1:].partition("]")
        if rest and not re.fullmatch(r":\d{1,5}", rest):
            return None
        text = inside
    elif text.count(":") == 1 and (split := _PORT.fullmatch(text)) is not None:
        text = split[1]
    try:
        found = ip_address(text)
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return mapped or found


def _elements(text: str) -> list[dict[str, str]]:
    """A Forwarded header (RFC 7239), element by element; nothing of one that is not well written."""
    elements: list[dict[str, str]] = [{}]
    at = 0
    while at < len(text):
        pair = _PAIR.match(text, at)
        if pair is None or pair[1].lower() in elements[-1]:
            return []
        value = re.sub(r"\\(.)", r"\1", pair[2][1:-1]) if pair[2].startswith('"') else pair[2]
        elements[-1][pair[1].lower()] = value
        at = pair.end()
        if pair[3] == ",":
            elements.append({})
        if pair[3] and at == len(text):
            return []
    return elements if elements[-1] else []
