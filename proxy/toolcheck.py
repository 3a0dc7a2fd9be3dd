"""Do finished tool calls fit their schemas? A maintained validator judges; nothing is changed and nobody waits for it.

Rules: imported when the first call is to be judged, since most gateways in most seconds have none. A schema that is
itself broken judges nothing. `$ref` reaches into the tool's own schema only: no document is ever fetched.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from proxy.wire.coerce import Toolset
from proxy.wire.toolcalls import FinishedCall


def violations(tools: Toolset, calls: Iterable[FinishedCall]) -> int:
    """How many complete calls break their tool's schema."""
    return sum(call.complete and not _fits(tools, call) for call in calls)


def _fits(tools: Toolset, call: FinishedCall) -> bool:
    tool = tools.by_name.get(call.name)
    if tool is None or not isinstance(tool.schema, dict):
        return True
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return False
    return _valid(tool.schema, arguments)


def _valid(schema: Any, value: object) -> bool:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    try:
        return bool(Draft202012Validator(schema, registry=Registry()).is_valid(value))
    except (SchemaError, Unresolvable, RecursionError, TypeError, AttributeError, ValueError):
        return True
