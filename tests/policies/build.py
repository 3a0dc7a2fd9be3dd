"""Short ways to say what a test is about: everything not named is unremarkable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import strategies as st

from policies import BackendView, ContextEstimate, Decision, RequestFacts, Router, RouterParams, Tier

EXACT = Tier("exact", reference=True)
BALANCED = Tier("balanced", max_kl_bits=0.05)
FAST = Tier("fast")

PARAMS = RouterParams()
ROUTER = Router(PARAMS)


def ask(
    tier: Tier = FAST,
    prompt: int = 1000,
    *,
    low: int | None = None,
    output: int = 500,
    session: str | None = None,
) -> RequestFacts:
    """A request whose prompt is expected to hold `prompt` tokens, surely holds `low` (a quarter of it)."""
    low = prompt // 4 if low is None else low
    return RequestFacts(
        "m", tier, ContextEstimate(prompt, low, max(prompt * 4, low)), output, session=session
    )


def backend(name: str = "a", **differs: Any) -> BackendView:
    """A healthy, idle backend of unknown quality, with room, never polled."""
    return BackendView(name, **({"window_tokens": 32768} | differs))


def pool_of_three(**differs: Any) -> list[BackendView]:
    return [backend(name, **differs) for name in "abc"]


def choose(facts: RequestFacts, views: Sequence[BackendView], seed: int = 1, **attempt: object) -> Decision:
    return ROUTER.choose(facts, views, Random(seed), **attempt)  # type: ignore[arg-type]


# Drawn from a catalogue: hypothesis would take 20 ms to draw a pool field by field, and shrinks this better.


def _any_view(rng: Random) -> BackendView:
    """Every field at its edges and between, unknown where it may be."""
    return BackendView(
        "?",
        healthy=rng.random() < 0.85,
        draining=rng.random() < 0.15,
        reference=rng.random() < 0.5,
        kl_bits=rng.choice([None, 0.0, 0.05, 0.0501, 0.2]),
        window_tokens=rng.choice([None, 1, 100, 4096, 32_768, 131_072]),
        max_in_flight=rng.choice([1, 8, 32, 200]),
        kv_tokens=rng.choice([1, 8192, 131_072]),
        in_flight=rng.choice([0, 1, 5, 8, 31, 32, 40]),
        in_flight_tokens=rng.choice([0, 500, 8192, 300_000]),
        running=rng.choice([None, 0, 5, 40]),
        waiting=rng.choice([None, 0, 1, 9]),
        kv_usage=rng.choice([None, 0.0, 0.5, 0.95, 1.0]),
        polled_age=rng.choice([None, 0.0, 1.0, 4.9, 5.0, 60.0]),
        suspect=rng.random() < 0.1,
        collapsed=rng.random() < 0.1,
    )


_rng = Random(1)
views = st.sampled_from([_any_view(_rng) for _ in range(1000)])
pools = st.lists(views, max_size=5).map(
    lambda drawn: [replace(view, name=name) for name, view in zip("abcde", drawn, strict=False)]
)
requests = st.builds(
    ask,
    st.sampled_from([EXACT, BALANCED, FAST]),
    st.sampled_from([0, 100, 4000, 20_000, 60_000]),
    low=st.sampled_from([0, 100, 4096, 4097, 40_000]),
    output=st.sampled_from([0, 500, 40_000]),
    session=st.sampled_from([None, "s1", "s2", "\ud800"]),
)
