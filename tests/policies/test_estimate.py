"""The estimate from sizes: bounds that hold for real cutting rules, and an expected value between them."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import ContextEstimate, PromptSizes, TokenRatio, estimate_prompt

RATIO = TokenRatio()

CASES = [
    ("nothing is nothing", PromptSizes(0), ContextEstimate(0, 0, 0)),
    ("a bare prompt has no template", PromptSizes(3600), ContextEstimate(1000, 29, 3600)),
    ("words raise the low bound", PromptSizes(3600, words=600), ContextEstimate(1000, 600, 3600)),
    (
        "many words raise the expected value too",
        PromptSizes(3600, words=1200),
        ContextEstimate(1200, 1200, 3600),
    ),
    (
        "each message costs its template",
        PromptSizes(3600, messages=2),
        ContextEstimate(1010, 29, 3600 + 32 + 1024),
    ),
    ("tools count like text", PromptSizes(1800, tools_bytes=1800), ContextEstimate(1000, 29, 3600)),
    ("base64 is not text", PromptSizes(1_003_600, media_bytes=1_000_000), ContextEstimate(1000, 29, 3600)),
    (
        "an image costs what resizing leaves of it",
        PromptSizes(1_000_000, images=1, media_bytes=1_000_000),
        ContextEstimate(1024, 4, 16384),
    ),
    (
        "more media than text is no debt",
        PromptSizes(10, media_bytes=99, tools_bytes=360),
        ContextEstimate(100, 3, 360),
    ),
    (
        "a batch is bounded by its average prompt, and held as a whole",
        PromptSizes(36_000, words=6000, sequences=10),
        ContextEstimate(10_000, 600, 36_000),
    ),
]


@pytest.mark.parametrize(("sizes", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_sizes_give_this_estimate(sizes: PromptSizes, expected: ContextEstimate) -> None:
    assert estimate_prompt(sizes, RATIO) == expected


def test_a_miscounted_word_total_keeps_the_bounds_in_order() -> None:
    estimate = estimate_prompt(PromptSizes(10, words=50), RATIO)
    assert estimate == ContextEstimate(50, 50, 50)


def test_the_ratio_is_an_argument_so_that_it_can_be_calibrated() -> None:
    chinese = TokenRatio(bytes_per_token=2.0)
    assert estimate_prompt(PromptSizes(3600), chinese).tokens == 1800


def test_the_margin_says_how_wide_the_estimate_is() -> None:
    assert estimate_prompt(PromptSizes(3600, words=600), RATIO).margin == pytest.approx(1.5)
    assert estimate_prompt(PromptSizes(0), RATIO).margin == 0.0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"fewest_bytes_per_token": 0}, "bytes per token must be positive and ordered"),
        ({"bytes_per_token": 0.5}, "bytes per token must be positive and ordered"),
        ({"bytes_per_token": 200}, "bytes per token must be positive and ordered"),
        ({"bytes_per_token": float("nan")}, "bytes per token must be positive and ordered"),
        ({"tokens_per_image": 2}, "tokens per image must be ordered"),
        ({"tokens_per_message": 17}, "tokens per message must be ordered"),
        ({"most_template_tokens": -1}, "most_template_tokens must not be negative"),
    ],
)
def test_a_ratio_out_of_order_is_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenRatio(**wrong)  # type: ignore[arg-type]


def fewest_tokens(text: str) -> int:
    """The best vocabulary there could be: one token for every pre-token, up to 128 bytes of JSON long.

    The pattern has the shape of GPT-2's and its heirs': a space may lead a word, the rest stands alone.
    """
    pieces = re.findall(r" ?\S+|\s+(?!\S)|\s+", text)
    return sum(-(-len(json.dumps(piece)[1:-1]) // 128) for piece in pieces)


def most_tokens(text: str) -> int:
    """The worst vocabulary there could be: bytes."""
    return len(text.encode())


texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=300),
    st.text('ab \n\t-。\u00a0\u3000字😀\\"', max_size=600),
    st.builds(
        lambda c, n: c * n, st.sampled_from([" ", "-", "=", "字", "a b ", "\n", "\t"]), st.integers(0, 2000)
    ),
)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(texts, st.booleans())
def test_the_bounds_hold_for_the_best_and_the_worst_vocabulary(text: str, ascii_only: bool) -> None:
    """Whether the client escapes what is not ASCII or not."""
    body = json.dumps(text, ensure_ascii=ascii_only).encode()
    estimate = estimate_prompt(PromptSizes(len(body) - 2, words=len(text.split())), RATIO)
    assert estimate.low <= fewest_tokens(text)
    assert most_tokens(text) <= estimate.high


sizes = st.builds(
    PromptSizes,
    st.integers(0, 10**8),
    messages=st.integers(0, 2000),
    tools_bytes=st.integers(0, 10**6),
    images=st.integers(0, 100),
    media_bytes=st.integers(0, 10**8),
    words=st.none() | st.integers(0, 10**7),
    sequences=st.integers(0, 100),
)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(sizes)
def test_the_expected_value_lies_between_the_bounds(given_sizes: PromptSizes) -> None:
    estimate = estimate_prompt(given_sizes, RATIO)
    assert 0 <= estimate.low <= estimate.tokens <= estimate.high
