"""Profiles hold what the study measured, exactly, and nothing that looks measured and is not."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from policies import profile
from policies.measured import LimitKind, Part
from policies.profiles import MEASURED

STUDY = Path(__file__).parent / "study"
NAMES = [
    "fp8-mtp3-may5",
    "fp8-mtp3-v13",
    "fp8-mtp3-tp2-v17",
    "fp8-mtp3-tp1-v17",
    "fp8-mtp5-may5",
    "fp8-nospec-may5",
    "fp8-mtp3-upstream-v0.20.1",
    "bf16-dflash8-v13",
    "bf16-dflash8-tp2-v17",
    "bf16-dflash8-tp1-v17",
    "bf16-dflash8-upstream-v0.20.1",
    "nvfp4-mtp3-upstream-v0.20.1",
    "gguf-q8",
]
SERVING = NAMES[:-1]
# max_model_len, KV cache tokens (None: the study gives none), tensor parallelism, drafted tokens
TABLE = {
    "fp8-mtp3-may5": (134144, 1846472, 2, 3),
    "fp8-mtp3-v13": (134144, 1846472, 2, 3),
    "fp8-mtp3-tp2-v17": (262144, 1711960, 2, 3),
    "fp8-mtp3-tp1-v17": (262144, 621350, 1, 3),
    "fp8-mtp5-may5": (134144, None, 2, 5),
    "fp8-nospec-may5": (134144, None, 2, 0),
    "fp8-mtp3-upstream-v0.20.1": (134144, None, 2, 3),
    "bf16-dflash8-v13": (134144, None, 2, 8),
    "bf16-dflash8-tp2-v17": (262144, 854152, 2, 8),
    "bf16-dflash8-tp1-v17": (131072, 134606, 1, 8),
    "bf16-dflash8-upstream-v0.20.1": (134144, None, 2, 8),
    "nvfp4-mtp3-upstream-v0.20.1": (262144, None, 2, 3),
    "gguf-q8": (None, None, None, 0),
}


def rows(file: str, name: str) -> list[dict[str, str]]:
    with (STUDY / file).open() as lines:
        return [row for row in csv.DictReader(lines) if row["config"] == name]


def test_the_thirteen_configurations_have_profiles_in_the_order_of_the_table() -> None:
    assert list(profile.names()) == NAMES
    for file in ("decode.csv", "latency.csv", "prefill.csv"):
        with (STUDY / file).open() as lines:
            assert {row["config"] for row in csv.DictReader(lines)} <= set(NAMES)


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"fp9.*fp8-mtp3-may5.*gguf-q8"):
        profile.get("fp9")


@pytest.mark.parametrize("name", NAMES)
def test_a_data_module_holds_the_studys_rows_and_no_others(name: str) -> None:
    own = MEASURED[name]
    decode = [r for r in rows("decode.csv", name) if not r["note"].startswith("suspect")]
    assert own.decode == tuple(
        (int(r["concurrency"]), int(r["context_tokens"]), float(r["aggregate_tok_s"])) for r in decode
    )
    assert own.latency == tuple(
        (
            int(r["concurrency"]),
            int(r["context_tokens"]),
            *(float(r[k]) for k in ("ttft_avg_ms", "ttft_p99_ms", "itl_avg_ms", "spec_accept_rate")),
        )
        for r in rows("latency.csv", name)
    )
    assert own.latency_cold == any("cold" in r["source"] for r in rows("latency.csv", name))
    assert own.prefill == tuple(
        (int(r["prompt_tokens"]), float(r["ttft_s"])) for r in rows("prefill.csv", name)
    )
    assert {own.decode_source} - {""} == {r["source"] for r in decode}
    assert {own.latency_source} - {""} == {r["source"] for r in rows("latency.csv", name)}


@pytest.mark.parametrize("name", NAMES)
def test_the_facts_of_the_table_are_the_studys(name: str) -> None:
    own = MEASURED[name]
    assert (own.window_tokens, own.kv_tokens, own.tensor_parallel, own.speculation.draft_tokens) == TABLE[
        name
    ]


@pytest.mark.parametrize("name", SERVING)
def test_what_a_configuration_was_not_measured_for_is_marked_as_borrowed(name: str) -> None:
    own = MEASURED[name]
    borrowed = {b.part for b in own.borrowed}
    has_prefill = bool(own.prefill) or own.latency_cold
    assert has_prefill != (Part.PREFILL in borrowed)
    assert (own.kv_tokens is None) == (Part.KV in borrowed)
    assert (not own.latency or own.latency_cold or name == "fp8-nospec-may5") == (Part.WARM in borrowed)
    assert Part.DECODE not in borrowed
    for b in own.borrowed:
        assert b.source in MEASURED or b.source == "derived"
        if b.source in MEASURED and b.part in (Part.PREFILL, Part.KV, Part.WARM):
            lender = MEASURED[b.source]
            assert {Part.PREFILL: lender.prefill, Part.KV: lender.kv_tokens, Part.WARM: lender.latency}[
                b.part
            ]


def test_one_and_two_cards_never_share_decode_or_prefill_figures() -> None:
    for own in MEASURED.values():
        for b in own.borrowed:
            if b.part in (Part.DECODE, Part.PREFILL, Part.KV) and b.source in MEASURED:
                assert MEASURED[b.source].tensor_parallel == own.tensor_parallel


@pytest.mark.parametrize("name", SERVING)
def test_every_measured_cell_is_met_exactly(name: str) -> None:
    p = profile.get(name)
    for c, x, rate in p.measured.decode:
        assert p.aggregate_rate(c, x) == pytest.approx(rate, rel=1e-12)
        assert p.stream_rate(c, x) == pytest.approx(rate / c, rel=1e-12)
    if not p.measured.latency_cold:
        for c, x, mean, *_ in p.measured.latency:
            assert p.warm_ttft(c, x) == pytest.approx(mean / 1e3, rel=1e-12)
    for tokens, seconds in p.measured.prefill:
        assert p.cold_ttft(tokens) == pytest.approx(seconds, rel=1e-12)


def test_a_rate_of_no_stream_is_the_rate_of_one() -> None:
    p = profile.get("fp8-mtp3-tp2-v17")
    assert p.stream_rate(0, 0) == p.stream_rate(1, 0) == pytest.approx(129.0)


def test_the_reference_weights_and_only_they_are_reference() -> None:
    for name in NAMES:
        assert profile.get(name).quality.reference == name.startswith("bf16")


def test_quality_is_single_prompt_bits_and_the_gguf_figure_is_not_comparable() -> None:
    bits = {name: profile.get(name).quality.kl_bits for name in NAMES}
    assert bits["fp8-mtp3-tp2-v17"] == 5.5e-3
    assert bits["nvfp4-mtp3-upstream-v0.20.1"] == 0.299
    assert bits["bf16-dflash8-v13"] == 0.0
    gguf = profile.get("gguf-q8")
    assert gguf.quality_only
    assert (gguf.quality.comparable, gguf.quality.kl_nats, gguf.quality.kl_bits) == (False, 0.0018, None)
    for ask in (lambda: gguf.stream_rate(1, 0), lambda: gguf.warm_ttft(1, 0)):
        with pytest.raises(ValueError, match="quality figures only"):
            ask()


def test_known_limits_bound_the_usable_context_and_the_tool_choice() -> None:
    usable = {name: profile.get(name).usable_tokens for name in SERVING}
    assert usable["nvfp4-mtp3-upstream-v0.20.1"] == 131072
    assert usable["bf16-dflash8-upstream-v0.20.1"] == 32768
    assert usable["fp8-mtp3-tp2-v17"] == 262144
    assert {n for n in SERVING if not profile.get(n).tool_choice_required_works} == {
        "fp8-mtp3-upstream-v0.20.1",
        "nvfp4-mtp3-upstream-v0.20.1",
    }
    assert {n for n in NAMES if MEASURED[n].disqualified} == {"nvfp4-mtp3-upstream-v0.20.1"}
    assert {limit.kind for own in MEASURED.values() for limit in own.limits} == set(LimitKind)


def test_upstream_dflash_falls_right_after_32k() -> None:
    p = profile.get("bf16-dflash8-upstream-v0.20.1")
    assert p.aggregate_rate(1, 32768) == pytest.approx(85.5)
    assert p.aggregate_rate(1, 41000) < 12
    assert p.tokens_per_step(32768) > 2.7 > 1.3 > p.tokens_per_step(65536)


def test_a_step_holds_one_token_and_the_accepted_ones() -> None:
    assert profile.get("fp8-mtp3-v13").tokens_per_step() == pytest.approx(1 + 3 * 0.566)
    assert profile.get("bf16-dflash8-v13").tokens_per_step() == pytest.approx(1 + 8 * 0.231)
    assert profile.get("fp8-nospec-may5").tokens_per_step() == 1.0


def test_a_128k_prompt_costs_some_25_times_more_cold_than_warm() -> None:
    p = profile.get("fp8-mtp3-tp2-v17")
    assert 20 < p.cold_ttft(128703) / p.warm_ttft(1, 128703) < 30


def test_cold_prefill_beyond_the_table_costs_more_per_token_and_never_jumps() -> None:
    for name in SERVING:
        p = profile.get(name)
        last = p.prefill[-1][0]
        costs = [p.cold_ttft(last + d) - p.cold_ttft(last + d - 1000) for d in (1000, 20000, 80000)]
        assert costs == sorted(costs)
        assert p.cold_ttft(last + 1) - p.cold_ttft(last) < 0.001
