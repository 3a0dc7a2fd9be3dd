"""A configuration as TOML, for people: valid, and in the order of the sections."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping


def toml_lines(table: Mapping[str, object], path: str = "", header: str = "") -> Iterator[str]:
    """A table as TOML. What has no value is a comment, since TOML has no null."""
    plain = {key: value for key, value in table.items() if not _is_table(value) and not _is_tables(value)}
    counts = header.startswith("[[")  # an empty table says nothing, but in an array it is one of them
    if header and (plain or counts):
        yield header
    for key, value in plain.items():
        yield f"# {_key(key)} is not set" if value is None else f"{_key(key)} = {_inline(value)}"
    if plain or counts:
        yield ""
    for key, value in table.items():
        inner = f"{path}.{_key(key)}" if path else _key(key)
        if isinstance(value, Mapping):
            yield from toml_lines(value, inner, f"[{inner}]")
        elif isinstance(value, list) and _is_tables(value):
            for item in value:
                yield from toml_lines(item, inner, f"[[{inner}]]")


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping)


def _is_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _key(key: str) -> str:
    return key if key.replace("-", "").replace("_", "").isalnum() and key.isascii() else _inline(key)


def _inline(value: object) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_inline(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_inline(item)}" for key, item in value.items()) + " }"
    if isinstance(value, float):
        return repr(value)  # TOML writes inf and nan as Python does, JSON does not
    # TOML's basic strings, whole numbers and booleans are JSON's, but for DEL, which JSON leaves bare.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
