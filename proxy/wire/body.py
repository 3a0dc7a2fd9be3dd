"""Where the fields of a JSON request body are, without parsing it: byte spans of the top-level members.

Rules
1. Bytes in, offsets out. A body is never decoded and encoded again: integers beyond 64 bits, NaN, lone
   surrogates, order and whitespace are not ours to break. A value is decoded alone, when asked for.
2. Whatever json.loads takes as an object is taken here with the same members. Strict: the object itself, its
   keys, numbers and literals, the end of the body. Lenient, because the strict parser behind us will judge:
   the inside of strings and of nested values (order of tokens, kinds of brackets, control characters, UTF-8).
   Where strings begin and end, and how deep brackets go, is never a matter of leniency.
3. A key that the gateway reads or edits must be there once; any other key may repeat and passes as it came.
4. A UTF-8 byte order mark passes, as in json.loads. UTF-16 and UTF-32 do not: nobody sends them.
5. Linear time and no recursion. The regular expressions are possessive: nothing is tried twice, but for a
   second pass where quotes are escaped and a third where brackets nest deeper than `_DEPTH`.
"""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, islice
from operator import itemgetter

from proxy.wire import patterns
from proxy.wire.stretches import Part, Shortened, mask, quoted, shorten

MAX_MEMBERS = 4096
"""Top-level fields of one object. APIs have dozens; without a limit 64 MiB of them would cost gigabytes."""

_DEPTH = 12
"""Brackets inside a value that one match crosses: deeper than tool schemas go."""

LONG = 32 * 1024
"""Bodies from this size on are looked through for long strings first."""

_LOOK = 16384
"""How much of a long element is looked at for its end."""

_WS = rb"[ \t\n\r]*+"
# Between the strings of a container: whitespace, punctuation, numbers, literals; no comments.
_ATOMS = rb"[ \t\n\r,:0-9+\-.eEtrufalsnNaIity]*+"
# A run of anything but one byte costs under a nanosecond a byte, of anything outside a set ten times that. So
# backslashes are looked at only before a quote: one or three of them escape it, none or two do not. Longer runs
# make this fail, and the scan goes on in a masked copy that has none.
_ODD = rb"(?<=\\)(?:(?<=(?<!\\)\\)|(?<=(?<!\\)\\\\\\))"
_EVEN = rb"(?:(?<!\\)|(?<=(?<!\\)\\\\))"
_STRING = rb'"[^"]*+(?:' + _ODD + rb'"[^"]*+)*+' + _EVEN + rb'"'
_NUMBER = rb"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+|-?Infinity|NaN"


def _container(depth: int) -> bytes:
    inside = rb"(?:" + _STRING + _ATOMS + rb")*+"
    for _ in range(depth - 1):
        inside = rb"(?:" + _STRING + _ATOMS + rb"|[\[{]" + _ATOMS + inside + rb"[\]}]" + _ATOMS + rb")*+"
    return rb"[\[{]" + _ATOMS + inside + rb"[\]}]"


_VALUE = rb"(?:" + _STRING + rb"|" + _container(_DEPTH) + rb"|true|false|null|" + _NUMBER + rb")"
_KEY = rb'"([\x20\x21\x23-\x5b\x5d-\x7e]*+)"'
_REST = rb"|(?s:.+)"  # what does not match ends the search at once, instead of being tried again a byte later

# Group 3 is set where a comma follows, only group 2 at the end of the object and the body, none on a failure.
_MEMBERS = patterns.compile(
    _WS + _KEY + _WS + rb":" + _WS + rb"(" + _VALUE + rb")" + _WS + rb"(?:(,)|\}" + _WS + rb"\Z)" + _REST
)
_ITEMS = patterns.compile(_WS + rb"(" + _VALUE + rb")" + _WS + rb"(?:(,)|\]\Z)" + _REST)
_START = patterns.compile(rb"(?:\xef\xbb\xbf)?+" + _WS + rb"\{(" + _WS + rb"\}" + _WS + rb"\Z)?+")
_HEAD = re.compile(_WS + rb'"([^"]*+)"' + _WS + rb":" + _WS)
_SIMPLE = patterns.compile(_VALUE)
_TAIL = re.compile(_WS + rb"(?:(,)|\}" + _WS + rb"\Z)")
_STRINGS = patterns.compile(_STRING)
_TOKENS = patterns.compile(rb"(?:" + _STRING + _ATOMS + rb"|[\[{\]}]{1,16}+" + _ATOMS + rb"){1,4096}+")
_TO_BRACKET = patterns.compile(
    rb"(?:" + _STRING + _ATOMS + rb"|" + _ATOMS.removesuffix(b"*+") + rb"++)*+[\[{\]}]"
)
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # as signed bytes: one deeper, one up
_NO_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))

