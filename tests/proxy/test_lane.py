"""The hot path: which chunks take the lane, what they leave behind, and that its two forms are one."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.lane import LONGEST, MARKS, CompiledLane, PythonLane
from proxy.wire.streams import Inside, Kept, Shape

HEAD = b'data: {"id":"c","choices":[{"delta":{"content":"'
TAIL = b'"},"finish_reason":null}]}\n\n'
RENAMED = (b'data: {"id":"c","model":"public name","choices":[{"delta":{"content":"', TAIL)

FORMS = [
    PythonLane,
    pytest.param(
        CompiledLane, marks=pytest.mark.skipif(CompiledLane is None, reason="built without a C compiler")
    ),
]


class Trip:
    """One lane, what it wrote, marked, folded and left to the long way."""

    def __init__(self, form: type[PythonLane], shape: Shape | None = None) -> None:
        class Connection(form):  # type: ignore[misc, valid-type]
            def received(self, data: bytes) -> None:
                trip.received.append(data)

        trip = self
        self.written: list[bytes] = []
        self.received: list[bytes] = []
        self.marks: list[float] = []
        self.folded = 0
        self.lane = Connection()
        self.shape = shape or Shape(HEAD, TAIL, None)
        self.open()

    def open(self) -> None:
        self.lane.open(self.shape, self.written.append, lambda: 7.0, self.marks, self.fold)

    def fold(self) -> None:
        self.folded += 1
        del self.marks[:-1]

    def seen(self) -> tuple[object, ...]:
        shape = self.shape
        return self.written, self.received, self.marks, self.folded, self.lane.sent, shape.parts, shape.kept


def chunk(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)


def delta(text: bytes) -> bytes:
    return chunk(HEAD + text + TAIL)


@pytest.mark.parametrize("form", FORMS)
def test_a_delta_like_the_last_one_is_written_as_it_came_and_timed(form: type[PythonLane]) -> None:
    trip = Trip(form)
    data = delta(b" word")
    trip.lane.data_received(data)
    assert trip.written[0] is data
    assert trip.marks == [7.0]
    assert trip.lane.sent == len(HEAD + b" word" + TAIL)
    assert not trip.received


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "data",
    [
        delta(b""),  # an empty delta is no content
        delta(b'say "hi"'),
        delta(b"ends with a backslash\\"),  # it escapes the quote
        delta(b"line\nend"),
        chunk(HEAD.replace(b'"c"', b'"d"') + b"x" + TAIL),
        chunk(HEAD + b"x" + TAIL.replace(b"null", b'"stop"')),
        chunk(HEAD + b"x" + TAIL + HEAD + b"y" + TAIL),
        delta(b"x") + delta(b"y"),
        delta(b"x")[:-1],
        delta(b"x")[1:],
        b"0" + delta(b"x"),  # a size with a zero before it
        delta(b"x" * (0xAB - len(HEAD + TAIL))).replace(b"ab", b"AB", 1),
        b"%x;ext\r\n" % len(HEAD + b"x" + TAIL) + delta(b"x").split(b"\r\n", 1)[1],
        b"%x\r\n" % (len(HEAD + b"x" + TAIL) + 1) + delta(b"x").split(b"\r\n", 1)[1],
        delta(b"x" * LONGEST),
        b"",
        b"\r\n",
        b"0\r\n\r\n",
    ],
)
def test_anything_else_goes_the_long_way_with_nothing_done(form: type[PythonLane], data: bytes) -> None:
    trip = Trip(form)
    trip.lane.data_received(data)
    assert trip.received == [data]
    assert not trip.seen()[0]
    assert (trip.marks, trip.lane.sent) == ([], 0)


@pytest.mark.parametrize("form", FORMS)
def test_after_the_long_way_the_lane_stays_shut_until_it_is_opened(form: type[PythonLane]) -> None:
    trip = Trip(form)
    odd, good = delta(b'"'), delta(b"x")
    for data in (odd, good):
        trip.lane.data_received(data)
    assert trip.received == [odd, good]
    trip.open()
    trip.lane.data_received(good)
    assert trip.written == [good]
    trip.lane.close()
    trip.lane.data_received(good)
    assert trip.received == [odd, good, good]


@pytest.mark.parametrize("form", FORMS)
def test_another_shape_is_taken_over_and_another_exchange_begins_at_nothing(form: type[PythonLane]) -> None:
    trip = Trip(form)
    trip.lane.data_received(delta(b"x"))
    trip.shape = Shape(b'data: {"reasoning":"', b'"}\n\n', None)
    trip.open()
    trip.lane.data_received(chunk(b'data: {"reasoning":"hm"}\n\n'))
    assert len(trip.written) == 2
    trip.lane.forget()
    assert trip.lane.sent == 0
    trip.lane.data_received(chunk(b'data: {"reasoning":"hm"}\n\n'))
    assert len(trip.received) == 1


@pytest.mark.parametrize("form", FORMS)
def test_a_renamed_delta_is_framed_anew(form: type[PythonLane]) -> None:
    trip = Trip(form, Shape(HEAD, TAIL, RENAMED))
    trip.lane.data_received(delta(b"x"))
    event = RENAMED[0] + b"x" + RENAMED[1]
    assert trip.written == [chunk(event)]
    assert trip.lane.sent == len(event)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("inside", "passing", "seen"),
    [
        (Inside.ANY, [b"<", b"a\\nb", b"\\u003c", b'\\"', "é\x7f".encode(), b"\xff"], [b'"', b"\n", b"\\"]),
        (
            Inside.TEXT,
            [b'say \\"hi\\"', b"a\\tb\\\\", "你好".encode()],
            [b"<", b"`", b"~", b"a\\nb", b"\\u003c", b"\\\x00", b"\\"],
        ),
        (Inside.ASCII, [b"print(1) ~ `x` <a>"], [b'\\"', "é".encode(), b"\t", b"\x7f", b"\\\\"]),
    ],
)
def test_which_texts_pass_unseen(
    form: type[PythonLane], inside: Inside, passing: list[bytes], seen: list[bytes]
) -> None:
    shape = Shape(HEAD, TAIL, None, inside)
    for text in passing:
        trip = Trip(form, shape)
        trip.lane.data_received(delta(text))
        assert trip.written == [delta(text)]
    for text in seen:
        trip = Trip(form, shape)
        trip.lane.data_received(delta(text))
        assert trip.received == [delta(text)]


@pytest.mark.parametrize("form", FORMS)
def test_arguments_are_collected_on_the_way(form: type[PythonLane]) -> None:
    parts: list[str] = []
    trip = Trip(form, Shape(HEAD, TAIL, None, Inside.ASCII, parts))
    for text in (b"def f(x):", b'"', b" return x"):
        trip.open()
        trip.lane.data_received(delta(text))
    assert parts == ["def f(x):", " return x"]


BETWEEN = b'"},"finish_reason":null,"token_ids":['
ID_TAIL = b"]}]}\n\n"


def with_ids() -> Shape:
    return Shape(HEAD, ID_TAIL, (HEAD, TAIL), kept=Kept(BETWEEN, [], []))


@pytest.mark.parametrize("form", FORMS)
def test_ids_are_taken_out_and_kept_with_their_text(form: type[PythonLane]) -> None:
    trip = Trip(form, with_ids())
    for text, ids in ((b" a", b"17"), (b"1,2", b"3,444"), (b"\\n", b"123456789012345678")):
        trip.lane.data_received(chunk(HEAD + text + BETWEEN + ids + ID_TAIL))
    assert trip.written == [delta(b" a"), delta(b"1,2"), delta(b"\\n")]
    assert trip.shape.kept == (BETWEEN, [b"17", b"3,444", b"123456789012345678"], [b" a", b"1,2", b"\\n"])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "ids", [b"", b",", b"1,", b",1", b"1,,2", b"1, 2", b"-1", b"1.5", b"null", b"1" * 19, b"1],[2"]
)
def test_what_are_no_ids_goes_the_long_way(form: type[PythonLane], ids: bytes) -> None:
    trip = Trip(form, with_ids())
    data = chunk(HEAD + b"x" + BETWEEN + ids + ID_TAIL)
    trip.lane.data_received(data)
    assert trip.received == [data]
    assert trip.seen()[0] == []
    assert trip.shape.kept == (BETWEEN, [], [])


@pytest.mark.parametrize("form", FORMS)
def test_text_is_kept_also_where_there_are_no_ids(form: type[PythonLane]) -> None:
    trip = Trip(form, Shape(HEAD, TAIL, None, kept=Kept(b"", [], [])))
    trip.lane.data_received(delta(b"x"))
    assert trip.written == [delta(b"x")]
    assert trip.shape.kept == (b"", [], [b"x"])


@pytest.mark.parametrize("form", FORMS)
def test_marks_are_folded_before_they_grow(form: type[PythonLane]) -> None:
    trip = Trip(form)
    for _ in range(3 * MARKS):
        trip.lane.data_received(delta(b"x"))
    assert trip.folded == 3
    assert len(trip.marks) < MARKS


@pytest.mark.parametrize("form", FORMS)
def test_the_client_may_be_gone_while_a_chunk_is_written_to_it(form: type[PythonLane]) -> None:
    trip = Trip(form)

    def write(data: bytes) -> None:
        trip.written.append(data)
        trip.lane.close()
        trip.lane.forget()

    trip.lane.forget()
    trip.lane.open(trip.shape, write, lambda: 7.0, trip.marks, trip.fold)
    trip.lane.data_received(delta(b"x"))
    trip.lane.data_received(delta(b"y"))
    assert trip.written == [delta(b"x")]
    assert trip.received == [delta(b"y")]


@pytest.mark.parametrize("form", FORMS)
def test_an_exchange_that_is_over_is_not_held(form: type[PythonLane]) -> None:
    trip = Trip(form)

    class Client:
        def write(self, data: bytes) -> None: ...

        def fold(self) -> None: ...

    client = Client()
    gone = weakref.ref(client)
    trip.lane.forget()
    trip.lane.open(trip.shape, client.write, lambda: 7.0, [], client.fold)
    trip.lane.data_received(delta(b"x"))
    del client
    assert gone() is not None
    trip.lane.forget()
    assert gone() is None


@pytest.mark.parametrize("form", FORMS)
def test_a_write_that_fails_is_heard(form: type[PythonLane]) -> None:
    def write(data: bytes) -> None:
        raise OSError("gone")

    trip = Trip(form)
    trip.lane.forget()
    trip.lane.open(trip.shape, write, lambda: 7.0, trip.marks, trip.fold)
    with pytest.raises(OSError, match="gone"):
        trip.lane.data_received(delta(b"x"))


TEXTS = st.lists(
    st.sampled_from(
        [
            b"a",
            b" ",
            b"<",
            b"`",
            b"~",
            b'"',
            b"\\",
            b"n",
            b"u",
            b"\n",
            b"\r\n",
            b"\x00",
            b"\xc3\xa9",
            b"\xff",
            TAIL,
            HEAD,
        ]
    ),
    max_size=6,
).map(b"".join)


IDS = st.lists(st.sampled_from([b"1", b"23", b",", b",", b"1" * 18, b" ", b"]", BETWEEN]), max_size=5).map(
    b"".join
)


def mutated(draw: Callable[..., object], data: bytes) -> bytes:
    """The chunk as it is, cut, or with a byte of it changed or put in."""
    at = draw(st.integers(0, len(data)))
    assert isinstance(at, int)
    kind = draw(st.sampled_from(["same", "same", "cut", "change", "insert", "twice"]))
    byte = draw(st.sampled_from([b"0", b"a", b"F", b"\r", b"\n", b'"', b"\\"]))
    assert isinstance(byte, bytes)
    return {
        "same": data,
        "cut": data[:at],
        "change": data[:at] + byte + data[at + 1 :],
        "insert": data[:at] + byte + data[at:],
        "twice": data + data,
    }[str(kind)]


@pytest.mark.skipif(CompiledLane is None, reason="built without a C compiler")
@given(st.data())
@settings(max_examples=500, deadline=None, derandomize=True)
def test_the_compiled_lane_does_what_the_python_one_does(data: st.DataObject) -> None:
    assert CompiledLane is not None
    inside = data.draw(st.sampled_from(Inside))
    renamed = data.draw(st.sampled_from([None, RENAMED]))
    between = data.draw(st.sampled_from([None, b"", BETWEEN]))
    tail = ID_TAIL if between else TAIL

    def shape() -> Shape:
        kept = None if between is None else Kept(between, [], [])
        parts: list[str] | None = [] if inside is Inside.ASCII else None
        return Shape(HEAD, tail, RENAMED if between else renamed, inside, parts, kept)

    trips = [Trip(form, shape()) for form in (PythonLane, CompiledLane)]
    for _ in range(data.draw(st.integers(1, 5))):
        middle = between + data.draw(IDS) if between else b""
        piece = mutated(data.draw, chunk(HEAD + data.draw(TEXTS) + middle + tail))
        again = data.draw(st.booleans())
        for trip in trips:
            if again:
                trip.open()
            trip.lane.data_received(piece)
        assert trips[0].seen() == trips[1].seen()
