"""Judges a PromQL query: whether what it asks for can ever be there. For the tests of rules and dashboards.

Rules: read by a real parser, not by regular expressions. Each step says which labels its result has, so that a label which
an inner aggregation dropped is missed by the outer one, as it is in Prometheus. Names and values are checked, not numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import promql_parser as pq

COUNTERS = {"rate", "irate", "increase", "resets"}
GAUGES = {"deriv", "delta", "predict_linear"}
SCRAPED = frozenset({"job", "instance"})
"""Labels that Prometheus gives whatever it scrapes."""


class Wrong(AssertionError):
    """What a query asks for does not exist."""


@dataclass(frozen=True)
class Known:
    """A metric: counter, gauge or histogram; its labels; the values of those that are an enum; whether it is scraped or
    made by a rule."""

    kind: str
    labels: frozenset[str]
    values: Mapping[str, frozenset[str]] = field(default_factory=dict)
    scraped: bool = True


Catalogue = Mapping[str, Known]


def names(query: str) -> set[str]:
    """The metrics that it asks for."""
    found: set[str] = set()
    pq.walk(pq.parse(query), lambda node: _note(node, found), None)
    return found


def _note(node: Any, found: set[str]) -> None:
    if isinstance(node, pq.VectorSelector | pq.MatrixSelector):
        found.add(_vector(node).name)


def labels(query: str, catalogue: Catalogue) -> frozenset[str] | None:
    """The labels of its result, None for a number. Raises `Wrong`."""
    return _labels(pq.parse(query), catalogue)


def _vector(node: Any) -> Any:
    return node.vector_selector if isinstance(node, pq.MatrixSelector) else node


def _find(name: str, catalogue: Catalogue) -> tuple[Known, str]:
    """And the part of a histogram."""
    if name in catalogue and catalogue[name].kind != "histogram":
        return catalogue[name], ""
    base, _, part = name.rpartition("_")
    if base in catalogue and catalogue[base].kind == "histogram" and part in ("bucket", "sum", "count"):
        return catalogue[base], part
    raise Wrong(f"there is no {name}")


def _selected(node: Any, catalogue: Catalogue, function: str) -> frozenset[str]:
    vector = _vector(node)
    known, part = _find(vector.name, catalogue)
    counts = known.kind in ("counter", "histogram")
    if function in COUNTERS and not counts:
        raise Wrong(f"{function} of {vector.name}, a {known.kind}")
    if function in GAUGES and counts:
        raise Wrong(f"{function} of {vector.name}, a {known.kind}")
    has = known.labels | (SCRAPED if known.scraped else set()) | ({"le"} if part == "bucket" else set())
    for matcher in vector.matchers.matchers:
        if matcher.name not in has:
            raise Wrong(f"{vector.name} has no label {matcher.name}")
        values = known.values.get(matcher.name)
        asked = (
            matcher.value.split("|") if matcher.op in (pq.MatchOp.Re, pq.MatchOp.NotRe) else [matcher.value]
        )
        for value in asked if values is not None else []:
            if not any(re.fullmatch(value, one) for one in values or ()):
                raise Wrong(f'{vector.name}: {matcher.name} is never "{value}"')
    return frozenset(has)


def _labels(node: Any, catalogue: Catalogue, function: str = "") -> frozenset[str] | None:
    match node:
        case pq.NumberLiteral() | pq.StringLiteral():
            return None
        case pq.ParenExpr() | pq.UnaryExpr() | pq.SubqueryExpr():
            return _labels(node.expr, catalogue, function)
        case pq.VectorSelector() | pq.MatrixSelector():
            return _selected(node, catalogue, function)
        case pq.Call():
            return _called(node, catalogue)
        case pq.AggregateExpr():
            return _aggregated(node, catalogue)
        case pq.BinaryExpr():
            return _joined(node, catalogue)
    raise Wrong(f"not understood: {node.prettify()}")


def _called(node: Any, catalogue: Catalogue) -> frozenset[str] | None:
    name = node.func.name
    of = [_labels(argument, catalogue, name) for argument in node.args]
    vectors = [has for has in of if has is not None]
    if not vectors or name == "vector":
        return frozenset() if name == "vector" else None
    if name == "histogram_quantile":
        if "le" not in vectors[0]:
            raise Wrong(f"no le is left: {node.prettify()}")
        return vectors[0] - {"le"}
    return vectors[0]


def _aggregated(node: Any, catalogue: Catalogue) -> frozenset[str]:
    has = _labels(node.expr, catalogue) or frozenset()
    if node.modifier is None:
        return frozenset()
    asked = frozenset(node.modifier.labels)
    if asked - has:
        raise Wrong(f"no label {sorted(asked - has)}: {node.prettify()}")
    return asked if node.modifier.type == pq.AggModifierType.By else has - asked


def _joined(node: Any, catalogue: Catalogue) -> frozenset[str] | None:
    left, right = _labels(node.lhs, catalogue), _labels(node.rhs, catalogue)
    if left is None or right is None:
        return right if left is None else left
    modifier = node.modifier
    matching = modifier.matching if modifier is not None else None
    if matching is None:
        if left != right:
            raise Wrong(f"{sorted(left)} never meets {sorted(right)}: {node.prettify()}")
        return left
    asked = frozenset(matching.labels)
    if asked - left or asked - right:
        raise Wrong(f"no label {sorted(asked)} on both sides: {node.prettify()}")
    return left
