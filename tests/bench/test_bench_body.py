"""What reading and splicing a body costs. Targets, on a free core: 3 µs for a small chat body, 400 µs for 512 KiB
of long strings, and no shape of body below 10 MB/s. The chain of a 512 KiB prompt: 200 µs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from proxy.wire.body import scan_object
from proxy.wire.errors import Api
from proxy.wire.prefix import read_prefix
from proxy.wire.request import read_request
from proxy.wire.splice import apply, override

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

WORDS = (
    "the",
    "model",
    "answers",
    "with",
    "tokens",
    "of",
    "some",
    "quality",
    "and",
    "attention",
    "routing",
    "gateway",
)
TEXT = " ".join(WORDS[n * n % 12] for n in range(90_000))
CODE = '    print("hello", x["a"])\n' * 15_000


def chat(*contents: str, **fields: object) -> bytes:
    messages = [{"role": "user", "content": content} for content in contents]
    return json.dumps({"model": "qwen", "messages": messages, **fields}).encode()


SMALL = chat(
    "You are a helpful assistant. Answer briefly and in the language of the user.",
    "What is the capital of France and how many people live there? One sentence, with a source.\nThanks",
    "Paris.",
    "And of Spain?",
    temperature=0.7,
    max_tokens=256,
    stream=True,
    stream_options={"include_usage": True},
)
BODIES = {
    "small": SMALL,
    "long_strings": chat(TEXT[:200_000], TEXT[200_000:524_000]),
    "long_strings_with_newlines": chat(TEXT[:524_000].replace(" gateway ", "\n")),
    "escaped_quotes": chat(CODE),
    "json_in_json": chat(
        json.dumps([{"path": f"src/f{n}.py", "line": n, "text": "some text"} for n in range(5000)])
    ),
    "only_escaped_quotes": chat('"' * 200_000),
    "only_backslashes": chat("\\" * 200_000),
    "chinese": json.dumps(
        {"messages": [{"role": "user", "content": "你好世界" * 40_000}]}, ensure_ascii=False
    ).encode(),
    "small_strings": json.dumps({"input": ["abcdefg"] * 40_000}).encode(),
    "token_ids": json.dumps({"prompt": [n % 50_000 for n in range(60_000)]}).encode(),
    "small_objects": json.dumps({"m": [{"a": 1, "b": []}] * 20_000}).encode(),
    "deep": b'{"a":' + b'[{"a":' * 50_000 + b"1" + b"}]" * 50_000 + b"}",
    "wide_and_deep": b'{"a":' + b"[" * 20 + b"[]," * 50_000 + b"1" + b"]" * 20 + b"}",
    "many_fields": json.dumps({f"k{n}": n for n in range(4000)}).encode(),
}


@pytest.mark.parametrize("name", BODIES)
def test_scan(benchmark: BenchmarkFixture, name: str) -> None:
    body = BODIES[name]
    benchmark.extra_info["bytes"] = len(body)
    benchmark(scan_object, body)


@pytest.mark.parametrize("name", ["small", "long_strings", "escaped_quotes"])
def test_read_request(benchmark: BenchmarkFixture, name: str) -> None:
    benchmark(read_request, Api.CHAT, BODIES[name])


@pytest.mark.parametrize("name", ["small", "long_strings", "escaped_quotes"])
def test_read_prefix(benchmark: BenchmarkFixture, name: str) -> None:
    benchmark(read_prefix, read_request(Api.CHAT, BODIES[name]), "model")


@pytest.mark.parametrize("name", ["small", "long_strings"])
def test_splice_a_model_and_usage(benchmark: BenchmarkFixture, name: str) -> None:
    scan = scan_object(BODIES[name])
    benchmark(apply, scan, [override("model", "backend"), override("stream_options.include_usage", True)])


@pytest.mark.parametrize("name", BODIES)
def test_json_loads_for_comparison(benchmark: BenchmarkFixture, name: str) -> None:
    if name == "deep":
        pytest.skip("json.loads gives up")
    benchmark(json.loads, BODIES[name])
