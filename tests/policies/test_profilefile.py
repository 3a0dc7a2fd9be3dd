"""A profile's file gives back what was written, and every mistake in one is named."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest

from policies import profile as profiles
from policies.measured import Measured
from policies.profilefile import BadProfile, read
from proxy.bench.write import text

NAMES = [
    name
    for name in profiles.names()
    if not (profiles.get(name).quality_only or profiles.get(name).measured.latency_cold)
]
GOOD = """
name = "mine"
window_tokens = 32768
kv_tokens = 100000
decode = [[1, 0, 100.0], [8, 0, 500.0]]
latency = [[1, 0, 60.0, 70.0]]
prefill = [[8192, 0.9]]
"""


def whole(name: str) -> Measured:
    """A shipped profile that borrows nothing."""
    made = profiles.get(name)
    own = replace(made.measured, borrowed=(), decode_assumed=(), kv_tokens=made.kv_tokens)
    latency = own.latency or ((1, 0, 60.0, 70.0, 8.0, None),)
    return replace(own, latency=latency, prefill=tuple(row for row in made.prefill if row[0]))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read_back(name: str) -> None:
    assert read(text(whole(name), "http://127.0.0.1:1")).measured == whole(name)


def test_the_fewest_keys_make_a_profile_that_predicts() -> None:
    made = read(GOOD)
    assert (made.name, made.window_tokens, made.kv_tokens, made.max_num_seqs) == ("mine", 32768, 100000, 128)
    assert made.aggregate_rate(8, 0) == pytest.approx(500.0)
    assert made.warm_ttft(1, 0) == pytest.approx(0.06)
    assert made.cold_ttft(8192) == pytest.approx(0.9)
    assert made.tokens_per_step(0) == 1.0
    assert not made.quality.comparable


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("", "name: missing"),
        ("decode = [[1, 0]]", "decode[0]: expected 3 numbers"),
        ("decode = [[1.5, 0, 3.0]]", "decode[0]: streams (at least 1) and tokens are whole numbers"),
        ("decode = [[0, 0, 3.0]]", "decode[0]: streams (at least 1)"),
        ("decode = [[1, 0, 0.0]]", "decode[0]: rates and times are above 0"),
        ("decode = [[1, 0, 3.0], [1, 0, 4.0]]", "decode[1]: measured twice"),
        ("decode = []", "decode: has no row"),
        ("decode = 3", "decode: expected an array"),
        ('latency = ["x"]', "latency[0]: expected 4 to 6 numbers"),
        ("latency = [[1, 0, 60.0, 70.0, 8.0, 0.5, 1.0]]", "latency[0]: expected 4 to 6 numbers"),
        ("prefill = [[16384, 2.0], [8192, 1.0]]", "prefill: rows go from the shortest"),
        ("prefill = [[8192, -1.0]]", "prefill[0]: expected 2 numbers, none below 0"),
        ("window_tokens = true", "window_tokens: expected a whole number"),
        ("windows = 3", "windows: a profile has no such key"),
        ("disqualified = 1", "disqualified: expected true or false"),
        ("quality = 3", "quality: expected a table"),
        ("quality.kl_bits = -1", "quality.kl_bits: expected"),
        ("quality.worth = 3", "quality.worth: expected"),
        ("speculation = 3", "speculation: expected a table"),
        ("speculation.kind = 'mtp'", "speculation.draft_tokens: expected"),
        ("speculation = { kind = 'luck', draft_tokens = 3 }", "speculation.kind: expected one of"),
        ("speculation = { draft_tokens = 3, acceptance = [[0, 1.5]] }", "speculation.acceptance: expected"),
        ("speculation = { draft_tokens = 3, rate = 1 }", "speculation.rate: known are"),
        ("limits = [{ kind = 'bad' }]", "limits[0].kind: expected one of"),
        (
            "limits = [{ kind = 'broken_beyond', context_tokens = 0 }]",
            "limits[0].context_tokens: expected a whole",
        ),
        ("decode = [", "Invalid value"),
    ],
)
def test_a_mistake_is_named(more: str, says: str) -> None:
    key = more.split(" ")[0].split(".")[0]
    kept = [line for line in GOOD.splitlines() if not key or not line.startswith(f"{key} ")]
    kept = kept if more else [line for line in kept if not line.startswith("name")]
    with pytest.raises(BadProfile) as found:
        read("\n".join([*kept, more]))
    assert any(problem.startswith(says) for problem in found.value.problems), found.value.problems


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(BadProfile) as found:
        read("window_tokens = 0\nspeed = 3\n")
    assert len(found.value.problems) == 7, found.value.problems


def test_the_file_has_a_row_of_a_table_on_each_line() -> None:
    written = text(whole("fp8-mtp3-tp2-v17"), "http://127.0.0.1:1", ["of two\nlines"])
    assert "# of two lines" in written.splitlines()
    assert "    [1, 0, 129.0]," in written.splitlines()
    assert tomllib.loads(written)["decode"][0] == [1, 0, 129.0]
