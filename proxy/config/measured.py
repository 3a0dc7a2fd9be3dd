"""What other commands of ours found of a backend, in files that the configuration names: profiles and gates.

Rules: a file is read once, while loading, and every mistake in it is a problem of the configuration. Two contents of one
path are two values, so that a reload sees the difference.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import PlainValidator, ValidationInfo, WithJsonSchema

from policies import gatefile
from policies.gatefile import GateResult
from policies.profile import Profile
from policies.profilefile import BadProfile, read
from proxy.config.values import NAME, broken, context_of, expected


class ProfileFile(str):
    """The path of a profile that was measured here (`tierline bench`), read while loading. profile: what it says. Two
    versions of it are two profiles."""

    profile: Profile
    text: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProfileFile) and str(self) == str(other) and self.text == other.text

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((str(self), self.text))


def _profile(value: object, info: ValidationInfo) -> object:
    if isinstance(value, ProfileFile):
        return value
    if not isinstance(value, str) or not value.endswith(".toml"):
        if not isinstance(value, str) or not re.fullmatch(NAME, value):
            raise expected('the name of a profile, or the path of a file such as "measured.toml"')
        return value
    path = ProfileFile(context_of(info)[1] / value)
    try:
        path.text = Path(path).read_text("utf-8")
        path.profile = read(path.text)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise broken(f"{path} cannot be read: {why}") from None
    except BadProfile as error:
        raise broken(f"{path} is no profile: {error}") from None
    return path


_PROFILE = {"type": "string", "pattern": f"^(?:{NAME})$"}
ProfileName = Annotated[str, PlainValidator(_profile), WithJsonSchema(_PROFILE)]


class GatePath(str):
    """The path of what `tierline gate` found, read while loading. Two results are two gates."""

    result: GateResult

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GatePath) and str(self) == str(other) and self.result == other.result

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((str(self), self.result))


def _gate(value: object, info: ValidationInfo) -> object:
    if isinstance(value, GatePath):
        return value
    if not isinstance(value, str) or not value:
        raise expected('the path of a file that `tierline gate` wrote, such as "gate.json"')
    path = GatePath(context_of(info)[1] / value)
    try:
        path.result = gatefile.read(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise broken(f"{path} cannot be read: {why}") from None
    except gatefile.BadGate as error:
        raise broken(f"{path}: {error}") from None
    return path


GateFile = Annotated[GatePath, PlainValidator(_gate), WithJsonSchema({"type": "string", "minLength": 1})]
