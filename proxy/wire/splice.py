"""Changes to a JSON request body, made by replacing bytes.

Rules
1. The result differs from the input in the members that were edited and in nothing else; without an effective
   edit it is the input itself.
2. Edits apply in order, as if one after another; the bytes are joined once. A new member goes behind the last one.
3. A path of several keys edits inside an object value, which is created when absent or null. `default` changes
   only what is absent or null, `override` always. A value that has to be an object and is not: an error for an
   override; a default leaves it to the backend to judge.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from proxy.wire.body import BodyError, Place, Scan, scan_object


@dataclass(frozen=True, slots=True)
class Edit:
    """One change. path: keys from the top, in UTF-8. value: JSON bytes, None to remove. default: only where
    there is nothing, or null."""

    path: tuple[bytes, ...]
    value: bytes | None
    default: bool = False


def override(path: str | Sequence[str], value: object) -> Edit:
    """Set the member at `path` ("a.b" or ("a", "b")) whatever it was."""
    return Edit(_keys(path), json.dumps(value, separators=(",", ":")).encode())


def default(path: str | Sequence[str], value: object) -> Edit:
    """Set the member at `path` if it is absent or null."""
    return Edit(_keys(path), json.dumps(value, separators=(",", ":")).encode(), default=True)


def remove(path: str | Sequence[str]) -> Edit:
    """Take the member at `path` out, if it is there."""
    return Edit(_keys(path), None)


def leaves(table: Mapping[str, object]) -> list[tuple[tuple[str, ...], object]]:
    """(path, value) of everything in a table of tables that is none itself."""
    out: list[tuple[tuple[str, ...], object]] = []
    for key, value in table.items():
        if isinstance(value, Mapping):
            out += [((key, *path), leaf) for path, leaf in leaves(value)]
        else:
            out.append(((key,), value))
    return out


def apply(scan: Scan, edits: Iterable[Edit]) -> bytes:
    """The body of `scan` with `edits` made."""
    changes: dict[bytes, bytes | None] = {}
    for edit in edits:
        key = edit.path[0]
        before = changes[key] if key in changes else scan.raw(key)
        after = _edited(before, edit)
        if after != before or key in changes:
            changes[key] = after
    return _join(scan, changes) if changes else scan.data


def _edited(value: bytes | None, edit: Edit) -> bytes | None:
    """What `edit` makes of the value of its first key; None is absent."""
    nothing = value is None or value == b"null"
    if len(edit.path) == 1:
        return edit.value if nothing or not edit.default else value
    if nothing:
        if edit.value is None:
            return value
        value = b"{}"
    assert value is not None
    if not value.startswith(b"{"):
        if edit.default:
            return value
        name = edit.path[0].decode("utf-8", "replace")
        raise BodyError(f"{name} must be an object", name)
    try:
        return apply(scan_object(value), (Edit(edit.path[1:], edit.value, edit.default),))
    except BodyError as error:
        names = [key.decode("utf-8", "replace") for key in edit.path[:1]] + (
            [error.param] if error.param else []
        )
        raise BodyError(error.message, ".".join(names)) from None


def _join(scan: Scan, changes: dict[bytes, bytes | None]) -> bytes:
    """The bytes between the cuts, and what takes the place of each."""
    members, places = scan.members, scan.places
    cuts = sorted(
        (*members[key].span(2), value)
        for key, value in changes.items()
        if value is not None and key in members
    )
    added = [
        _name(key) + b":" + value
        for key, value in changes.items()
        if value is not None and key not in members
    ]
    kept = places[-1] if places else None
    if None in changes.values():
        kept, gone = _removals(scan, changes)
        cuts = sorted(cuts + gone)
    end = kept.span(2)[1] if kept is not None else scan.open
    if added:
        cuts.append((end, end, (b"," if kept is not None else b"") + b",".join(added)))
    if kept is not (places[-1] if places else None):  # the last members go, and the comma before them
        cuts.append((end, places[-1].span(2)[1], b""))
    pieces: list[bytes | memoryview] = []
    view = memoryview(scan.data)
    at = 0
    for start, stop, text in cuts:
        pieces += (view[at:start], text)
        at = stop
    pieces.append(view[at:])
    return b"".join(pieces)


def _removals(
    scan: Scan, changes: dict[bytes, bytes | None]
) -> tuple[Place | None, list[tuple[int, int, bytes]]]:
    """The last member that stays, and cuts that take the others before it out, each with its comma."""
    kept: Place | None = None
    cuts: list[tuple[int, int, bytes]] = []
    waiting: list[tuple[int, int, bytes]] = []
    for place in scan.places:
        if changes.get(place[1], b"") is None:
            waiting.append((place.start(), place.end(), b""))
        else:
            cuts += waiting
            waiting.clear()
            kept = place
    return kept, cuts


def _name(key: bytes) -> bytes:
    if key.replace(b"_", b"").isalnum():
        return b'"' + key + b'"'
    return json.dumps(key.decode("utf-8", "surrogatepass")).encode()


def _keys(path: str | Sequence[str]) -> tuple[bytes, ...]:
    keys = path.split(".") if isinstance(path, str) else path
    if not keys:
        raise ValueError("an edit needs a path")
    return tuple(key.encode("utf-8", "surrogatepass") for key in keys)
