"""Possessive groups match alike on every Python: as they are where that is sound, as atomic groups where it is not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.wire import body, patterns
from proxy.wire.patterns import SOUND, atomic

ROOT = Path(__file__).parents[2]
GROUP_POSSESSIVE = re.compile(r"\)(?:[*+?]|\{[0-9,]+\})\+")

JSON = st.recursive(
    st.sampled_from(["1", "-2.5e3", "true", "null", '"a"', r'"\"b\\"', '"[{"', r'"\u00e9"']),
    lambda inner: (
        st.lists(inner, max_size=4).map(lambda items: "[" + ", ".join(items) + "]")
        | st.lists(inner, max_size=3).map(lambda items: "{" + ",".join(f'"k":{item}' for item in items) + "}")
    ),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("possessive", "expected"),
    [
        (r"(?:ab*+)*+c", r"(?>(?:ab*+)*)c"),
        (r"[)(]*+(x)?+", r"[)(]*+(?>(x)?)"),
        (r"[]\])]++(?:[^])]|\)){1,4}+", r"[]\])]++(?>(?:[^])]|\)){1,4})"),
        (r"((a)++b)*+", r"(?>((?>(a)+)b)*)"),
        (r"\(a*+(?=b)c", r"\(a*+(?=b)c"),
    ],
)
def test_only_possessive_groups_become_atomic(possessive: str, expected: str) -> None:
    assert atomic(possessive) == expected


@pytest.mark.skipif(
    not SOUND, reason="this Python matches possessive groups wrongly, which is what is avoided"
)
@given(JSON, st.integers(0, 3), st.sampled_from(["", "]", '"', "}", ",", "\\"]))
def test_both_forms_match_the_same(text: str, cut: int, more: str) -> None:
    data = (text[: len(text) - cut] + more).encode()
    for name, pattern in vars(body).items():
        if isinstance(pattern, re.Pattern):
            other = patterns.compile(pattern.pattern, pattern.flags & ~re.UNICODE, sound=False)
            found = [match and match.regs for match in (pattern.match(data), other.match(data))]
            assert found[0] == found[1], name


def test_a_body_is_read_with_atomic_groups_as_well() -> None:
    members = patterns.compile(body._MEMBERS.pattern, sound=False)
    match = members.match(b'"messages":[{"role":"user","content":"\\"hi\\""}],')
    assert match is not None
    assert match.span(2) == (11, 47)
    assert match.lastindex == 3


def test_no_possessive_group_is_compiled_by_re_itself() -> None:
    """It would work here and fail on Debian 12."""
    for path in (*ROOT.glob("proxy/**/*.py"), *ROOT.glob("policies/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re."):
                for part in ast.walk(node):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str | bytes):
                        text = part.value if isinstance(part.value, str) else part.value.decode("latin-1")
                        assert not GROUP_POSSESSIVE.search(text), f"{path}:{node.lineno}"
