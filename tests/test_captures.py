"""The recorded answers are read as what the servers sent."""

from __future__ import annotations

import json

import pytest

from tests import captures


def test_all_three_servers_were_recorded() -> None:
    assert {server: len(captures.names(server)) > 8 for server in captures.SERVERS} == dict.fromkeys(
        captures.SERVERS, True
    )
    assert len(captures.streams()) > 50


@pytest.mark.parametrize("capture", captures.all_captures(), ids=str)
def test_every_file_is_one_exchange(capture: captures.Capture) -> None:
    assert capture.request_method in ("GET", "POST")
    assert capture.path.startswith("/")
    assert capture.ended
    if capture.request_body and not capture.request_cut and "bad_json" not in capture.name:
        json.loads(capture.request_body)
    if capture.header("content-type").startswith("application/json"):
        json.loads(capture.body)


@pytest.mark.parametrize("capture", captures.streams(), ids=str)
def test_every_stream_is_made_of_whole_events(capture: captures.Capture) -> None:
    assert len(capture.times) == len(capture.chunks)
    assert list(capture.times) == sorted(capture.times)
    for chunk in capture.chunks:
        for event in chunk.replace(b"\r\n", b"\n").removesuffix(b"\n\n").split(b"\n\n"):
            fields = [line.partition(b": ") for line in event.split(b"\n")]
            assert {name for name, _, _ in fields} <= {b"data", b"event"}
            data = next(value for name, _, value in fields if name == b"data")
            assert data == b"[DONE]" or isinstance(json.loads(data), dict)


def test_a_plain_answer_has_its_status_headers_and_body() -> None:
    capture = captures.load(captures.VLLM, "error_unknown_model")
    assert (capture.request_method, capture.path) == ("POST", "/v1/chat/completions")
    assert json.loads(capture.request_body)["model"] == "nope"
    assert (capture.status, capture.reason) == (404, "Not Found")
    assert capture.header("content-type") == "application/json"
    assert len(capture.body) == int(capture.header("content-length"))


def test_a_stream_keeps_the_servers_chunks() -> None:
    first, *_, last = captures.load(captures.LLAMA_SERVER, "chat_text_stream").chunks
    assert first.count(b"data: ") == 2  # two events in one HTTP chunk
    assert last == b"data: [DONE]\n\n"


def test_an_empty_stream_has_no_chunks() -> None:
    capture = captures.load(captures.LLAMA_CPP_PYTHON, "error_context_overflow_stream")
    assert capture.is_stream
    assert capture.chunks == ()
    assert capture.request_cut


def test_request_headers_are_told_from_the_body() -> None:
    capture = captures.load(captures.VLLM, "error_wrong_content_type")
    assert capture.request_headers == (("Content-Length", "2"), ("Content-Type", "text/plain"))
    assert capture.request_body == b"{}"


def test_notes_are_not_read_as_an_exchange() -> None:
    with pytest.raises(ValueError, match="read it with notes"):
        captures.load(captures.VLLM, "abort")
    assert captures.notes(captures.VLLM, "abort").startswith("streaming: client closed\n")
