"""What a request asks for and is charged, and how that is told: the parts that need no sockets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.limits import BILLION, LimitKind, Refusal
from proxy.config import Price
from proxy.limiter import cost, duration, rate, refused


@pytest.mark.parametrize(
    ("micros", "text"),
    [
        (0, b"0s"),
        (1, b"1ms"),
        (12_000, b"12ms"),
        (999_001, b"1s"),
        (1_000_000, b"1s"),
        (8_640_000, b"8.64s"),
        (8_001_000, b"8.001s"),
        (60_000_000, b"1m0s"),
        (360_000_000, b"6m0s"),
        (61_500_000, b"1m1.5s"),
        (3_600_000_000, b"1h0m0s"),
        (90_061_000_000, b"25h1m1s"),
    ],
)
def test_a_duration_is_written_as_openai_writes_one(micros: int, text: bytes) -> None:
    assert duration(micros) == text


@pytest.mark.parametrize(
    ("price", "tokens", "expected"),
    [
        (Price(), (10**6, 0, 10**6), 0),
        (Price(prompt=3.0), (10**6, 0, 10**6), 3 * BILLION),
        (Price(prompt=3.0, completion=15.0), (10**6, 0, 10**6), 18 * BILLION),
        (Price(prompt=3.0, cached=0.3), (10**6, 10**6, 0), 3 * BILLION // 10),
        (Price(prompt=3.0, cached=0.0), (1000, 400, 0), 600 * 3000),
        (Price(prompt=3.0), (1000, 400, 0), 1000 * 3000),
        (Price(prompt=0.0004), (1, 0, 0), 0),  # below a billionth
        (Price(prompt=1.0), (5, 10, 0), 5000),  # a backend that counts the cached ones apart
        (Price(prompt=1.0, cached=0.0), (5, 10, 0), 0),
    ],
)
def test_money_is_tokens_by_the_price_of_a_million(
    price: Price, tokens: tuple[int, int, int], expected: int
) -> None:
    each = rate(price)
    assert (0 if each is None else cost(each, *tokens)) == expected


@given(
    st.sampled_from(LimitKind),
    st.integers(1, 10**12),
    st.integers(0, 10**12),
    st.integers(0, 10**12),
    st.none() | st.integers(1, 10**7),
    st.booleans(),
)
def test_every_refusal_names_its_limit_and_says_when_or_that_never(
    kind: LimitKind, limit: int, used: int, asked: int, seconds: int | None, running: bool
) -> None:
    error = refused("key:some:name", Refusal(kind, 0, limit, used, asked, seconds, running), [])
    headers = dict(error.headers)
    assert error.status == 429
    assert headers["x-tierline-limit"] == f"key.{kind.value}"
    assert "key 'some:name'" in error.message
    assert headers.get("retry-after") == (None if seconds is None else str(seconds))
    assert (headers.get("x-should-retry") == "false") == (
        seconds is None or error.code == "insufficient_quota"
    )
