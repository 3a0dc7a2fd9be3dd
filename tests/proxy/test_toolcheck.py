"""Judging calls by their schemas: right where it can be judged, and never a burden, whatever the schema is."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from proxy.toolcheck import violations
from proxy.wire.coerce import Toolset
from proxy.wire.toolcalls import FinishedCall


def broken(schema: object, arguments: str) -> int:
    tools = Toolset([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    return violations(tools, [FinishedCall(0, "c", "f", [arguments], True)])


def branching(word: str, ways: int, depth: int = 40) -> dict[str, Any]:
    """A schema that refers to the next one several times, and so on: a few lines that mean ways ** depth."""
    steps = {f"s{n}": {word: [{"$ref": f"#/$defs/s{n + 1}"}] * ways} for n in range(depth)}
    return {"$defs": {**steps, f"s{depth}": {"type": "string"}}, "properties": {"x": {"$ref": "#/$defs/s0"}}}


@pytest.mark.parametrize(
    ("schema", "arguments", "wrong"),
    [
        ({"properties": {"x": {"type": "integer"}}}, '{"x": 1}', False),
        ({"properties": {"x": {"type": "integer"}}}, '{"x": "1"}', True),
        ({"required": ["x"]}, "{}", True),
        ({"$defs": {"n": {"enum": [1, 2]}}, "properties": {"x": {"$ref": "#/$defs/n"}}}, '{"x": 3}', True),
        ({"properties": {"x": {}}, "additionalProperties": False}, '{"y": 3}', True),
        (
            {"properties": {"x": {"items": {"$ref": "#/properties/x"}, "type": "array"}}},
            '{"x": [[[]]]}',
            False,
        ),
        ({"properties": {"x": {"items": {"$ref": "#/properties/x"}, "type": "array"}}}, '{"x": [[1]]}', True),
        ({"properties": {"x": {"type": "string", "pattern": "^a$", "maxLength": 2}}}, '{"x": "abc"}', True),
        ({"type": "object"}, "[1", True),
    ],
)
def test_a_call_that_does_not_fit_is_counted(schema: object, arguments: str, wrong: bool) -> None:
    assert broken(schema, arguments) == wrong


LONG = json.dumps({"x": "a" * 40 + "!", "n": 5, "l": [[n] for n in range(3000)], "a" * 40 + "!": 1})


@pytest.mark.parametrize(
    "schema",
    [
        branching("allOf", 3),
        branching("anyOf", 2),
        branching("oneOf", 5),
        {"anyOf": [{"$ref": "#"}] * 20},
        {"allOf": [{"$ref": "#"}] * 20},
        {"$ref": "#"},
        {"properties": {"x": {"pattern": "^(a+)+$"}}},
        {"patternProperties": {"^(a+)+$": {}}},
        {"additionalProperties": False, "patternProperties": {"^(a+)+$": {}}},
        {"unevaluatedProperties": False, "patternProperties": {"^(a+)+$": {}}},
        {"propertyNames": {"pattern": "^(a+)+$"}},
        {
            "properties": {
                "x": {"$schema": "http://json-schema.org/draft-07/schema#", "pattern": "^(a+)+$"},
            }
        },
        {"properties": {"l": {"uniqueItems": True}}},
        {"properties": {"l": {"items": {"enum": list(range(100_000))}}}},
        {"properties": {f"p{n}": {"type": "string"} for n in range(50_000)}},
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)
def test_no_schema_takes_long(schema: object) -> None:
    broken({"type": "object"}, "{}")  # the validator is imported with the first
    start = time.process_time()
    broken(schema, LONG)
    assert time.process_time() - start < 1.5


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"x": {"pattern": "(["}}},
        {"properties": {"n": {"multipleOf": 0}}},
        {"properties": {"n": {"multipleOf": 1e-300}}},
        {"properties": {"n": {"minimum": "a"}}},
        {"$ref": 5},
        {"$ref": "#nowhere"},
        {"$ref": "http://elsewhere/schema"},
        {"$ref": "#/%ZZ/~2"},
        {"$dynamicRef": "#x"},
        {"$id": 5},
        {"$id": "http://["},
        {"$schema": []},
        {"type": 5},
        {"type": {"a": 1}},
        {"type": [[]]},
        {"required": 5},
        {"properties": 5},
        {"properties": {"x": 5}},
        {"enum": 5},
        {"items": 5},
        {"dependentSchemas": 5},
        True,
        [1],
        "text",
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize(
    "arguments", ['{"x": "a", "n": 5}', '{"n": 1e400, "x": NaN}', '{"n": 1' + "0" * 4000 + "}"]
)
def test_a_broken_schema_judges_nothing_or_something_but_never_fails(schema: object, arguments: str) -> None:
    assert broken(schema, arguments) in (0, 1)
