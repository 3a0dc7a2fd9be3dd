"""The PROXY protocol's header, versions 1 and 2: who a connection comes from, said by the proxy in front of it.

Rules
1. Bytes in, an answer out: whole, broken, or how many more bytes may be read. Never more than belong to the header, so that
   what follows (a request, a TLS handshake) is read by whom it is for.
2. Strict, because only a proxy of the operator's sends it: one space, numbers without a leading zero, addresses of the
   family that is named.
3. What a header says of itself only (LOCAL, UNKNOWN, a UNIX socket) names nobody: then the connection's own address stands.
"""

from __future__ import annotations

import re
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import NamedTuple

SIGNATURE = b"\r\n\r\n\x00\r\nQUIT\n"
MOST_V1 = 107
"""Bytes of a version 1 line, its end included."""
MOST_V2 = 2048
"""Bytes behind the fixed part of version 2: addresses, and what a proxy adds to them."""

_V1 = b"PROXY "
_LINE = re.compile(
    rb"PROXY (TCP4|TCP6) ([0-9A-Fa-f.:]+) ([0-9A-Fa-f.:]+) (0|[1-9]\d{0,4}) (0|[1-9]\d{0,4})\r\n"
)


class ProxyHeaderError(ValueError):
    """This is no PROXY header."""


class Source(NamedTuple):
    """A whole header. address: of the client; None: it names none."""

    address: str | None


class More(NamedTuple):
    """The header is not whole. least: bytes that it has at least still to come."""

    least: int


def read_proxy_header(data: bytes) -> Source | More:
    """What these bytes are the beginning of. Raises ProxyHeaderError."""
    if data.startswith(SIGNATURE):
        return _version2(data)
    if data.startswith(_V1):
        return _version1(data)
    if SIGNATURE.startswith(data) or _V1.startswith(data):
        # Both are unknown until then; the shortest header of all is longer.
        return More(min(len(_V1) if _V1.startswith(data) else len(SIGNATURE), len(SIGNATURE)) - len(data))
    raise ProxyHeaderError("neither version 1 nor version 2")


def _version1(data: bytes) -> Source | More:
    end = data.find(b"\n")
    if end < 0:
        if len(data) >= MOST_V1:
            raise ProxyHeaderError("the line is too long")
        return More(1 if data.endswith(b"\r") or len(data) + 2 > MOST_V1 else 2)
    line = data[: end + 1]
    if len(line) > MOST_V1:
        raise ProxyHeaderError("the line is too long")
    if line == b"PROXY UNKNOWN\r\n" or (line.startswith(b"PROXY UNKNOWN ") and line.endswith(b"\r\n")):
        return Source(None)
    found = _LINE.fullmatch(line)
    if found is None:
        raise ProxyHeaderError("not a line of version 1")
    kind: type[IPv4Address | IPv6Address] = IPv4Address if found[1] == b"TCP4" else IPv6Address
    try:
        source, _ = kind(found[2].decode()), kind(found[3].decode())
    except AddressValueError:
        raise ProxyHeaderError("not an address of that family") from None
    if int(found[4]) > 65535 or int(found[5]) > 65535:
        raise ProxyHeaderError("not a port")
    return Source(str(source))


def _version2(data: bytes) -> Source | More:
    if len(data) < 16:
        return More(16 - len(data))
    version, command, family, kind = data[12] >> 4, data[12] & 15, data[13] >> 4, data[13] & 15
    length = int.from_bytes(data[14:16], "big")
    if version != 2 or command > 1:
        raise ProxyHeaderError("not version 2, or a command that is not known")
    if family > 3 or kind > 2 or (command == 1 and kind == 2):
        raise ProxyHeaderError("not a family of addresses, or not a stream")
    if length > MOST_V2:
        raise ProxyHeaderError("too long")
    least = {1: 12, 2: 36, 3: 216}.get(family, 0) if command == 1 else 0
    if length < least:
        raise ProxyHeaderError("too short for its addresses")
    if len(data) < 16 + length:
        return More(16 + length - len(data))
    if command == 0:
        return Source(None)
    if family == 1:
        return Source(str(IPv4Address(data[16:20])))
    return Source(str(IPv6Address(data[16:32])) if family == 2 else None)
