"""The kinds of values a configuration holds, each with the words for what was expected.

Rules
1. Strict: a string is never a number, a number never a string; units are in the message.
2. A value that may be a secret, or may hold one, is never repeated: its message is a whole rule (`broken`).
3. What is read from the environment or a file is read here, once, while loading.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import ssl
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_type_hints
from urllib.parse import urlsplit

from pydantic import (
    BeforeValidator,
    ConfigDict,
    GetPydanticSchema,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
    create_model,
)
from pydantic_core import PydanticCustomError, core_schema

from policies.classic import RANKINGS, own_policy
from policies.ranking import Ranking
from proxy.config.problems import ELSEWHERE
from proxy.wire.forwarded import networks

STRICT = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def expected(what: str) -> PydanticCustomError:
    """A value of the wrong kind: `config_problems` adds what it got."""
    return PydanticCustomError("expected", "expected " + what)


def broken(rule: str) -> PydanticCustomError:
    """A value that breaks a rule; worded whole, because the value may hold what must not be printed."""
    return PydanticCustomError("rule", rule)


class _Checked:
    """A check before the type's own, and how a JSON schema says the same (the admin API's document is made of these)."""

    def __init__(self, check: Callable[[object], object], **schema: object) -> None:
        self._check, self._schema = check, schema

    def __get_pydantic_core_schema__(
        self, source: object, handler: Callable[[object], core_schema.CoreSchema]
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, core: core_schema.CoreSchema, handler: Callable[[core_schema.CoreSchema], dict[str, Any]]
    ) -> dict[str, Any]:
        return {**handler(core), **self._schema}


def _quantity(kind: type, what: str, least: float, *, above: bool = False, most: float = 2**53) -> _Checked:
    def check(value: object) -> object:
        number = isinstance(value, (int, kind)) and not isinstance(value, bool)
        fits = number and (cast(float, value) > least if above else cast(float, value) >= least)
        if not fits or cast(float, value) > most:
            raise expected(what)
        return value

    return _Checked(check, maximum=most, **{"exclusiveMinimum" if above else "minimum": least})


Seconds = Annotated[float, _quantity(float, "a number of seconds above 0", 0, above=True)]
SecondsOrOff = Annotated[float, _quantity(float, "a number of seconds, or 0 for never", 0)]
Bytes = Annotated[int, _quantity(int, "a whole number of bytes, at least 1", 1)]
Tokens = Annotated[int, _quantity(int, "a whole number of tokens, at least 1", 1)]
Count = Annotated[int, _quantity(int, "a whole number, at least 1", 1)]
Days = Annotated[float, _quantity(float, "a number of days, or 0 for no end", 0)]
Megabytes = Annotated[float, _quantity(float, "a number of megabytes, or 0 for no end", 0)]
CountOrNone = Annotated[int, _quantity(int, "a whole number, at least 0", 0)]
Bits = Annotated[float, _quantity(float, "a number of bits per position, at least 0", 0)]
Factor = Annotated[float, _quantity(float, "a number, at least 0", 0)]
Share = Annotated[float, _quantity(float, "a share, 0 to 1", 0, most=1)]
AtLeastOne = Annotated[float, _quantity(float, "a number, at least 1", 1)]
Weight = Annotated[float, _quantity(float, "a number above 0", 0, above=True)]
Money = Annotated[float, _quantity(float, "an amount of money above 0", 0, above=True, most=1e9)]
Whole = Annotated[int, _quantity(int, "a whole number, -9 to 9", -9, most=9)]
Port = Annotated[int, _quantity(int, "a port, 0 to 65535 (0: any free one)", 0, most=65535)]

T = TypeVar("T")


def _to_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


Array = Annotated[tuple[T, ...], BeforeValidator(_to_tuple)]


def _matches(pattern: str, what: str) -> _Checked:
    def check(value: object) -> object:
        if not isinstance(value, str) or re.fullmatch(pattern, value) is None:
            raise expected(what)
        return value

    return _Checked(check, pattern=f"^(?:{pattern})$")


NAME = r"[A-Za-z0-9][\w.:/@+-]{0,127}"
Name = Annotated[str, _matches(NAME, "a name of letters, digits and . _ - : / @ +, at most 128")]
HostName = Annotated[
    str,
    _matches(r"[^\s\x00-\x20\x7f-\xa0/\[\]]+", 'a host name or an address without brackets, such as "::"'),
]
HeaderName = Annotated[str, _matches(r"[a-z0-9!#$%&'*+.^_`|~-]{1,64}", "a header's name in small letters")]
AbsolutePath = Annotated[str, _matches(r"/[!-~]*", 'a path that starts with "/"')]
Origin = Annotated[
    str, _matches(r"\*|https?://[^\s/?#@]+", 'an origin such as "https://app.example.org" (no path), or "*"')
]
Digest12 = Annotated[str, _matches(r"[0-9a-f]{12}", "the digest of a policy: 12 hex digits")]
Digest = Annotated[
    str, _matches(r"[0-9a-f]{64}", "64 lower-case hex digits, as printed by `tierline keys hash`")
]


def _base_url(value: object) -> object:
    if not isinstance(value, str) or not re.fullmatch(r"https?://[!-~]+", value):
        raise broken(
            'expected "http://HOST:PORT" or "https://HOST:PORT", with a path where the backend has one'
        )
    try:
        parts = urlsplit(value)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise broken("the host or port of this URL cannot be read") from None
    if "@" in parts.netloc:
        raise broken('credentials do not belong into a URL: use key = "env:NAME"')
    if "?" in value or "#" in value:
        raise broken("a base URL has no query and no fragment")
    if not host:
        raise broken("this URL has no host")
    path = parts.path.rstrip("/")
    if path.endswith("/v1"):
        raise broken('leave out the "/v1" at the end: the endpoint\'s own path is added')
    return f"{parts.scheme}://{parts.netloc}{path}"


BaseUrl = Annotated[str, _Checked(_base_url, pattern="^https?://[!-~]+$")]


def context_of(info: ValidationInfo) -> tuple[Mapping[str, str], Path]:
    context: Mapping[str, Any] = info.context or {}
    return context.get("env", {}), context.get("folder", Path())


def _certificates(value: object, info: ValidationInfo) -> object:
    if not isinstance(value, str):
        raise expected("the path of a file")
    path = context_of(info)[1] / value
    try:
        ssl.create_default_context(cafile=path)
    except ssl.SSLError:
        raise broken(f"{path} holds no PEM certificates") from None
    except OSError as error:
        raise broken(f"{path} cannot be read: {error.strerror}") from None
    return str(path)


CertificateFile = Annotated[str, BeforeValidator(_certificates)]


def _readable(value: object, info: ValidationInfo) -> object:
    if not isinstance(value, str) or not value:
        raise expected("the path of a file")
    path = context_of(info)[1] / value
    try:
        path.open("rb").close()
    except OSError as error:
        raise broken(f"{path} cannot be read: {error.strerror}") from None
    return str(path)


ReadableFile = Annotated[str, BeforeValidator(_readable)]


def _network(value: object) -> object:
    what = 'an address or a network, such as "10.0.0.0/8"'
    if not isinstance(value, str):
        raise expected(what)
    try:
        networks([value])
    except ValueError as error:
        raise broken(f"expected {what} ({error})") from None
    return value


Network = Annotated[str, BeforeValidator(_network)]


def _records(value: object, info: ValidationInfo) -> object:
    if value in ("stdout", "off"):
        return value
    if not isinstance(value, str) or not value.startswith("file:") or value == "file:":
        raise expected('"stdout", "off" or "file:PATH"')
    return f"file:{context_of(info)[1] / value.removeprefix('file:')}"


Records = Annotated[str, BeforeValidator(_records)]


def moment(text: str) -> float:
    """Seconds since the epoch; a date is its midnight, and what has no zone is UTC. Raises ValueError."""
    at = datetime.fromisoformat(text)
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


_MOMENT = r"[0-9]{4}-[0-9]{2}-[0-9]{2}(?:T[0-9]{2}:[0-9]{2}:[0-9]{2}Z)?"


def _moment(value: object) -> object:
    """A date or time of TOML's own, or one in quotes."""
    text = value.isoformat() if isinstance(value, date) else value
    if not isinstance(text, str):
        raise expected("a date such as 2027-01-31, or a time such as 2027-01-31T18:00:00Z")
    try:
        moment(text)
    except (ValueError, OverflowError):
        if re.fullmatch(_MOMENT, text):
            raise broken("there is no such day or time") from None
        raise expected("a date such as 2027-01-31, or a time such as 2027-01-31T18:00:00Z") from None
    return text


