"""What was changed beside the file, by the admin API: laid over the file's tables before they are read.

Rules
1. Tables as they stand in TOML, so that the same reader checks them; a secret is a reference here, too.
2. A backend of the overlay stands in place of the file's of that name; None: the file's is left out. The lists of models
   that name backends follow: who is left out is in none, who is added is in those that it says.
3. Pure; where it is kept is `proxy.kept`'s.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

Table = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Added:
    """A whole table of [[backends]]. models: whose lists it stands in besides those of the file."""

    table: Table
    models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Overlay:
    """policy: tables `policy` and `tiers` in place of the file's; None: the file's are in force. draining: names."""

    backends: Mapping[str, Added | None] = field(default_factory=dict)
    policy: Table | None = None
    draining: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.backends or self.policy is not None or self.draining)

    def with_backend(self, name: str, added: Added | None) -> Overlay:
        return replace(self, backends={**self.backends, name: added})

    def without_backend(self, name: str) -> Overlay:
        """The file's again."""
        return replace(self, backends={key: one for key, one in self.backends.items() if key != name})

    def with_policy(self, policy: Table | None) -> Overlay:
        return replace(self, policy=policy)

    def with_draining(self, name: str, draining: bool) -> Overlay:
        names = tuple(one for one in self.draining if one != name)
        return replace(self, draining=(*names, name) if draining else names)

    def over(self, document: Table) -> dict[str, Any]:
        """The file's tables with this laid over them; those are not touched. Whatever is malformed is left as it is: the
        reader says so."""
        data = copy.deepcopy(dict(document))
        if self.policy is not None:
            for name in ("policy", "tiers"):
                data.pop(name, None)
            data |= copy.deepcopy(dict(self.policy))
        if self.backends:
            self._backends(data)
        return data

    def _backends(self, data: dict[str, Any]) -> None:
        tables = data.get("backends", [])
        if not isinstance(tables, list):
            return
        left = dict(self.backends)
        merged = []
        for table in tables:
            name = table.get("name") if isinstance(table, dict) else None
            if name not in left:
                merged.append(table)
            elif (added := left.pop(name)) is not None:
                merged.append(copy.deepcopy(dict(added.table)))
        merged += [copy.deepcopy(dict(added.table)) for added in left.values() if added is not None]
        data["backends"] = merged
        models = data.get("models")
        for name, model in models.items() if isinstance(models, dict) else ():
            listed = model.get("backends") if isinstance(model, dict) else None
            if isinstance(listed, list) and listed:
                model["backends"] = self._listed(name, listed)

    def _listed(self, model: str, listed: list[Any]) -> list[Any]:
        kept = [one for one in listed if self.backends.get(one, one) is not None]
        more = [name for name, added in self.backends.items() if added is not None and model in added.models]
        kept += [name for name in more if name not in kept]
        return kept or listed  # an empty list would mean all: the reader names the one that is missing

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "backends": {
                name: None if one is None else {"table": dict(one.table), "models": list(one.models)}
                for name, one in self.backends.items()
            },
            "policy": None if self.policy is None else dict(self.policy),
            "draining": list(self.draining),
        }


NOTHING = Overlay()


def overlay_of(plain: object) -> Overlay:
    """What `plain` gave. Raises ValueError for anything else."""
    match plain:
        case {"backends": dict(backends), "policy": dict() | None as policy, "draining": list(draining)}:
            return Overlay(
                {name: _added(one) for name, one in backends.items()},
                policy,
                tuple(str(name) for name in draining),
            )
    raise ValueError("expected backends, policy and draining")


def _added(plain: object) -> Added | None:
    match plain:
        case None:
            return None
        case {"table": dict(table), "models": list(models)}:
            return Added(table, tuple(str(name) for name in models))
    raise ValueError("expected a backend's table and models")


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a configuration came from. document: the file's tables. source: its name in messages; folder: where relative
    paths start."""

    document: Table = field(default_factory=dict)
    source: str = "config"
    folder: str = "."
    overlay: Overlay = NOTHING

    @property
    def folder_path(self) -> Path:
        return Path(self.folder)

    @property
    def merged(self) -> dict[str, Any]:
        """What was read: every key that is not a default."""
        return self.overlay.over(self.document)
