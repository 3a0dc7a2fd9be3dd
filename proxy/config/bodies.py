"""What the admin API takes: bodies of the very sections that the file has, and the JSON schemas that say so.

Rules
1. A body is read by the section that the file's table is read by; nothing is declared twice. What a schema can say is a
   fault of the request (400); what only the gateway knows, such as whether a name exists, is a conflict (409).
2. What comes over the network never reaches further into the machine than the file does: a secret is a variable that the
   file names already or that begins with `TIERLINE_`; no Python is run that the file does not name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_type_hints

from pydantic import BeforeValidator, ValidationError, create_model

from proxy.config import problems
from proxy.config.clients import Allowed, KeySettings
from proxy.config.policy import Policy, Section, TierConfig, with_built_in_tiers
from proxy.config.sections import Backend, Config
from proxy.config.values import Array, Digest12, Factor, Moment, Name, SecondsOrOff

OWN_VARIABLES = "TIERLINE_"
BY_SCHEMA = frozenset({"expected", "rule", "value_error"})
"""pydantic's name for what our own checks found; of these only `expected` is what a schema says."""


class BackendBody(Backend):
    """A table of [[backends]]. models: those that list their backends and shall list this one, too."""

    models: Array[Name] = ()


def _changes(of: type[Section], name: str, *, without: str) -> type[Section]:
    """The same keys, each of which may be left out; null is the default again."""
    hints = get_type_hints(of, include_extras=True)
    fields: dict[str, Any] = {
        key: (hints[key] | None, None) for key in of.model_fields if key not in without.split()
    }
    return create_model(name, __base__=Section, __doc__="Keys to change. null: the default again.", **fields)


BackendChange = _changes(Backend, "BackendChange", without="name")
KeyChange = create_model(
    "KeyChange",
    __base__=_changes(KeySettings, "KeyChange", without=""),
    expires=(Moment | None, None),
)


class PolicyBody(Section):
    """The tables [policy] and [tiers], in place of those in force."""

    policy: Policy | None = None
    tiers: Annotated[dict[Name, TierConfig], BeforeValidator(with_built_in_tiers)] | None = None


class ReplayBody(PolicyBody):
    """margin_percent: how much worse than what was recorded is too much. decisions_only: outcomes are not modelled."""

    margin_percent: Factor = 5.0
    decisions_only: bool = False


class ActivateBody(ReplayBody):
    """replay: only if the recorded traffic is no worse off under it."""

    replay: bool = False


class RollbackBody(Section):
    """digest: of a policy that was in force before; None: the last one."""

    digest: Digest12 | None = None


class KeyBody(KeySettings):
    """A key to be made."""

    name: Name
    tenant: Name | None = None
    expires: Moment | None = None


class RotateBody(Section):
    """grace_seconds: so long the old key works, too."""

    grace_seconds: SecondsOrOff = 0.0


class LimitsBody(Allowed):
    """All limits of a key; those that are left out are none."""


class Fault(Exception):
    """A body that cannot be used. path: of its first problem. conflict: only the gateway could know."""

    def __init__(self, found: list[str], path: str, *, conflict: bool) -> None:
        super().__init__("; ".join(found))
        self.path, self.conflict = path, conflict


def read_body(model: type[Section], data: object, config: Config, env: Mapping[str, str]) -> Section:
    """Raises Fault."""
    context = {"env": env, "folder": config.origin.folder_path}
    try:
        return model.model_validate(data, context=context)
    except ValidationError as error:
        found = error.errors(include_url=False)
        conflict = all(e["type"] in BY_SCHEMA and e["type"] != "expected" for e in found)
        path = problems.key_path(tuple(part for part in found[0]["loc"] if part != "[key]"))
        raise Fault([problems.line(dict(e), model) for e in found], path, conflict=conflict) from None


def reaches_too_far(config: Config, table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(path, problem) of what a table that came over the network may not name."""
    known = set(_strings(config.origin.document))
    tls = table.get("tls")
    files = (
        {f"tls.{name}": tls.get(name) for name in ("ca", "cert", "key")} if isinstance(tls, Mapping) else {}
    )
    files["gate"] = table.get("gate")
    profile = table.get("profile")
    if isinstance(profile, str) and profile.endswith(".toml"):
        files["profile"] = profile
    for path, value in files.items():
        if isinstance(value, str) and value not in known:
            yield path, "a file of this machine that the configuration file does not name"
    key = table.get("key")
    if isinstance(key, str) and key not in known and not key.startswith(f"env:{OWN_VARIABLES}"):
        why = f'name a variable that begins with {OWN_VARIABLES} ("env:{OWN_VARIABLES}…"), or one that the file names'
        yield "key", f"a secret of this machine that the configuration file does not name: {why}"
    file = table.get("file")
    if isinstance(file, str) and file not in known:
        yield "policy.file", "Python is not taken from here: name it in the configuration file and reload"


def _close(schema: object) -> None:
    """What matches no pattern is no name."""
    if isinstance(schema, dict):
        if "patternProperties" in schema:
            schema["additionalProperties"] = False
        for one in schema.values():
            _close(one)
    elif isinstance(schema, list):
        for one in schema:
            _close(one)


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _strings(one)
    elif isinstance(value, list):
        for one in value:
            yield from _strings(one)


def schemas(models: Mapping[str, type[Section]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(name → reference, name → schema of every model and its parts), for an OpenAPI document."""
    parts: dict[str, Any] = {}
    for name, model in models.items():
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        parts |= schema.pop("$defs", {})
        parts[name] = schema
    _close(parts)
    return {name: {"$ref": f"#/components/schemas/{name}"} for name in models}, parts