Moment = Annotated[str, _Checked(_moment, pattern=f"^{_MOMENT}$", examples=["2027-01-31"])]


def _store_file(value: object, info: ValidationInfo) -> object:
    """Where it is, not whether it is there: it is made when it is first used."""
    if not isinstance(value, str) or not value:
        raise expected("the path of a file")
    return str(context_of(info)[1] / value)


StoreFile = Annotated[str, BeforeValidator(_store_file)]


def _record_store(value: object, info: ValidationInfo) -> object:
    return value if value in ("auto", "off") else _store_file(value, info)


RecordStore = Annotated[str, BeforeValidator(_record_store)]


def _policy_name(value: object) -> object:
    if not isinstance(value, str) or value not in RANKINGS:
        raise expected(f"the name of a policy ({', '.join(RANKINGS)})")
    return value


PolicyName = Annotated[str, _Checked(_policy_name, enum=[*RANKINGS])]


class PolicySource:
    """A policy of the operator's own: a Python file, run once, while loading. It defines `score(facts, backend)`, and may
    define `unit`. text: what was run; two versions of it are two policies."""

    __slots__ = ("name", "path", "ranking", "text")

    def __init__(self, path: str, name: str, text: str, ranking: Ranking) -> None:
        self.path, self.name, self.text, self.ranking = path, name, text, ranking

    def __repr__(self) -> str:
        return self.path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PolicySource) and (other.path, other.text) == (self.path, self.text)

    def __hash__(self) -> int:
        return hash((self.path, self.text))


