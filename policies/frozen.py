"""Values that are made for every request: frozen to the type checker, and cheap to make.

A frozen dataclass sets its fields one call at a time, which takes ten times as long as a plain one; and several with
twenty fields are made for every choice. mypy refuses whoever changes one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def frozen(cls: type[T]) -> type[T]:
    """Like `dataclass(frozen=True, slots=True)`, but for what happens at run time to who assigns a field."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
