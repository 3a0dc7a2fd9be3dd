"""Long strings are left out of a scan: what is found must be what a scan of every byte finds."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.wire.body import LONG, BodyError, Scan, scan_all, scan_object
from proxy.wire.errors import Api
from proxy.wire.request import read_request
from proxy.wire.stretches import STRETCH, quoted, shorten

RUNS = st.sampled_from([0, 1, 2, 3, 62, 63, 64, 65, 66, 127, 128, 129, 200, 2000])
LENGTHS = st.sampled_from([0, 1, STRETCH - 1, STRETCH, STRETCH + 1, STRETCH + 130, 3 * STRETCH])


@st.composite
def fragments(draw: st.DrawFn) -> bytes:
    """A piece of JSON, sound or not: structure, quotes after runs of backslashes, stretches of anything."""
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return draw(
            st.sampled_from([b'"', b'","', b'":"', b'{"', b'"}', b"[", b"]", b"{", b"}", b",", b"1", b'\\"'])
        )
    if kind == 1:
        return b"\\" * draw(RUNS) + draw(st.sampled_from([b'"', b"n", b"", b'a"', b'","k":"']))
    filler = draw(st.sampled_from([b"a", b" ", b"\\n", b"\\\\", b"[", b"}", b",1", b"\xc3\xa9", b"\\u0022"]))
    return filler * draw(LENGTHS)


bodies = st.lists(fragments(), max_size=9).map(lambda parts: b'{"model":"m","a":"' + b"".join(parts) + b'"}')


def members(scan: Scan) -> list[tuple[bytes, tuple[int, int], int, int]]:
    return [(place[1], place.span(2), place.start(), place.end()) for place in scan.places]


def outcome(scan: object, data: bytes) -> object:
    try:
        found = scan(data)  # type: ignore[operator]
    except BodyError as error:
        return error.message
    return found.open, members(found), sorted(found.members), found.duplicates


@given(bodies)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_scan_without_the_long_strings_finds_what_a_whole_scan_finds(data: bytes) -> None:
    longer = data[:-1] + b',"z":"' + b"z" * LONG + b'"}'
    assert outcome(scan_object, longer) == outcome(scan_all, longer)


@given(bodies)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_every_quote_is_in_a_quoted_part_and_what_lies_between_is_long(data: bytes) -> None:
    parts = quoted(data, 3, len(data) - 1)
    between = [0, *(at for part in parts for at in part), len(data)]
    assert sum(data.count(b'"', *part) for part in parts) == data.count(b'"', 3, len(data) - 1)
    assert all(data[start : start + 1] == data[stop - 1 : stop] == b'"' for start, stop in parts)
    assert between == sorted(between)
    assert all(later[0] - former[1] >= STRETCH for former, later in itertools.pairwise(parts))


def test_the_inside_of_long_strings_is_what_is_left_out() -> None:
    data = json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": "x" * 500_000}], "n": 1}
    ).encode()
    short = shorten(data, quoted(data, 0, len(data)))
    assert short is not None
    assert len(short.data) < 400
    assert json.loads(short.data)["n"] == 1


@pytest.mark.parametrize("opening", [b'{"prompt":[', b'{"a":"\\"","prompt":[', b'{"a":"\\\\","prompt":['])
def test_numbers_and_blanks_are_never_left_out(opening: bytes) -> None:
    data = opening + b"1," * 3000 + b" " * 6000 + b'2],"model":"m","s":"' + b"s" * 9000 + b'"}'
    short = shorten(data, quoted(data, 0, len(data)))
    assert short is not None
    assert (short.data.count(b"1,"), short.data.count(b" ")) == (3000, 6000)
    assert len(short.data) < len(data) - 8000


@pytest.mark.parametrize("text", ["x" * 200_000, 'say "hi"\n' * 20_000, "\\" * 100_000, "词" * 70_000])
def test_sizes_of_a_long_body_are_those_of_its_parts(text: str) -> None:
    turns = [{"role": role, "content": text} for role in ("system", "user", "assistant", "user")]
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0KGgo" * 9000}}
    turns.append({"role": "user", "content": [picture, {"type": "text", "text": "and?"}]})  # type: ignore[dict-item]
    sizes = read_request(Api.CHAT, json.dumps({"model": "m", "messages": turns}).encode()).sizes
    assert (sizes.messages, sizes.images) == (5, 1)
    assert 99_000 <= sizes.media_bytes <= 99_100


def test_a_mark_is_found_wherever_it_stands() -> None:
    for before, after in ((0, 0), (100_000, 0), (0, 100_000), (100_000, 100_000)):
        turns = [{"content": "x" * before}, {"role": "tool", "content": "y" * after}]
        scan = scan_object(json.dumps({"m": turns, "other": "reasoning"}).encode())
        assert scan.holds(b"m", b'"tool')
        assert not scan.holds(b"m", b'"reasoning')
        assert not scan.holds(b"none", b'"tool')
