"""What a prompt begins with, as a chain of numbers; and how its conversation began. For guessing what a cache holds.

Rules
1. Bytes in the order in which a model reads them: tools, then system, messages or prompt. Link i stands for everything
   up to the end of the i-th `LINK_BYTES` of it, so two prompts share as many links as they have in common.
2. Only whole links: the next turn goes on where this one ended, and what it adds changes no link.
3. A payload of base64 changes the links behind it and fills none: its tokens have nothing to do with its bytes.
   Marks for other servers' caches (`cache_control`) are no part of a prompt; clients move them from turn to turn.
4. The numbers are Python's own hashes: as fast as reading the bytes, and keyed anew in each process, so that nobody
   can make two prompts collide or find a prompt from its numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from proxy.wire.body import end_of_item
from proxy.wire.errors import Api
from proxy.wire.request import RequestBody, texts

LINK_BYTES = 4096
"""About a thousand tokens: of the size of the blocks in which hybrid models are cached, and cheap to hash."""

MAX_LINKS = 1024
"""What lies beyond 4 MiB of text is not looked at."""

_TOOLS = (b"tools", b"functions")
_READ: dict[Api, tuple[bytes, ...]] = {
    Api.CHAT: (*_TOOLS, b"messages"),
    Api.COMPLETIONS: (b"prompt",),
    Api.RESPONSES: (b"tools", b"instructions", b"input"),
    Api.MESSAGES: (b"tools", b"system", b"messages"),
    Api.OTHER: (),
}
_TURNS: dict[Api, bytes] = {Api.CHAT: b"messages", Api.RESPONSES: b"input", Api.MESSAGES: b"messages"}

_SPACE = b" \t\n\r"
_USER = re.compile(rb'"role"[ \t\n\r]*+:[ \t\n\r]*+"user"')
_MARK = b'"cache_control"'
_MARKS = re.compile(
    rb'[ \t\n\r]*+,[ \t\n\r]*+"cache_control"[ \t\n\r]*+:[ \t\n\r]*+(?:\{[^{}]*+\}|null)'
    rb'|"cache_control"[ \t\n\r]*+:[ \t\n\r]*+(?:\{[^{}]*+\}|null)[ \t\n\r]*+,[ \t\n\r]*+'
)
_MARKED_HEAD, _MARKED_TAIL = 16384, 4096


class Prefix(NamedTuple):
    """links: the chain. opening: of everything up to the end of the first user message, None where there is none."""

    links: tuple[int, ...]
    opening: int | None


NO_PREFIX = Prefix((), None)


def read_prefix(body: RequestBody, model: str) -> Prefix:
    """The chain of a request to `model`. Nothing for a batch of prompts, or where no text is generated."""
    if body.sizes.sequences > 1 or not _READ[body.api]:
        return NO_PREFIX
    # Caches of different salts are apart, whatever their text.
    seed = hash((model, body.scan.raw(b"cache_salt")))
    long = body.sizes.text_bytes + body.sizes.tools_bytes >= LINK_BYTES
    return Prefix(_chain(body, seed) if long else (), _opening(body, seed))


def _chain(body: RequestBody, seed: int) -> tuple[int, ...]:
    links: list[int] = []
    number, held = seed, b""
    for data, start, stop, filling in _pieces(body):
        if not filling:
            number = hash((number, data[start:stop]))
            continue
        if held:
            taken = data[start : min(stop, start + LINK_BYTES - len(held))]
            start += len(taken)
            held += taken
            if len(held) < LINK_BYTES:
                continue
            number = hash((number, held))
            links.append(number)
        whole = start + (stop - start) // LINK_BYTES * LINK_BYTES
        for at in range(start, whole, LINK_BYTES):
            number = hash((number, data[at : at + LINK_BYTES]))
            links.append(number)
        held = data[whole:stop]
        if len(links) >= MAX_LINKS:
            break
    return tuple(links[:MAX_LINKS])


def _pieces(body: RequestBody) -> Iterator[tuple[bytes, int, int, bool]]:
    """(data, start, stop, whether it fills links) in reading order."""
    scan = body.scan
    for key in _READ[body.api]:
        if (span := scan.span(key)) is None:
            continue
        yield key, 0, len(key), False
        data, start, stop = _unmarked(scan.data, *_inside(scan.data, *span))
        if not body.sizes.media_bytes or key in _TOOLS:
            yield data, start, stop, True
            continue
        for begin, end in texts(data, start, stop):
            if begin > start:
                yield data, start, begin, False
            yield data, begin, end, True
            start = end


def _inside(data: bytes, start: int, stop: int) -> tuple[int, int]:
    """A container or string without its end, where the next turn goes on."""
    if data[start] in b'["{':
        start, stop = start + 1, stop - 1
    while stop > start and data[stop - 1] in _SPACE:
        stop -= 1
    return start, stop


def _unmarked(data: bytes, start: int, stop: int) -> tuple[bytes, int, int]:
    """Without cache marks. They stand at the beginning (tools, system) or in the last messages."""
    if (
        data.find(_MARK, start, min(stop, start + _MARKED_HEAD)) < 0
        and data.find(_MARK, max(start, stop - _MARKED_TAIL), stop) < 0
    ):
        return data, start, stop
    data = _MARKS.sub(b"", data[start:stop])
    return data, 0, len(data)


def _opening(body: RequestBody, seed: int) -> int | None:
    """All turns of a conversation begin with the same messages, and only they do: unless two began alike."""
    key = _TURNS.get(body.api)
    span = body.scan.span(key) if key is not None else None
    if span is None:
        return None
    data, (start, stop) = body.scan.data, span
    if data[start] == b'"'[0]:
        return hash((seed, data[start + 1 : stop - 1]))
    if (user := _USER.search(data, start, stop)) is None:
        return None
    # Most clients write the role first: then its message begins there, and what lies before need not be read.
    brace = data.rfind(b"{", start, user.start())
    first = brace > start and not data[brace + 1 : user.start()].strip(_SPACE)
    end = end_of_item(data, span, brace if first else start + 1, user.end())
    head = data[start:end]
    return hash((seed, _MARKS.sub(b"", head) if _MARK in head else head))
