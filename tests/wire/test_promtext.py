"""The engines' /metrics: recorded ones, old names, several engines, hostile text."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.wire.promtext import EngineMetrics, read_metrics
from tests.captures import LLAMA_SERVER, VLLM, load, notes


def test_vllm_under_load():
    found = read_metrics(notes(VLLM, "metrics_under_load").encode())
    assert (found.running, found.waiting) == (4, 2)
    assert found.kv_usage == pytest.approx(0.0009766221)
    assert (found.block_size, found.num_gpu_blocks, found.kv_tokens) == (128, 16384, 2097152)


def test_vllm_after_traffic():
    found = read_metrics(load(VLLM, "get_metrics").body)
    assert (found.running, found.waiting, found.kv_usage) == (0, 0, 0.0)
    assert found.kv_tokens == 2097152
    for counted in (found.prefix_queries, found.prefix_hits, found.prompt_tokens, found.generation_tokens):
        assert counted is not None
    assert found.preemptions == 0
    assert found.spec_drafts is None  # not speculating: no such lines


def test_llama_server():
    found = read_metrics(load(LLAMA_SERVER, "get_metrics").body)
    assert (found.running, found.waiting) == (0, 0)
    assert (found.prompt_tokens, found.generation_tokens, found.prefix_hits) == (0, 0, 0)
    assert (found.spec_drafts, found.spec_accepted_tokens) == (0, 0)
    assert found.kv_usage is None
    assert found.kv_tokens is None


CASES = [
    ("old vLLM", b"vllm:gpu_cache_usage_perc 0.5\nvllm:gpu_prefix_cache_queries_total 9\n"
     b"vllm:gpu_prefix_cache_hits_total 3\n", EngineMetrics(kv_usage=0.5, prefix_queries=9, prefix_hits=3)),
    ("new name wins over the old one sent beside it",
     b"vllm:gpu_cache_usage_perc 0.9\nvllm:kv_cache_usage_perc 0.1\n", EngineMetrics(kv_usage=0.1)),
    ("old llama.cpp", b"llamacpp:kv_cache_usage_ratio 0.25\nllamacpp:requests_processing 3\n"
     b"llamacpp:requests_deferred 1\n", EngineMetrics(running=3, waiting=1, kv_usage=0.25)),
    ("engines are summed, the cache share is averaged",
     b'vllm:num_requests_running{engine="0",model_name="m"} 4.0\n'
     b'vllm:num_requests_running{engine="1",model_name="m"} 2.0\n'
     b'vllm:kv_cache_usage_perc{engine="0"} 0.9\nvllm:kv_cache_usage_perc{engine="1"} 0.1\n'
     b'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="100"} 1.0\n'
     b'vllm:cache_config_info{engine="1",block_size="16",num_gpu_blocks="50"} 1.0\n',
     EngineMetrics(running=6, kv_usage=0.5, block_size=16, num_gpu_blocks=150, kv_tokens=2400)),
    ("tokens said are believed over blocks times size",
     b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100",kv_cache_size_tokens="999"} 1.0\n',
     EngineMetrics(block_size=16, num_gpu_blocks=100, kv_tokens=999)),
    ("unknown capacity of one engine makes the sum unknown",
     b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1\n'
     b'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1\n', EngineMetrics(block_size=16)),
    ("speculation", b"vllm:spec_decode_num_drafts_total 10\nvllm:spec_decode_num_draft_tokens_total 30\n"
     b"vllm:spec_decode_num_accepted_tokens_total 20\n"
     b'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 9\n',
     EngineMetrics(spec_drafts=10, spec_draft_tokens=30, spec_accepted_tokens=20)),
    ("speculation without _total", b"vllm:spec_decode_num_draft_tokens 30\n"
     b"vllm:spec_decode_num_accepted_tokens 20\n",
     EngineMetrics(spec_draft_tokens=30, spec_accepted_tokens=20)),
    ("labels may hold braces, quotes and spaces",
     b'vllm:num_requests_running{model_name="a}b \\" {c",engine="0"} 7\n', EngineMetrics(running=7)),
    ("a time stamp after the value", b"vllm:num_requests_running 7 1700000000\n", EngineMetrics(running=7)),
    ("CR LF", b"vllm:num_requests_running 7\r\nvllm:num_requests_waiting 1\r\n",
     EngineMetrics(running=7, waiting=1)),
    ("by reason is another metric", b'vllm:num_requests_waiting_by_reason{reason="x"} 5\n', EngineMetrics()),
    ("created is not the counter", b"vllm:prompt_tokens_created 1.7e9\n", EngineMetrics()),
    ("comments", b"# HELP vllm:num_requests_running 5\n# TYPE vllm:num_requests_running 5", EngineMetrics()),
    ("a name inside a line", b"x vllm:num_requests_running 5\n", EngineMetrics()),
    ("not numbers", b"vllm:num_requests_running NaN\nvllm:num_requests_waiting +Inf\n"
     b"vllm:kv_cache_usage_perc x\n", EngineMetrics()),
    ("negative", b"vllm:num_requests_running -1\n", EngineMetrics()),
    ("over one", b"vllm:kv_cache_usage_perc 1.2\n", EngineMetrics(kv_usage=1.0)),
    ("HTML", b"<html><body>404</body></html>", EngineMetrics()),
    ("nothing", b"", EngineMetrics()),
    ("not UTF-8", b"\xff\xfe\nvllm:num_requests_running 2\n", EngineMetrics(running=2)),
]  # fmt: skip


@pytest.mark.parametrize(("what", "text", "expected"), CASES, ids=[case[0] for case in CASES])
def test_names_old_and_new(what, text, expected):
    assert read_metrics(text) == expected


PIECES = st.sampled_from(
    [b"vllm:num_requests_running", b"vllm:cache_config_info", b"llamacpp:requests_processing", b"{", b"}",
     b'"', b"\\", b"=", b",", b" ", b"\n", b"block_size", b"1", b"9" * 400, b"1e999", b"-0", b"None", b"\x00"]
)  # fmt: skip


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.lists(PIECES | st.binary(max_size=4), max_size=40).map(b"".join))
def test_hostile_text_never_raises(text):
    found = read_metrics(text)
    assert found.kv_usage is None or 0 <= found.kv_usage <= 1
    assert found.running is None or found.running >= 0


def seconds(text: bytes) -> float:
    start = time.perf_counter()
    read_metrics(text)
    return time.perf_counter() - start


@pytest.mark.parametrize(
    "piece",
    [
        b'vllm:num_requests_running{a="' + b"x" * 50,
        b'vllm:num_requests_running{a="b",',
        b'vllm:num_requests_running{"\\',
        b"vllm:num_requests_running{" + b"a" * 50,
        b"vllm:" + b"a" * 50,
        b"vllm:cache_config_info{" + b'block_size="1' * 5 + b"} 1\n",
        b"vllm:num_requests_running 1\n",
        b"vllm:num_requests_running" + b" " * 60,
    ],
)
def test_twice_the_text_costs_twice_the_time(piece):
    text = piece * (400_000 // len(piece))
    small, large = (min(seconds(part) for _ in range(3)) for part in (text[:50_000], text))
    assert large < 0.02 + 30 * small  # eight times the text; quadratic would be sixty-four


def test_a_real_scrape_is_read_in_a_few_milliseconds():
    text = load(VLLM, "get_metrics").body
    assert min(seconds(text) for _ in range(5)) < 0.02