def _policy_source(value: object, info: ValidationInfo) -> object:
    if isinstance(value, PolicySource):
        return value
    if not isinstance(value, str) or not value.endswith(".py"):
        raise expected('the path of a Python file, such as "my_policy.py"')
    path = context_of(info)[1] / value
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise broken(f"{path} cannot be read: {why}") from None
    names: dict[str, object] = {"__name__": path.stem, "__file__": str(path)}
    try:
        exec(compile(text, str(path), "exec"), names)
        ranking = own_policy(path.stem, names.get("score"), names.get("unit", "score"))
    except Exception as error:
        raise broken(f"{path} is no policy: {error}") from None
    return PolicySource(str(path), path.stem, text, ranking)


SourceFile = Annotated[PolicySource, PlainValidator(_policy_source), WithJsonSchema({"type": "string"})]


class Secret:
    """A value that is used and never shown. `reference` says where it came from; it is no secret."""

    __slots__ = ("_value", "reference")

    def __init__(self, value: str, reference: str) -> None:
        self._value = value
        self.reference = reference

    def reveal(self) -> str:
        return self._value

    @property
    def digest(self) -> str:
        """sha256, hex."""
        return hashlib.sha256(self._value.encode()).hexdigest()

    def __repr__(self) -> str:
        return "***"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)


def _read_secret(value: object, info: ValidationInfo) -> Secret:
    if isinstance(value, Secret):
        return value
    env, folder = context_of(info)
    source, _, rest = value.partition(":") if isinstance(value, str) else ("", "", "")
    if source not in ("env", "file") or not rest:
        raise broken(
            "a key is never written into this file: put it into an environment variable or a file of its "
            'own, and write "env:NAME" or "file:PATH"'
        )
    if source == "env":
        if rest not in env:
            raise broken(f"environment variable {rest} is not set")
        secret = env[rest].strip()
    else:
        try:
            secret = (folder / rest).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise broken(f"{folder / rest} cannot be read: {why}") from None
    if not secret:
        raise broken(f"{value} is empty")
    if not re.fullmatch(r"[!-~]+", secret):
        raise broken(f"{value} holds characters that cannot go into a header")
    return Secret(secret, cast(str, value))


_REFERENCE = {
    "type": "string",
    "pattern": "^(?:env|file):.+$",
    "description": "Where the secret is, never itself.",
}
SecretRef = Annotated[Secret, PlainValidator(_read_secret), WithJsonSchema(_REFERENCE)]


def _json_table(value: object) -> Mapping[str, object]:
    """Request fields: JSON values, with tables nested once (`chat_template_kwargs.enable_thinking`)."""
    if not isinstance(value, dict):
        raise expected("a table")
    for key, item in value.items():
        if key in ROUTED_FIELDS:
            raise broken(f'"{key}" belongs to the request itself and cannot be set here')
        for path, leaf in (
            ((f"{key}.{k}", v) for k, v in item.items()) if isinstance(item, dict) else [(key, item)]
        ):
            _json_value(path, leaf)
    return cast(Mapping[str, object], value)


# Set by the client and read by routing; splicing them would change what was decided.
ROUTED_FIELDS = frozenset({"model", "messages", "prompt", "input", "stream", "stream_options"})


def _json_value(path: str, value: object) -> None:
    if isinstance(value, list):
        for item in value:
            _json_value(path, item)
    elif isinstance(value, dict):
        raise broken(f"{path}: tables can be nested once, not deeper")
    elif not isinstance(value, (str, int, float)):
        raise broken(f"{path}: a TOML date or time has no JSON form; write a string")
    elif isinstance(value, float) and not -1e308 <= value <= 1e308:
        raise broken(f"{path}: JSON has no infinity and no NaN")


JsonTable = Annotated[Mapping[str, object], PlainValidator(_json_table)]


def parameters(cls: type) -> GetPydanticSchema:
    """A table read into a frozen dataclass of `policies`; fields and defaults are declared only there."""
    hints = get_type_hints(cls)
    fields: dict[str, Any] = {
        f.name: (hints[f.name], f.default if f.default is not dataclasses.MISSING else ...)
        for f in dataclasses.fields(cls)
        if f.name not in ELSEWHERE.get(cls, ())
    }
    table = create_model(cls.__name__, __config__=STRICT, **fields)

    def schema(_: object, handler: Callable[[object], core_schema.CoreSchema]) -> core_schema.CoreSchema:
        as_table = core_schema.plain_serializer_function_ser_schema(dataclasses.asdict)
        return core_schema.no_info_after_validator_function(
            lambda read: cls(**dict(read)), handler(table), serialization=as_table
        )

    return GetPydanticSchema(schema)
