"""What routing and timing need to know of a JSON request, read from its bytes.

Rules
1. Only what is named here is read and judged; a field of the wrong type is a `BodyError` that names it. Everything
   else is the backend's to judge. Booleans and integers are taken as vLLM's pydantic takes them ("true", 1, "100"):
   what works without the gateway works through it, and the bytes go on as they came.
2. The session is `prompt_cache_key` (OpenAI) or `metadata.user_id` (Anthropic; its clients put a session id there).
   Not `user`: it names a person or a whole application, and one backend would get all of it. A hint never refuses
   a request: of another type it is no hint.
3. Sizes are bytes and counts, cheap and said how. Nothing here knows a tokenizer.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from proxy.wire.body import BodyError, Kind, Scan, items, scan_object
from proxy.wire.errors import Api
from proxy.wire.stretches import Part, quoted

MOST_TOKENS = 10**9
"""More than any answer has: larger limits are as good as this one, and numbers stay such that one can divide by them."""

TEXT: dict[Api, tuple[bytes, ...]] = {
    Api.CHAT: (b"messages",),
    Api.COMPLETIONS: (b"prompt", b"suffix"),
    Api.RESPONSES: (b"instructions", b"input"),
    Api.MESSAGES: (b"system", b"messages"),
    # Embeddings and pooling, rerank, score, classify, tokenize.
    Api.OTHER: (
        b"input",
        b"messages",
        b"prompt",
        b"query",
        b"queries",
        b"documents",
        b"text_1",
        b"text_2",
        b"data_1",
        b"data_2",
    ),
}
_TOOLS = (b"tools", b"functions")
_LIMITS: dict[Api, tuple[bytes, ...]] = {
    Api.CHAT: (b"max_completion_tokens", b"max_tokens"),
    Api.COMPLETIONS: (b"max_tokens",),
    Api.RESPONSES: (b"max_output_tokens",),
    Api.MESSAGES: (b"max_tokens",),
    Api.OTHER: (),
}
# A list of these is a batch: every element is a prompt of its own, with the whole window to itself.
_BATCHES = frozenset(
    {b"prompt", b"input", b"queries", b"documents", b"text_1", b"text_2", b"data_1", b"data_2"}
)

_MEDIA_STEP = 2048
"""Bytes from which a string may be base64: smaller pictures count as text, which their tokens are worth."""
_BASE64 = re.compile(rb"[A-Za-z0-9+/_\-\\]{64}")  # some encoders write \/ for a slash
_MEDIA_KEY = re.compile(rb'"(?:url|image_url|data|file_data)"[ \t\n\r]*+:[ \t\n\r]*+"\Z')
_MARKS = re.compile(rb'"(role|image_url|image)"')
_IMAGE_KEY = re.compile(rb'"image_url"[ \t\n\r]*+:')
_EMPTY = re.compile(rb"[\[{][ \t\n\r]*+[\]}]\Z")
_NOT_RENDERED = frozenset({"thinking", "redacted_thinking", "reasoning"})


# Named tuples, because one of each is made for every request: a frozen dataclass costs four times as much.
class Sizes(NamedTuple):
    """What the context estimate is made from.

    text_bytes: JSON bytes of the fields that the model reads, tools apart. tools_bytes: of tool declarations.
    messages: "role" keys in the text; a nested key of that name counts too. images: image parts, by their key.
    media_bytes: the part of text_bytes in strings of base64 (pictures, sound, files) of `_MEDIA_STEP` bytes
    or more. sequences: prompts in a batch; each has the window to itself.
    truncates: the request lets the server cut the prompt, so that no length is too long.
    """

    text_bytes: int = 0
    messages: int = 0
    tools_bytes: int = 0
    images: int = 0
    media_bytes: int = 0
    sequences: int = 1
    truncates: bool = False


class RequestBody(NamedTuple):
    """A request as far as the gateway reads it. max_output_tokens: None if absent or negative (no limit).
    include_usage: the client itself asked for usage in the stream."""

    api: Api
    scan: Scan
    model: str | None
    stream: bool
    include_usage: bool
    max_output_tokens: int | None
    n: int
    tools: bool
    session: str | None
    previous_response_id: str | None
    sizes: Sizes

    def words(self) -> int:
        """Runs of non-whitespace in the text that is surely rendered: no tools, roles, reasoning. 0 if unreadable.

        Parses the text: a few milliseconds a megabyte, so only for a prompt near a limit."""
        return sum(_words(raw) for key in TEXT[self.api] if (raw := self.scan.raw(key)) is not None)


def read_request(api: Api, data: bytes) -> RequestBody:
    """Scan `data` and read what concerns the gateway; BodyError says what the client has to change."""
    scan = scan_object(data)
    return RequestBody(
        api=api,
        scan=scan,
        model=scan.get_str(b"model"),
        stream=scan.get_bool(b"stream") is True,
        include_usage=api in (Api.CHAT, Api.COMPLETIONS) and _include_usage(scan),
        max_output_tokens=_output_limit(api, scan),
        n=max(1, scan.get_int(b"n") or 1) if b"n" in scan.members else 1,
        tools=_has_elements(scan, b"tools") or _has_elements(scan, b"functions"),
        session=_session(api, scan),
        previous_response_id=scan.get_str(b"previous_response_id") if api is Api.RESPONSES else None,
        sizes=_sizes(api, scan),
    )


def _include_usage(scan: Scan) -> bool:
    options = scan.get_object(b"stream_options")
    return options is not None and options.get_bool(b"include_usage") is True


def _output_limit(api: Api, scan: Scan) -> int | None:
    for key in _LIMITS[api]:
        if (limit := scan.get_int(key)) is not None:
            return min(limit, MOST_TOKENS) if limit >= 0 else None
    return None


def _has_elements(scan: Scan, key: bytes) -> bool:
    span = scan.span(key)
    return span is not None and scan.kind(key) is Kind.ARRAY and not _EMPTY.match(scan.data, *span)


def _session(api: Api, scan: Scan) -> str | None:
    key = b"prompt_cache_key"
    if api is Api.MESSAGES and scan.kind(key) is None:
        if scan.kind(b"metadata") is not Kind.OBJECT:
            return None
        try:
            holder = scan.get_object(b"metadata")
        except BodyError:
            return None
        assert holder is not None
        scan, key = holder, b"user_id"
    elif scan.kind(key) is not Kind.STRING:
        return None
    try:
        return scan.get_str(key) or None
    except BodyError:
        return None


def _sizes(api: Api, scan: Scan) -> Sizes:
    data = scan.data
    text = tools = media = messages = images = 0
    sequences = 1
    for key in TEXT[api]:
        if (span := scan.span(key)) is None:
            continue
        begin, end = span
        text += end - begin
        for start, stop in scan.quoted(begin, end):
            marks = _MARKS.findall(data, start, stop)
            messages += marks.count(b"role")
            if b"image" in marks and api is Api.MESSAGES:
                images += marks.count(b"image")
            elif b"image_url" in marks:  # OpenAI's parts say it twice: as their type, and as the key
                images += len(_IMAGE_KEY.findall(data, start, min(stop + 8, end)))
        if end - begin > _MEDIA_STEP:
            media += end - begin - sum(stop - start for start, stop in texts(data, begin, end))
        if key in _BATCHES:
            sequences = max(sequences, _sequences(api, data, span))
    for key in _TOOLS:
        if (span := scan.span(key)) is not None:
            tools += span[1] - span[0]
    return Sizes(text, messages, tools, images, media, sequences, _truncates(scan))


def texts(data: bytes, begin: int, end: int) -> list[Part]:
    """The parts of the span that are not strings of base64: only a long string is looked at, once."""
    parts = []
    at = begin
    stop = begin
    for start, last in quoted(data, begin, end):
        if start - stop >= _MEDIA_STEP and _is_media(data, stop, start):
            parts.append((at, stop))
            at = start
        stop = last
    parts.append((at, end))
    return parts


def _is_media(data: bytes, start: int, stop: int) -> bool:
    """Whether the string is the payload of a picture, sound or file: by its key, its beginning, and no space.
    Base64 that is somebody's text goes to the model as text."""
    if not _MEDIA_KEY.search(data, max(0, start - 64), start) or data.find(b" ", start, stop) >= 0:
        return False
    if data.startswith(b"data:", start):
        start = data.find(b",", start, start + 256) + 1
    return start > 0 and _BASE64.match(data, start) is not None


def _sequences(api: Api, data: bytes, span: tuple[int, int]) -> int:
    """Prompts in the value: elements of a list of strings or lists; a list of numbers is one prompt of tokens, a
    list of objects a conversation, unless nothing is generated."""
    if data[span[0]] != b"["[0]:
        return 1
    head = data[span[0] + 1 : min(span[0] + 64, span[1])].lstrip()[:1]
    if head in (b'"', b"[") or (head == b"{" and api is Api.OTHER):
        return max(1, len(items(data, span)))
    return 1


def _truncates(scan: Scan) -> bool:
    return scan.kind(b"truncate_prompt_tokens") is Kind.NUMBER or scan.raw(b"truncation") == b'"auto"'


def _words(raw: bytes) -> int:
    """Words of the strings under the keys whose text a chat template writes out."""
    try:
        waiting = [json.loads(raw.decode("utf-8", "surrogatepass"))]
    except (ValueError, RecursionError):
        return 0
    words = 0
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            words += len(value.rpartition("</think>")[2].split())
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, dict) and str(value.get("type")) not in _NOT_RENDERED:
            waiting += [value[key] for key in ("content", "text", "output") if key in value]
    return words