LAX_TRUE = frozenset({"1", "on", "t", "true", "y", "yes"})
LAX_FALSE = frozenset({"0", "off", "f", "false", "n", "no"})


class BodyError(ValueError):
    """A body that cannot be served. message: for the client. param: the field at fault, None: the whole."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class Kind(StrEnum):
    """What a value is, from its first byte."""

    STRING = "a string"
    NUMBER = "a number"
    OBJECT = "an object"
    ARRAY = "an array"
    TRUE = "true"
    FALSE = "false"
    NULL = "null"


_KINDS = {b'"'[0]: Kind.STRING, b"{"[0]: Kind.OBJECT, b"["[0]: Kind.ARRAY} | {
    b"t"[0]: Kind.TRUE,
    b"f"[0]: Kind.FALSE,
    b"n"[0]: Kind.NULL,
}


@dataclass(slots=True)
class _Member:
    """A member that `_MEMBERS` cannot match (odd key, deep value); behaves like a match as far as used."""

    key: bytes
    begin: int
    value: tuple[int, int]
    stop: int
    lastindex: int

    def __getitem__(self, group: int) -> bytes:
        return self.key

    def span(self, group: int) -> tuple[int, int]:
        return self.value

    def start(self) -> int:
        return self.begin

    def end(self) -> int:
        return self.stop


Place = re.Match[bytes] | _Member


@dataclass(slots=True)  # frozen would add a tenth to the cost of a scan; nothing changes one
class Scan:
    """The members of one JSON object.

    open: offset behind the opening brace. places: all members, in order. members: by decoded key (UTF-8), the
    last of equal ones. duplicates: keys that are there more than once. Getters: None for absent and null.
    """

    data: bytes
    open: int
    places: list[Place]
    members: dict[bytes, Place]
    duplicates: frozenset[bytes] = field(default=frozenset())
    parts: list[Part] | None = None
    """Of a long body: the parts in which all its quotes are."""

    def quoted(self, begin: int, end: int) -> list[Part]:
        """Parts of `data[begin:end]`, a value, in which its quotes are: all else is the inside of strings."""
        if self.parts is None:
            return [(begin, end)]
        first = bisect_right(self.parts, begin, key=itemgetter(1))
        last = bisect_left(self.parts, end, first, key=itemgetter(0))
        return [(max(start, begin), min(stop, end)) for start, stop in self.parts[first:last]]

    def holds(self, key: bytes, mark: bytes) -> bool:
        """Whether the value of `key` has `mark`, which begins with a quote and is short, somewhere in it."""
        span = self.span(key)
        if span is None:
            return False
        data, reach = self.data, len(mark)
        return any(
            data.find(mark, start, min(stop + reach, span[1])) >= 0 for start, stop in self.quoted(*span)
        )

    def span(self, key: bytes) -> tuple[int, int] | None:
        """Offsets of the value, also of a null; an error if the key is there twice."""
        place = self.members.get(key)
        if place is None:
            return None
        if self.duplicates:
            self._check_once(key)
        return place.span(2)

    def raw(self, key: bytes) -> bytes | None:
        """The value as it came, null included."""
        place = self.members.get(key)  # not by `span`: this is called a dozen times a request
        if place is None:
            return None
        if self.duplicates:
            self._check_once(key)
        begin, end = place.span(2)
        return self.data[begin:end]

    def kind(self, key: bytes) -> Kind | None:
        span = self.span(key)
        return None if span is None else _KINDS.get(self.data[span[0]], Kind.NUMBER)

    def get_str(self, key: bytes) -> str | None:
        """A string that can be encoded: a lone surrogate is an error."""
        raw = self.raw(key)
        if raw is None or raw == b"null":
            return None
        if raw[0] != 34:
            raise self._wrong(key, "a string")
        if b"\\" not in raw and raw.isascii() and (plain := raw[1:-1].decode()).isprintable():
            return plain
        value = _decode(raw, key)
        assert isinstance(value, str)
        if not _encodable(value):
            raise BodyError(f"{_shown(key)} is not valid Unicode", _shown(key))
        return value

    def get_bool(self, key: bytes) -> bool | None:
        """A boolean, or what pydantic (vLLM's reader) takes for one: "true", "off", 1, 0.0 and the like."""
        raw = self.raw(key)
        if raw is None or raw == b"null":
            return None
        if raw == b"true" or raw == b"false":
            return raw == b"true"
        value = _decode(raw, key) if raw[0] not in b"[{" else None
        if isinstance(value, str) and value.lower() in LAX_TRUE | LAX_FALSE:
            return value.lower() in LAX_TRUE
        if isinstance(value, int | float) and value in (0, 1):
            return value == 1
        raise self._wrong(key, "a boolean")

    def get_int(self, key: bytes) -> int | None:
        """An integer, or what pydantic takes for one: 100.0, "100"."""
        raw = self.raw(key)
        if raw is None or raw == b"null":
            return None
        if raw.isdigit() and len(raw) < 20:
            return int(raw)
        value = _decode(raw, key) if raw[0] not in b"[{tf" else None
        if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,4000}\s*", value, re.ASCII):
            return int(value)
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, int):
            return value
        raise self._wrong(key, "an integer")

    def get_object(self, key: bytes) -> Scan | None:
        raw = self.raw(key)
        if raw is None or raw == b"null":
            return None
        if raw[0] != 123:
            raise self._wrong(key, "an object")
        return scan_object(raw)

    def _check_once(self, key: bytes) -> None:
        if key in self.duplicates:
            name = _shown(key)
            raise BodyError(f"{name} is given more than once", name)

    def _wrong(self, key: bytes, wanted: str) -> BodyError:
        return BodyError(f"{_shown(key)} must be {wanted}, not {self.kind(key)}", _shown(key))


