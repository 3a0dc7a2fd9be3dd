"""JSON request bodies for property tests: everything the grammar allows, in every spelling, as text."""

from __future__ import annotations

import json

from hypothesis import strategies as st

WHITESPACE = st.sampled_from(["", "", "", " ", "\n", "\t \r\n  "])
FRAGMENTS = st.sampled_from(
    ["a", "model", "é", "你", "😀", "{", "}", "[", "]", ",", ":", " ", "'", "//", "/*", "</think>", "\x7f"]
    + ['\\"', "\\\\", "\\n", "\\/", "\\u0041", "\\u0022", "\\u005c", "\\ud800", "\\ud83d\\ude00", "\\u0000"]
)
STRINGS = st.lists(FRAGMENTS, max_size=8).map(lambda parts: '"' + "".join(parts) + '"')
NUMBERS = st.sampled_from(
    [
        "0",
        "-0",
        "7",
        "-1.5E-3",
        "1e5",
        "12345678901234567890123456789",
        "0.1",
        "1e999",
        "NaN",
        "Infinity",
        "-Infinity",
    ]
)
SCALARS = st.one_of(STRINGS, NUMBERS, st.sampled_from(["true", "false", "null", "{}", "[]", "[ ]", "{\n}"]))
KEYS = st.one_of(
    st.sampled_from(
        [
            '"model"',
            '"mod\\u0065l"',
            '"\\u006dodel"',
            '"stream"',
            '"a"',
            '"b"',
            '"c"',
            '""',
            '"é"',
            '"\\u00e9"',
        ]
    ),
    STRINGS,
)


@st.composite
def arrays(draw: st.DrawFn, values: st.SearchStrategy[str]) -> str:
    parts = [draw(WHITESPACE) + value + draw(WHITESPACE) for value in draw(st.lists(values, max_size=4))]
    return "[" + ",".join(parts) + "]"


@st.composite
def objects(draw: st.DrawFn, values: st.SearchStrategy[str], keys: st.SearchStrategy[str] = KEYS) -> str:
    members = draw(st.lists(st.tuples(keys, values), max_size=6))
    space = WHITESPACE
    parts = [
        draw(space) + key + draw(space) + ":" + draw(space) + value + draw(space) for key, value in members
    ]
    return "{" + (",".join(parts) or draw(space)) + "}"


@st.composite
def deep(draw: st.DrawFn, values: st.SearchStrategy[str]) -> str:
    """A value under so many brackets that no fixed depth will do."""
    text = draw(values)
    for _ in range(draw(st.integers(8, 40))):
        text = draw(st.sampled_from(["[%s]", "[1, %s]", '{"a":%s}', '[{}, %s, "]"]', "[[%s], []]"])) % text
    return text


NESTED = st.recursive(SCALARS, lambda inner: st.one_of(arrays(inner), objects(inner)), max_leaves=12)
VALUES = st.one_of(SCALARS, NESTED, deep(SCALARS))


@st.composite
def bodies(draw: st.DrawFn, keys: st.SearchStrategy[str] = KEYS) -> bytes:
    text = draw(WHITESPACE) + draw(objects(VALUES, keys)) + draw(WHITESPACE)
    return text.encode("utf-8", "surrogatepass")


class Pairs(list[tuple[str, object]]):
    """An object's members in order, repeated keys included."""


def text_of(data: bytes) -> str:
    """What json.loads makes of the bytes if they are UTF-8, a byte order mark taken off."""
    return data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogatepass")


def load(data: bytes) -> object:
    return json.loads(text_of(data))


def load_pairs(data: bytes) -> object:
    """Like `load`, objects as `Pairs`."""
    return json.loads(text_of(data), object_pairs_hook=Pairs)


def same(one: object, other: object) -> bool:
    """Equal, NaN and types included, order of keys apart."""
    return repr(_sorted(one)) == repr(_sorted(other))


def _sorted(value: object) -> object:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value
