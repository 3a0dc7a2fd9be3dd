"""How a problem in the configuration is worded: `key.path[0].x: what was expected, got VALUE`.

Rules
1. Reads pydantic's error data and the shape of the models; imports neither.
2. No value is printed that could be a secret: nothing of a key, no table or array, no unknown key's.
3. Each message says what to write instead.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Union, get_args, get_origin, get_type_hints

from policies.params import AdmissionParams

ELSEWHERE: Mapping[type, frozenset[str]] = {AdmissionParams: frozenset({"weights"})}
"""Parameters that are no keys of their own table: weights are the clients' (`server.keys[].weight`)."""

HIDDEN = frozenset({"key", "keys", "sha256"})
LONGEST_VALUE = 60

# pydantic's error types, worded for someone who edits TOML.
EXPECTATIONS: Mapping[str, str] = {
    "bool_type": "expected true or false",
    "int_type": "expected a whole number",
    "float_type": "expected a number",
    "finite_number": "expected a finite number",
    "string_type": "expected a string",
    "tuple_type": "expected an array",
    "dict_type": "expected a table",
    "model_type": "expected a table",
    "model_attributes_type": "expected a table",
}


def syntax(source: str, message: str) -> str:
    """A TOML syntax error, with its place first."""
    at = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|(end of document))\)", message, re.DOTALL)
    if at is None:
        return f"{source}: not valid TOML: {message}"
    place = at[4] or f"line {at[2]}, column {at[3]}"
    return f"{source}: {place}: not valid TOML: {at[1]}"


def line(error: Mapping[str, object], root: type) -> str:
    """One of pydantic's error dicts as `path: problem`."""
    where = error["loc"]
    assert isinstance(where, tuple)
    parts = tuple(part for part in where if part != "[key]")
    return f"{key_path(parts)}: {_problem(error, parts, root)}"


def key_path(parts: tuple[str | int, ...]) -> str:
    """`backends[0].url`; a key that TOML wants quoted is quoted."""
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            bare = re.fullmatch(r"[A-Za-z0-9_-]+", part)
            path += ("." if path else "") + (part if bare else json.dumps(part, ensure_ascii=False))
    return path


def _problem(error: Mapping[str, object], parts: tuple[str | int, ...], root: type) -> str:
    kind = str(error["type"])
    if kind == "extra_forbidden":
        return "unknown key" + _suggestion(parts, root)
    if kind == "missing":
        return "required, but missing"
    if kind == "rule":
        return str(error["msg"])
    if kind == "value_error":
        return str(error["msg"]).removeprefix("Value error, ")
    if kind == "literal_error":
        context = error.get("ctx")
        choices = str(context["expected"]) if isinstance(context, dict) else ""
        expectation = "expected " + choices.replace("'", '"')
    else:
        expectation = EXPECTATIONS.get(kind) or str(error["msg"])
    name = next((part for part in reversed(parts) if isinstance(part, str)), "")
    return (
        f"{expectation}, got {'a value that is not shown here' if name in HIDDEN else _shown(error['input'])}"
    )


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, (list, tuple)):
        return "an array"
    try:
        text = json.dumps(value, ensure_ascii=False)
    except TypeError:  # TOML dates and times
        text = str(value)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


def _suggestion(parts: tuple[str | int, ...], root: type) -> str:
    """The very key in another table, else the nearest one in this table, else what this table knows."""
    wrong = str(parts[-1])
    siblings = list(_fields(_descend(root, parts[:-1])))
    likely = [path for path in key_names(root) if path.rpartition(".")[2] == wrong]
    likely = likely or difflib.get_close_matches(wrong, siblings, n=1, cutoff=0.6)
    if len(likely) == 1:
        return f', did you mean "{likely[0]}"?'
    return ", known here: " + ", ".join(siblings)


def key_names(model: type, prefix: str = "") -> Iterator[str]:
    """Every key there is: `server.host`, `backends[].url`, `models.NAME.tier`."""
    for name, annotation in _fields(model).items():
        path = f"{prefix}{name}"
        inner, step = _element(annotation)
        yield path
        if _fields(inner):
            yield from key_names(inner, f"{path}{step}.")


def _descend(model: object, parts: tuple[str | int, ...]) -> object:
    """The type of the table at a path. Indexes and free names take no field of their own."""
    for part in parts:
        fields = _fields(model)
        if part in fields:
            model = _element(fields[str(part)])[0]
    return model


def _fields(model: object) -> Mapping[str, object]:
    """Names and types of a table's keys; empty for what is no table of fixed keys."""
    declared = getattr(model, "model_fields", None)
    if isinstance(declared, dict):
        return {name: field.annotation for name, field in declared.items()}
    if isinstance(model, type) and dataclasses.is_dataclass(model) and not hasattr(model, "reveal"):
        hints = get_type_hints(model)
        elsewhere = ELSEWHERE.get(model, ())
        names = [field.name for field in dataclasses.fields(model) if field.name not in elsewhere]
        return {name: hints[name] for name in names}
    return {}


def _element(annotation: object) -> tuple[type, str]:
    """What an annotation holds (`X` of `X | None`, `tuple[X, ...]`, `dict[str, X]`), and the step into it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _element(arguments[0])
    if origin in (Union, UnionType):
        return _element(arguments[0])
    if origin is tuple:
        return _element(arguments[0])[0], "[]"
    if origin is dict:
        return _element(arguments[1])[0], ".NAME"
    return (annotation if isinstance(annotation, type) else object), ""
