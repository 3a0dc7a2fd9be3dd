"""What a tool's JSON Schema says of a value, and how text becomes a JSON value of that type.

Rules: only the request's own schema decides. A `Spec` is read lazily (a schema may refer to itself) and cached;
one `Toolset` is compiled per request. Text in, JSON text out: numbers are never held as floats or as anything
else that could round them. What does not convert stays text and says so; nothing is dropped or invented.
Types are tried in the order null, integer, number, boolean, object, array, string.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from json import dumps
from json.encoder import encode_basestring
from typing import Any
from urllib.parse import unquote

INTEGER = re.compile(r"[+-]?\d+\Z", re.ASCII)
NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?\Z", re.ASCII)
LOOSE_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?\Z", re.ASCII)
SURROGATE = re.compile("[\ud800-\udfff]")
MAX_DIGITS = 4000  # beyond this many readers (Python's among them) refuse the number
MAX_NESTING = 32  # of $ref, anyOf, oneOf, allOf before a schema counts as saying nothing

# Spellings of types that clients send although JSON Schema has no such word.
ALIASES = {
    "int": "integer",
    "long": "integer",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "str": "string",
    "text": "string",
    "dict": "object",
    "map": "object",
    "list": "array",
    "tuple": "array",
    "none": "null",
}
TYPES = frozenset({"null", "integer", "number", "boolean", "object", "array", "string"})
SCALARS = frozenset({"null", "integer", "number", "boolean"})
NAME_PREFIXES = (
    "functions.",
    "function.",
    "function=",
    "tools.",
    "tool.",
    "default_api.",
    "functions:",
    "default_api:",
)


class Spec:
    """What is known of one value: `types` (empty: nothing is known), `enum` values or None, its children."""

    __slots__ = (
        "_children",
        "_flat",
        "_items",
        "_root",
        "enum",
        "keys",
        "nullable_text",
        "scalar",
        "text",
        "types",
    )

    def __init__(self, root: Mapping[str, Any], schemas: Sequence[Any]) -> None:
        self._root = root
        seen: set[int] = set()
        self._flat = [flat for schema in schemas for flat in _flatten(schema, root, seen, 0)]
        self._children: dict[str, Spec] = {}
        self._items: Spec | None = None
        types: set[str] = set()
        for schema in schemas:
            found = _types(schema, root, {}, 0)
            types |= {"string"} if found is None and len(schemas) > 1 else found or set()
        self.types = frozenset(types)
        self.enum = _enum(self._flat)
        self.keys = frozenset(key for schema in self._flat for key in _mapping(schema.get("properties")))
        self.text = self.types <= {"string"}  # raw text, streamed as it comes
        self.nullable_text = self.types == {"string", "null"}
        self.scalar = bool(types) and self.types <= SCALARS

    def accepts(self, kind: str) -> bool:
        """Whether a JSON value of this type needs no conversion."""
        return not self.types or kind in self.types or (kind == "integer" and "number" in self.types)

    def child(self, key: str) -> Spec:
        """The spec of a property; knows nothing when the schema does not name it."""
        found = self._children.get(key)
        if found is None:
            found = self._children[key] = Spec(self._root, list(self._property(key))) if self._flat else ANY
        return found

    def item(self, index: int) -> Spec:
        """The spec of an array's element."""
        if not self._flat:
            return ANY
        if self._items is None:
            self._items = Spec(self._root, list(_items(self._flat)))
        tuples = [s["prefixItems"] for s in self._flat if isinstance(s.get("prefixItems"), list)]
        fixed = [t[index] for t in tuples if index < len(t)]
        return Spec(self._root, fixed) if fixed else self._items

    def _property(self, key: str) -> Iterator[Any]:
        named = [p[key] for s in self._flat if key in (p := _mapping(s.get("properties")))]
        if named:
            yield from named
            return
        for schema in self._flat:
            other = schema.get("additionalProperties")
            if isinstance(other, dict):
                yield other


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _items(flat: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    for schema in flat:
        items = schema.get("items")
        if isinstance(items, dict):
            yield items


def _enum(flat: Iterable[Mapping[str, Any]]) -> list[Any] | None:
    values: list[Any] = []
    for schema in flat:
        if isinstance(schema.get("enum"), list):
            values += schema["enum"]
        if "const" in schema:
            values.append(schema["const"])
    return values or None


def _resolve(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """What a `$ref` points to inside the tool's own schema; nothing for any other place."""
    ref = schema.get("$ref")
    if not isinstance(ref, str) or not ref.startswith("#"):
        return {}
    node: Any = root
    for part in ref[1:].split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and name in node:
            node = node[name]
        elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        else:
            return {}
    return node


def _flatten(schema: Any, root: Mapping[str, Any], seen: set[int], depth: int) -> Iterator[Mapping[str, Any]]:
    """The schema and all it is composed of, references followed. Each part once (seen: by identity), for references
    that branch would make more of a few lines than anybody can read."""
    if not isinstance(schema, dict) or depth > MAX_NESTING or id(schema) in seen:
        return
    seen.add(id(schema))
    yield schema
    if "$ref" in schema:
        yield from _flatten(_resolve(schema, root), root, seen, depth + 1)
    for word in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(word)
        for part in parts if isinstance(parts, list) else ():
            yield from _flatten(part, root, seen, depth + 1)


def _types(
    schema: Any, root: Mapping[str, Any], known: dict[int, set[str] | None], depth: int
) -> set[str] | None:
    """The types a schema allows, None when it does not say. known: of the schemas read so far, by identity; one that
    is still being read says nothing of itself."""
    if not isinstance(schema, dict) or depth > MAX_NESTING:
        return None
    if id(schema) not in known:
        known[id(schema)] = None
        known[id(schema)] = _read_types(schema, root, known, depth)
    return known[id(schema)]


def _read_types(
    schema: Mapping[str, Any], root: Mapping[str, Any], seen: dict[int, set[str] | None], depth: int
) -> set[str] | None:
    limits = [_own_types(schema)]
    if "$ref" in schema:
        limits.append(_types(_resolve(schema, root), root, seen, depth + 1))
    if isinstance(schema.get("allOf"), list):
        limits += [_types(part, root, seen, depth + 1) for part in schema["allOf"]]
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list) and schema[word]:
            parts = [_types(part, root, seen, depth + 1) for part in schema[word]]
            limits.append({kind for part in parts for kind in (part or {"string"})})
    known = [limit for limit in limits if limit is not None]
    if not known:
        return None
    types = set.intersection(*known) or set.union(*known)
    return types | {"null"} if schema.get("nullable") is True else types


def _own_types(schema: Mapping[str, Any]) -> set[str] | None:
    kind = schema.get("type")
    names = [kind] if isinstance(kind, str) else kind if isinstance(kind, list) else []
    words = [name.lower() for name in names if isinstance(name, str)]
    types = {ALIASES.get(word, word) for word in words} & TYPES
    if types:
        return types
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return {kind_of(value) for value in schema["enum"]}
    if "const" in schema:
        return {kind_of(schema["const"])}
    if isinstance(schema.get("properties"), dict):
        return {"object"}
    return {"array"} if "items" in schema or "prefixItems" in schema else None


def kind_of(value: Any) -> str:
    """The JSON Schema type of a decoded value."""
    if value is None:
        return "null"
    for kind, cls in (
        ("boolean", bool),
        ("integer", int),
        ("number", float),
        ("string", str),
        ("array", list),
    ):
        if isinstance(value, cls):
            return kind
    return "object"


ANY = Spec({}, ())


def quote(text: str) -> str:
    """Text as a JSON string; a surrogate without its other half is left out, JSON readers choke on it."""
    if not text.isascii() and SURROGATE.search(text):
        text = join_surrogates(text)
    return encode_basestring(text)


def join_surrogates(text: str) -> str:
    """Halves that belong together become their character, those that do not are left out."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "ignore")


class Joiner:
    """Puts halves of surrogate pairs together over deltas; the same object back where nothing changes."""

    __slots__ = ("half",)

    def __init__(self) -> None:
        self.half = ""

    def join(self, text: str) -> str:
        if not text or not (self.half or (not text.isascii() and SURROGATE.search(text))):
            return text
        text, self.half = self.half + text, ""
        if "\ud800" <= text[-1] <= "\udbff":
            text, self.half = text[:-1], text[-1]
        return join_surrogates(text)


def scalar(spec: Spec, text: str) -> str | None:
    """`text` as the JSON text of a null, number or boolean that `spec` allows; None if it is none of them."""
    word = text.strip()
    lower = word.lower()
    options: list[str] = []
    if "null" in spec.types and lower in ("null", "none"):
        options.append("null")
    if "integer" in spec.types and (whole := _integer(word, "number" not in spec.types)) is not None:
        options.append(whole)
    if "number" in spec.types and (real := _number(word)) is not None:
        options.append(real)
    if "boolean" in spec.types and (flag := _BOOLEANS.get(lower)) is not None:
        options.append(flag)
    if options and spec.enum is not None and text in spec.enum and options[0] not in map(dumps, spec.enum):
        return None  # the enum has this very string and not the value it looks like
    return options[0] if options else None


_BOOLEANS = {"true": "true", "false": "false", "1": "true", "0": "false"}


def _integer(word: str, round_float: bool) -> str | None:
    if INTEGER.match(word):
        digits = word.lstrip("+-").lstrip("0") or "0"
        if len(digits) > MAX_DIGITS:
            return None
        return "-" + digits if word[0] == "-" and digits != "0" else digits
    if round_float and LOOSE_NUMBER.match(word):
        head, dot, tail = word.partition(".")
        if dot and not tail.strip("0"):
            return _integer(head or "0", False)
        value = float(word)
        return str(int(value)) if math.isfinite(value) and value.is_integer() and abs(value) < 2**53 else None
    return None


def _number(word: str) -> str | None:
    whole = _integer(word, False)
    if whole is not None:
        return whole
    if len(word) > MAX_DIGITS or not LOOSE_NUMBER.match(word) or not math.isfinite(float(word)):
        return None
    return word if NUMBER.match(word) else repr(float(word))


class Tool:
    """One declared function: its name and what its parameters are."""

    __slots__ = ("name", "schema", "spec")

    def __init__(self, name: str, parameters: Any) -> None:
        self.name = name
        self.schema: Mapping[str, Any] = _mapping(parameters)
        self.spec = Spec(self.schema, (self.schema,))


class Toolset:
    """The tools of one request, compiled once; `longest` is the length of the longest name."""

    __slots__ = ("by_name", "longest")

    def __init__(self, tools: Any) -> None:
        self.by_name: dict[str, Tool] = {}
        for entry in tools if isinstance(tools, list) else ():
            function = _mapping(entry).get("function", entry)
            name = _mapping(function).get("name")
            if isinstance(name, str) and name:
                schema = function.get("parameters", function.get("input_schema"))
                self.by_name[name] = Tool(name, schema)
        self.longest = max(map(len, self.by_name), default=0)

    def find(self, written: str) -> Tool | None:
        """The declared tool a model's spelling means: blanks, quotes, brackets and known prefixes do not count."""
        name = written.strip().strip("\"'`<>").strip()
        tool = self.by_name.get(name)
        if tool is None:
            for prefix in NAME_PREFIXES:
                if name.startswith(prefix):
                    return self.by_name.get(name[len(prefix) :])
        return tool

    def may_become(self, written: str) -> bool:
        """Whether more text could still make a declared name of this."""
        name = written.strip().strip("\"'`").rstrip("/ \t")
        if any(known.startswith(name) for known in self.by_name):
            return True
        bare = next((name[len(p) :] for p in NAME_PREFIXES if name.startswith(p)), None)
        if bare is not None:
            return any(known.startswith(bare) for known in self.by_name)
        return any(prefix.startswith(name) for prefix in NAME_PREFIXES)
