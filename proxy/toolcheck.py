"""Do finished tool calls fit their schemas? A maintained validator judges; nothing is changed and nobody waits for it.

Rules: the validator is loaded beside the first requests (`warm`): a quarter of a second on the loop would stop every
stream. A schema that is
itself broken judges nothing. `$ref` reaches into the tool's own schema only: no document is ever fetched.
Whoever writes the schema must not stop the gateway with it: steps are counted, and what would take too many, or has
regular expressions, ids or dialects of its own, is not judged (a `pattern` alone is passed over).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

from proxy.wire.coerce import Toolset
from proxy.wire.toolcalls import FinishedCall

MAX_STEPS = 10_000
"""Keywords and members looked at for one call: some ten milliseconds."""

MAX_NODES = 20_000
"""Objects and lists in a schema that is judged at all."""

_Keyword = Callable[[Any, Any, Any, Any], Any]
_UNJUDGED = ("patternProperties", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef")


class _Unjudged(Exception):
    """Judging this would take too long, or cannot be bounded."""


def violations(tools: Toolset, calls: Iterable[FinishedCall]) -> int:
    """How many complete calls break their tool's schema."""
    return sum(call.complete and not _fits(tools, call) for call in calls)


def warm() -> None:
    """Load the validator; for a thread."""
    _judge()


def _fits(tools: Toolset, call: FinishedCall) -> bool:
    tool = tools.by_name.get(call.name)
    if tool is None or not isinstance(tool.schema, dict):
        return True
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return False
    try:
        return _plain(tool.schema) and _judge().fits(tool.schema, arguments, len(call.arguments))
    except Exception:  # of the validator, for a schema that is none: the kinds are without number
        return True


def _plain(schema: dict[str, Any]) -> bool:
    """Raises _Unjudged for a schema that is too large or changes the rules on its way down."""
    waiting: list[Any] = [schema]
    for count, node in enumerate(waiting):
        if count > MAX_NODES:
            raise _Unjudged
        if isinstance(node, dict):
            if node is not schema and any(isinstance(node.get(key), str) for key in ("$schema", "$id")):
                raise _Unjudged
            waiting += [value for value in node.values() if isinstance(value, dict | list)]
        else:
            waiting += [value for value in node if isinstance(value, dict | list)]
    return True


class _Judge:
    """The validator with every keyword counted."""

    def __init__(self) -> None:
        from jsonschema import Draft202012Validator
        from jsonschema.validators import extend
        from referencing import Registry

        counted = {
            name: self._counted(name, keyword) for name, keyword in Draft202012Validator.VALIDATORS.items()
        }
        self._validator = extend(Draft202012Validator, counted)
        self._registry: Any = Registry()
        self._left = self._error_steps = 0

    def fits(self, schema: dict[str, Any], value: object, size: int) -> bool:
        """size: of the value as text, which every error quotes."""
        self._left, self._error_steps = MAX_STEPS, 10 + size // 100
        return bool(self._validator(schema, registry=self._registry).is_valid(value))

    def _counted(self, name: str, keyword: _Keyword) -> _Keyword:
        if name == "pattern":
            return lambda validator, value, instance, schema: ()
        if name in _UNJUDGED:
            return _refuse

        def judge(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
            size = len(instance) if isinstance(instance, dict | list) else 0
            members = len(value) if isinstance(value, dict | list) else 0
            self._left -= 1 + size + members + (size * size if name == "uniqueItems" else 0)
            local = name != "$ref" or value == "#" or (isinstance(value, str) and value.startswith("#/"))
            # additionalProperties matches its neighbour's expressions
            if (
                self._left < 0
                or not local
                or (name == "additionalProperties" and "patternProperties" in schema)
            ):
                raise _Unjudged
            for error in keyword(validator, value, instance, schema) or ():
                self._left -= self._error_steps
                yield error

        return judge


def _refuse(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
    raise _Unjudged


@cache
def _judge() -> _Judge:
    return _Judge()
