"""Keys are known by hash, in either client's header, and are never shown."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict

from proxy.access import KeyRing
from proxy.keystore import digest

RING = KeyRing([("alice", digest("sk-alice")), ("bob", digest("sk-bob").upper())])


def identify(*headers: tuple[str, str]) -> str | None:
    return RING.identify(CIMultiDict(headers))


CASES = [
    ((("Authorization", "Bearer sk-alice"),), "alice"),
    ((("authorization", "bearer  sk-bob "),), "bob"),
    ((("AUTHORIZATION", "BEARER\tsk-bob"),), "bob"),
    ((("x-api-key", "sk-bob"),), "bob"),
    ((("X-Api-Key", " sk-bob "),), "bob"),
    ((("Authorization", "Bearer placeholder"), ("x-api-key", "sk-bob")), "bob"),
    ((("Authorization", "Bearer sk-alice"), ("x-api-key", "placeholder")), "alice"),
    ((), None),
    ((("Authorization", "sk-alice"),), None),
    ((("Authorization", "Basic sk-alice"),), None),
    ((("Authorization", "Bearersk-alice"),), None),
    ((("Authorization", "Bearer"),), None),
    ((("Authorization", "Bearer "),), None),
    ((("Authorization", "Bearer sk-alice sk-bob"),), None),
    ((("Authorization", "Bearer SK-ALICE"),), None),
    ((("Authorization", "Bearer sk-alic"),), None),
    ((("x-api-key", ""),), None),
    ((("x-api-key", "Bearer sk-bob"),), None),
]


@pytest.mark.parametrize(("headers", "name"), CASES)
def test_a_key_is_found_in_either_header_and_nothing_else_is_a_key(headers, name):
    assert identify(*headers) == name


def test_the_digest_itself_is_no_key():
    assert identify(("x-api-key", digest("sk-alice"))) is None


def test_an_empty_ring_is_falsy_and_knows_nobody():
    ring = KeyRing([])
    assert not ring
    assert ring.identify({"x-api-key": ""}) is None
    assert ring.identify({}) is None
    assert RING


def test_a_ring_shows_names_and_never_keys_or_digests():
    assert repr(RING) == "KeyRing(alice, bob)"
    assert "sk-" not in str(vars(RING))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([("a", "abc")], "key 'a': expected a sha256 digest of 64 hex digits"),
        ([("a", digest("k")), ("b", digest("k"))], "keys 'a' and 'b' are the same key"),
    ],
)
def test_keys_that_cannot_be_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        KeyRing(keys)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.text(max_size=40), st.binary(max_size=40))
def test_no_header_value_raises(text, raw):
    value = raw.decode("utf-8", "surrogateescape")
    for header in (text, value, f"Bearer {text}", f"Bearer {value}"):
        assert identify(("Authorization", header), ("x-api-key", header)) is None
