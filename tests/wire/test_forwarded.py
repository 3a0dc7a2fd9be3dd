"""Who a request comes from, when proxies stand in front, and when somebody only says so."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.wire.forwarded import MOST_HOPS, Client, client_of, networks, trusts

PROXIES = networks(["10.0.0.0/8", "192.0.2.7", "fd00::/8"])


def seen(peer: str, *headers: str, secure: bool = False) -> Client:
    pairs = [line.split(": ", 1) for line in headers]
    return client_of(
        peer, secure, [(name.encode(), value.encode("latin-1")) for name, value in pairs], PROXIES
    )


CASES = {
    "nobody says anything": ("10.0.0.1", [], "10.0.0.1"),
    "a proxy": ("10.0.0.1", ["X-Forwarded-For: 203.0.113.9"], "203.0.113.9"),
    "a proxy by one address": ("192.0.2.7", ["x-forwarded-for: 203.0.113.9"], "203.0.113.9"),
    "beside that address": ("192.0.2.8", ["x-forwarded-for: 203.0.113.9"], "192.0.2.8"),
    "somebody else": ("203.0.113.1", ["x-forwarded-for: 10.0.0.9"], "203.0.113.1"),
    "what the client made up": ("10.0.0.1", ["x-forwarded-for: 1.1.1.1, 203.0.113.9"], "203.0.113.9"),
    "a chain": ("10.0.0.1", ["x-forwarded-for: 1.1.1.1, 203.0.113.9, 10.0.0.7, fd00::1"], "203.0.113.9"),
    "two lines": ("10.0.0.1", ["x-forwarded-for: 1.1.1.1", "x-forwarded-for: 203.0.113.9"], "203.0.113.9"),
    "proxies only": ("10.0.0.1", ["x-forwarded-for: 10.0.0.3, 10.0.0.2"], "10.0.0.3"),
    "with a port": ("10.0.0.1", ["x-forwarded-for: 203.0.113.9:4711"], "203.0.113.9"),
    "version 6 with a port": ("10.0.0.1", ["x-forwarded-for: [2001:db8::1]:4711"], "2001:db8::1"),
    "version 6": ("fd00::5", ["x-forwarded-for: 2001:db8::1"], "2001:db8::1"),
    "4 written as 6": ("::ffff:10.0.0.1", ["x-forwarded-for: ::ffff:203.0.113.9"], "203.0.113.9"),
    "no address": ("10.0.0.1", ["x-forwarded-for: 203.0.113.9, me"], "10.0.0.1"),
    "no address in the middle": ("10.0.0.1", ["x-forwarded-for: 203.0.113.9, x\n, 10.0.0.7"], "10.0.0.7"),
    "a zone": ("10.0.0.1", ["x-forwarded-for: fe80::1%eth0"], "10.0.0.1"),
    "nothing in it": ("10.0.0.1", ["x-forwarded-for: "], "10.0.0.1"),
    "a list without end": ("10.0.0.1", ["x-forwarded-for: 10.0.0.2" + ", 10.0.0.2" * MOST_HOPS], "10.0.0.1"),
    "the standard's": ("10.0.0.1", ["Forwarded: for=203.0.113.9;proto=https"], "203.0.113.9"),
    "the standard's, quoted": ("10.0.0.1", ['forwarded: for="[2001:db8::1]:47";by=_x'], "2001:db8::1"),
    "the standard's, a chain": (
        "10.0.0.1",
        ["forwarded: for=1.1.1.1, for=203.0.113.9, For=10.0.0.2"],
        "203.0.113.9",
    ),
    "the standard's, hidden": ("10.0.0.1", ["forwarded: for=1.1.1.1, for=_hidden"], "10.0.0.1"),
    "the standard's, nobody": ("10.0.0.1", ["forwarded: proto=https"], "10.0.0.1"),
    "the standard's, a comma in quotes": (
        "10.0.0.1",
        ['forwarded: for=203.0.113.9;by="a, for=1.1.1.1"'],
        "203.0.113.9",
    ),
    "the standard's, twice": ("10.0.0.1", ["forwarded: for=203.0.113.9;for=1.1.1.1"], "10.0.0.1"),
    "the standard's, without an end": ("10.0.0.1", ['forwarded: for="203.0.113.9'], "10.0.0.1"),
    "both, the same": (
        "10.0.0.1",
        ["x-forwarded-for: 203.0.113.9", "forwarded: for=203.0.113.9"],
        "203.0.113.9",
    ),
    "one of both from the client": (
        "10.0.0.1",
        ["x-forwarded-for: 203.0.113.9", "forwarded: for=1.1.1.1"],
        "10.0.0.1",
    ),
}


@pytest.mark.parametrize(("peer", "headers", "address"), CASES.values(), ids=CASES.keys())
def test_the_client_is_the_first_address_that_is_not_trusted(
    peer: str, headers: list[str], address: str
) -> None:
    assert seen(peer, *headers).address == address


@pytest.mark.parametrize(
    ("peer", "headers", "secure"),
    [
        ("10.0.0.1", ["x-forwarded-proto: https"], True),
        ("10.0.0.1", ["x-forwarded-proto: http, HTTPS"], True),
        ("10.0.0.1", ["x-forwarded-proto: https, http"], False),
        ("10.0.0.1", ["forwarded: for=1.1.1.1;proto=https"], True),
        ("10.0.0.1", ["forwarded: for=1.1.1.1;proto=https", "x-forwarded-proto: http"], False),
        ("10.0.0.1", ["x-forwarded-proto: gopher"], False),
        ("203.0.113.1", ["x-forwarded-proto: https"], False),
    ],
)
def test_the_scheme_is_the_nearest_trusted_proxys_word(peer: str, headers: list[str], secure: bool) -> None:
    assert seen(peer, *headers).secure is secure


def test_a_trusted_proxy_may_say_that_the_client_came_without_tls() -> None:
    assert seen("10.0.0.1", "x-forwarded-proto: http", secure=True).secure is False
    assert seen("203.0.113.1", "x-forwarded-proto: http", secure=True).secure is True


TEXTS = st.text(st.characters(max_codepoint=255, exclude_characters="\r\n"), max_size=80)
NAMES = st.sampled_from(("X-Forwarded-For", "Forwarded", "X-Forwarded-Proto"))


@given(st.lists(st.tuples(NAMES, TEXTS), max_size=4))
@settings(deadline=None)
def test_whoever_is_not_trusted_is_who_is_connected_whatever_is_said(said: list[tuple[str, str]]) -> None:
    assert seen("203.0.113.1", *(f"{name}: {text}" for name, text in said)) == Client("203.0.113.1", False)


@given(st.lists(st.tuples(NAMES, TEXTS), max_size=4))
@settings(deadline=None)
def test_a_trusted_proxys_words_are_an_address_or_nothing(said: list[tuple[str, str]]) -> None:
    client = seen("10.0.0.1", *(f"{name}: {text}" for name, text in said))
    assert networks([client.address])


def test_nobody_is_trusted_by_a_name_or_nothing() -> None:
    assert not trusts(PROXIES, "")
    assert not trusts(PROXIES, "localhost")
    assert not trusts((), "10.0.0.1")