def scan_object(data: bytes) -> Scan:
    """The top-level members of `data`, which must be one JSON object and nothing else."""
    if len(data) < LONG:
        return scan_all(data)
    parts = quoted(data, 0, len(data))
    short = shorten(data, parts)
    scan = scan_all(data) if short is None else _scan_short(data, short)
    scan.parts = parts
    return scan


def _scan_short(data: bytes, short: Shortened) -> Scan:
    try:
        found = scan_all(short.data)
    except BodyError:
        return scan_all(data)  # which says where
    places: list[Place] = [_moved(place, short) for place in found.places]
    members = {place[1]: place for place in places}
    return Scan(data, found.open, places, members, found.duplicates)


def scan_all(data: bytes) -> Scan:
    """`scan_object` of every byte."""
    begin = 1 if data.startswith(b'{"') else _open(data)
    if begin < 0:
        return Scan(data, -begin, [], {})
    places: list[Place] = list(islice(_MEMBERS.finditer(data, begin), MAX_MEMBERS + 1))
    if not places:
        raise _malformed(len(data))
    if places[-1].lastindex != 2:
        _go_on(data, places)
    if len(places) > MAX_MEMBERS:
        raise BodyError(f"the request body has more than {MAX_MEMBERS} fields")
    members = {place[1]: place for place in places}
    if len(members) == len(places):
        return Scan(data, begin, places, members)
    counts = Counter(place[1] for place in places)
    return Scan(data, begin, places, members, frozenset(key for key, count in counts.items() if count > 1))


def _moved(place: Place, short: Shortened) -> _Member:
    """A member found in a shortened text, where it is in the whole one."""
    begin, end = place.span(2)
    value = short.offset(begin), short.offset(end - 1) + 1
    stop = short.offset(place.end() - 1) + 1
    return _Member(place[1], short.offset(place.start()), value, stop, place.lastindex or 0)


