"""Framing of server-sent events: whole, byte by byte, at random cuts; every line end the standard allows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.wire.sse import MAX_EVENT_BYTES, EventTooLong, Splitter, fields


def split(data: bytes, cuts: list[int]) -> tuple[list[bytes], bytes]:
    splitter, events, last = Splitter(), [], 0
    for cut in [*sorted(cuts), len(data)]:
        events += splitter.feed(data[last:cut])
        last = cut
    return events, splitter.pending


CASES = {
    "lf": (b"data: a\n\ndata: b\n\n", [b"data: a\n\n", b"data: b\n\n"], b""),
    "crlf": (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"data: a\r\n\r\n", b"data: b\r\n\r\n"], b""),
    "comment": (b": ping\n\ndata: a\n\n", [b": ping\n\n", b"data: a\n\n"], b""),
    "unfinished": (b"data: a\n\ndata: b", [b"data: a\n\n"], b"data: b"),
    "mixed_ends": (b"data: a\r\n\ndata: b\n\r\n", [b"data: a\r\n\n", b"data: b\n\r\n"], b""),
    "named": (b"event: x\ndata: a\n\n", [b"event: x\ndata: a\n\n"], b""),
}


@pytest.mark.parametrize(("data", "events", "rest"), CASES.values(), ids=CASES.keys())
def test_events_are_the_same_whole_and_byte_by_byte(data: bytes, events: list[bytes], rest: bytes) -> None:
    assert split(data, []) == (events, rest)
    assert split(data, list(range(len(data)))) == (events, rest)


@settings(max_examples=200, derandomize=True)
@given(
    st.lists(st.sampled_from([b"data: x", b"\n", b"\n\n", b"\r\n", b"\r\n\r\n", b": c", b"event: y"])),
    st.data(),
)
def test_no_byte_is_lost_or_made_up_at_any_cut(pieces: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(pieces)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8))
    events, rest = split(stream, cuts)
    assert b"".join(events) + rest == stream


@settings(max_examples=200, derandomize=True)
@given(
    st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"").replace(b"\r", b"")), max_size=6),
    st.data(),
)
def test_every_event_comes_out_once_at_any_cut(texts: list[bytes], data: st.DataObject) -> None:
    for end in (b"\n", b"\r\n"):
        events = [b"data: " + text + end + end for text in texts]
        stream = b"".join(events)
        cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8))
        assert split(stream, cuts) == (events, b"")
        assert [fields(event) for event in events] == [(b"", text) for text in texts]


def test_an_event_without_end_is_refused_before_it_fills_the_memory() -> None:
    splitter = Splitter()
    for _ in range(MAX_EVENT_BYTES // 65536):
        assert splitter.feed(b"x" * 65536) == []
    with pytest.raises(EventTooLong):
        splitter.feed(b"x")


@pytest.mark.parametrize(
    ("event", "name", "data"),
    [
        (b"data: {}\n\n", b"", b"{}"),
        (b"data:{}\n\n", b"", b"{}"),
        (b"data:  x\n\n", b"", b" x"),
        (b"event: error\ndata: {}\n\n", b"error", b"{}"),
        (b"data: a\ndata: b\n\n", b"", b"a\nb"),
        (b"data: a\r\ndata: b\r\n\r\n", b"", b"a\nb"),
        (b"id: 7\nretry: 5\n\n", b"", None),
        (b": comment\n\n", b"", None),
        (b"data\n\n", b"", b""),
        (b"database: x\n\n", b"", None),
    ],
)
def test_fields_of_an_event(event: bytes, name: bytes, data: bytes | None) -> None:
    assert fields(event) == (name, data)
