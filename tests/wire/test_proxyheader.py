"""The PROXY protocol's header: whole, broken or begun, and never a byte too many."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.wire.proxyheader import (
    MOST_V1,
    MOST_V2,
    SIGNATURE,
    More,
    ProxyHeaderError,
    Source,
    read_proxy_header,
)

V4 = st.integers(0, 2**32 - 1).map(IPv4Address)
V6 = st.integers(0, 2**128 - 1).map(IPv6Address)
PORTS = st.integers(0, 65535)


def v2(command: int, family: int, body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return SIGNATURE + bytes((0x20 | command, family)) + size.to_bytes(2, "big") + body


@st.composite
def headers(draw: st.DrawFn) -> tuple[bytes, str | None]:
    """A header as a proxy writes it, and whom it names."""
    version, six = draw(st.sampled_from((1, 2))), draw(st.booleans())
    source, there = (draw(V6), draw(V6)) if six else (draw(V4), draw(V4))
    ports = draw(PORTS), draw(PORTS)
    local = draw(st.booleans())
    if version == 1:
        if local:
            return b"PROXY UNKNOWN" + draw(st.sampled_from((b"", b" ffff::1 ::1 1 2"))) + b"\r\n", None
        line = f"PROXY TCP{6 if six else 4} {source} {there} {ports[0]} {ports[1]}\r\n"
        return line.encode(), str(source)
    more = draw(st.binary(max_size=60))
    body = source.packed + there.packed + b"".join(port.to_bytes(2, "big") for port in ports) + more
    if local:
        return v2(0, draw(st.sampled_from((0x00, 0x11, 0x21))), more), None
    return v2(1, 0x21 if six else 0x11, body), str(source)


@given(headers())
@settings(deadline=None)
def test_a_header_names_its_client_and_asks_for_its_own_bytes_only(case: tuple[bytes, str | None]) -> None:
    data, address = case
    assert read_proxy_header(data) == Source(address)
    at, reads = 0, 0
    while True:
        found = read_proxy_header(data[:at])
        if isinstance(found, Source):
            break
        assert found.least >= 1
        at += found.least
        reads += 1
        assert at <= len(data)  # what follows is not for us
    assert (at, found.address) == (len(data), address)
    assert reads <= 55


@given(headers(), st.integers(0, 200))
@settings(deadline=None)
def test_a_part_of_a_header_is_never_a_header(case: tuple[bytes, str | None], size: int) -> None:
    data, _ = case
    assert isinstance(read_proxy_header(data[: min(size, len(data) - 1)]), More)


@given(st.binary(max_size=300) | st.binary(max_size=150).map(lambda tail: b"PROXY " + tail))
@settings(deadline=None)
def test_any_bytes_are_a_header_broken_or_begun(data: bytes) -> None:
    try:
        found = read_proxy_header(data)
    except ProxyHeaderError:
        return
    assert isinstance(found, Source) or (isinstance(found, More) and found.least >= 1)


BROKEN = {
    "a request": b"GET / HTTP/1.1\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01",
    "small letters": b"proxy TCP4 1.2.3.4 5.6.7.8 1 2\r\n",
    "two spaces": b"PROXY  TCP4 1.2.3.4 5.6.7.8 1 2\r\n",
    "an end of line feed alone": b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\n",
    "a return inside": b"PROXY TCP4 1.2.3.4\r5.6.7.8 1 2\r\n",
    "a port too large": b"PROXY TCP4 1.2.3.4 5.6.7.8 65536 2\r\n",
    "a port with a zero before": b"PROXY TCP4 1.2.3.4 5.6.7.8 01 2\r\n",
    "a sign before a port": b"PROXY TCP4 1.2.3.4 5.6.7.8 +1 2\r\n",
    "an address with a zero before": b"PROXY TCP4 01.2.3.4 5.6.7.8 1 2\r\n",
    "an address too large": b"PROXY TCP4 256.2.3.4 5.6.7.8 1 2\r\n",
    "the other family": b"PROXY TCP4 ::1 ::2 1 2\r\n",
    "an address of the other family": b"PROXY TCP6 1.2.3.4 5.6.7.8 1 2\r\n",
    "a name": b"PROXY TCP4 localhost 5.6.7.8 1 2\r\n",
    "one field too many": b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2 3\r\n",
    "a kind that is not known": b"PROXY UDP4 1.2.3.4 5.6.7.8 1 2\r\n",
    "a line without an end": b"PROXY TCP6 " + b"f" * MOST_V1,
    "version 1 in 2": SIGNATURE + b"\x11\x11\x00\x0c" + bytes(12),
    "a command that is not known": SIGNATURE + b"\x22\x11\x00\x0c" + bytes(12),
    "a family that is not known": v2(1, 0x41, bytes(12)),
    "datagrams": v2(1, 0x12, bytes(12)),
    "no room for the addresses": v2(1, 0x11, bytes(11)),
    "no room for the longer addresses": v2(1, 0x21, bytes(35)),
    "a length beyond all": v2(1, 0x11, b"", MOST_V2 + 1),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
def test_what_no_proxy_writes_is_no_header(data: bytes) -> None:
    with pytest.raises(ProxyHeaderError):
        read_proxy_header(data)


@pytest.mark.parametrize("family", [0x00, 0x31])
def test_a_header_without_an_address_that_we_know_names_nobody(family: int) -> None:
    assert read_proxy_header(v2(1, family, bytes(216))) == Source(None)