def items(data: bytes, span: tuple[int, int]) -> list[tuple[int, int]]:
    """Offsets of the elements of the array at `span`, up to the first that is malformed or very deep."""
    found = [match.span(1) for match in _ITEMS.finditer(data, span[0] + 1, span[1]) if match.lastindex]
    if b"\\" in data[span[0] : span[1]]:
        view = mask(data[: span[1]])
        found = [match.span(1) for match in _ITEMS.finditer(view, span[0] + 1) if match.lastindex]
    return found


def end_of_item(data: bytes, span: tuple[int, int], at: int, inside: int) -> int:
    """Where the element that the offset `inside` is in ends, of the array at `span`; `at`: where that or an earlier element
    begins. At most `_LOOK` bytes behind `inside`, also where it cannot be told."""
    end = min(span[1], inside + _LOOK)
    for match in _ITEMS.finditer(mask(data[at:end])):
        if match.lastindex is None:
            break
        if at + match.end(1) >= inside:
            return at + match.end(1)
    return end


def _open(data: bytes) -> int:
    """Offset behind the opening brace; negative if the object is empty."""
    match = _START.match(data)
    if match is None:
        raise BodyError(
            "the request body must be a JSON object" if data.strip() else "the request body is empty"
        )
    if match.lastindex is None:
        return match.end()
    return -(data.index(b"{") + 1)


def _go_on(data: bytes, places: list[Place]) -> None:
    """Finish what `_MEMBERS` could not match in the bytes as they came: masked, then member by member."""
    view = mask(data)
    retry = view is not data
    while places[-1].lastindex != 2 and len(places) <= MAX_MEMBERS:
        if places[-1].lastindex is not None:  # a comma, and then the end
            raise _malformed(len(data))
        at = places.pop().start()
        if not retry:
            places.append(place := _hard_member(data, view, at))
            at = place.end()
        places += islice(_MEMBERS.finditer(view, at), MAX_MEMBERS + 1 - len(places))
        retry = False


def _hard_member(data: bytes, view: bytes, at: int) -> _Member:
    """The member at `at`, by steps: an odd key, or a value that nests deeper than one match crosses."""
    head = _HEAD.match(view, at)
    if head is None:
        raise _malformed(at)
    key = data[head.start(1) : head.end(1)]
    decoded = _decode(b'"' + key + b'"', key)
    assert isinstance(decoded, str)
    begin = head.end()
    simple = _SIMPLE.match(view, begin)
    if simple is None and view[begin : begin + 1] not in (b"[", b"{"):
        raise _malformed(begin)
    end = simple.end() if simple else _skip_container(view, begin)
    tail = _TAIL.match(view, end)
    if tail is None:
        raise _malformed(end)
    return _Member(
        decoded.encode("utf-8", "surrogatepass"), at, (begin, end), tail.end(), 3 if tail.lastindex else 2
    )


def _skip_container(view: bytes, at: int) -> int:
    """Offset behind the container at `at`, however deep: counts brackets, some thousand tokens at a time."""
    depth = 0
    while chunk := _TOKENS.match(view, at):
        steps = _STRINGS.sub(b"", chunk[0]).translate(_STEPS, _NO_BRACKETS)
        closing = steps.count(b"\xff")
        if closing >= depth:
            depths = list(accumulate(array("b", steps), initial=depth))
            if 0 in depths[1:]:
                last = depths.index(0, 1) - 1
                return next(islice(_TO_BRACKET.finditer(view, at), last, None)).end()
        depth += len(steps) - 2 * closing
        at = chunk.end()
    raise _malformed(at)


def _decode(raw: bytes, key: bytes) -> object:
    """One value alone, as json.loads reads it."""
    try:
        value: object = json.loads(raw.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        raise BodyError(f"the value or name of {_shown(key)} is not valid JSON", _shown(key)) from None
    return value


def _encodable(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(key: bytes) -> str:
    """A key for an error message: readable and short."""
    return key[:80].decode("utf-8", "replace")


def _malformed(at: int) -> BodyError:
    return BodyError(f"the request body is not valid JSON (near byte {at})")
