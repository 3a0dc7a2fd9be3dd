"""Asking one backend, from the command line: what `check`, `doctor`, `gate` and `bench` have in common.

Rules
1. A question has a deadline and its answer a bound; no redirect is followed, no proxy of the environment used.
2. What a server answers is somebody else's text: printed without markup or control characters, and shortened.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum

import aiohttp

from proxy.config import Backend
from proxy.wire.errors import read_error, read_event_error

LONGEST_ANSWER = 1024 * 1024
LONGEST_QUOTE = 160
LARGE = 256 * 1024
"""Bytes from which a body is sent piece by piece."""


class Verdict(StrEnum):
    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing learned of a backend. fix: what to change; empty when all is well. patch: keys of its table in the
    configuration (or, with a dot in front, of the whole) and the values that mend it."""

    backend: str
    what: str
    verdict: Verdict
    detail: str
    fix: str = ""
    patch: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    kind: str
    body: bytes

    def quote(self) -> str:
        """The server's own words, made fit to print."""
        return printable(read_error(self.status, self.kind, self.body).message)


def printable(text: str) -> str:
    words = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return words if len(words) <= LONGEST_QUOTE else words[: LONGEST_QUOTE - 1] + "…"


class Unreachable(Exception):
    def __init__(self, detail: str, fix: str) -> None:
        super().__init__(detail)
        self.detail = detail
        self.fix = fix


def session(seconds: float | None = None) -> aiohttp.ClientSession:
    """For questions to backends. seconds: for each; None: whoever asks sees to it."""
    return aiohttp.ClientSession(
        # A connection for each question: llama-server closes kept ones after some answers, whatever comes on them.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=None if seconds is None else seconds),
        auto_decompress=False,
        trust_env=False,
        read_bufsize=1 << 20,
    )


class Asker:
    """One backend, and the session that it is asked in."""

    def __init__(self, backend: Backend, session: aiohttp.ClientSession) -> None:
        self.backend = backend
        self.session = session
        self._tls = backend.tls.context() if backend.url.startswith("https:") else True

    def open(
        self, method: str, path: str, body: bytes | None = None, *, seconds: float | None = None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """The answer as it comes. seconds: in place of the session's. Raises aiohttp's errors; `unreachable` words them."""
        sent = {"accept-encoding": "identity"}
        if self.backend.key is not None:
            sent["authorization"] = f"Bearer {self.backend.key.reveal()}"
        if body is not None:
            sent["content-type"] = "application/json"
        url, name = self.backend.url + path, self.backend.tls.server_name
        return self.session.request(
            method,
            url,
            data=io.BytesIO(body) if body is not None and len(body) > LARGE else body,
            headers=sent,
            ssl=self._tls,
            server_hostname=name,
            allow_redirects=False,
            timeout=self.session.timeout if seconds is None else aiohttp.ClientTimeout(total=seconds),
        )

    async def ask(
        self, method: str, path: str, body: bytes | None = None, *, seconds: float | None = None
    ) -> Answer:
        """The whole answer, whatever its status. Raises `Unreachable`."""
        try:
            async with self.open(method, path, body, seconds=seconds) as response:
                return Answer(response.status, response.content_type, await _read(response))
        except (aiohttp.ClientError, OSError, ValueError) as error:  # TimeoutError is an OSError
            raise unreachable(error) from error


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The body, or its first LONGEST_ANSWER bytes."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) >= LONGEST_ANSWER:
            response.close()
            break
    return bytes(body[:LONGEST_ANSWER])


def unreachable(error: Exception) -> Unreachable:
    detail = " ".join(str(error).split()) or type(error).__name__
    match error:
        case aiohttp.ClientConnectorCertificateError():
            return Unreachable(detail, "set tls.ca to the file of the certificate's issuer")
        case aiohttp.ClientSSLError():
            return Unreachable(detail, "does the server speak TLS on this port? If not, write http in url")
        case aiohttp.ClientConnectorDNSError():
            return Unreachable(detail, "the host in url is not known here")
        case TimeoutError():
            return Unreachable("no answer in time", "is the server still loading, or a firewall in between?")
        case aiohttp.ClientConnectorError(os_error=OSError(errno=int(number))) if number > 0:
            return Unreachable(os.strerror(number), "is the server running, and is this its port?")
    return Unreachable(detail, "what listens at this address does not speak HTTP as expected")


def plain_json(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def prompt_tokens_of(body: bytes) -> int | None:
    answer = plain_json(body)
    usage = answer.get("usage") if isinstance(answer, dict) else None
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return count if isinstance(count, int) else None


def models_of(body: bytes) -> dict[str, int | None]:
    """Names in /v1/models and their windows in tokens: vLLM's max_model_len, llama.cpp's meta.n_ctx."""
    answer = plain_json(body)
    entries = answer.get("data") if isinstance(answer, dict) else None
    found: dict[str, int | None] = {}
    for entry in entries if isinstance(entries, list) else []:
        if not isinstance(entry, dict) or not isinstance(entry.get("id"), str):
            continue
        meta = entry.get("meta")
        window = entry.get("max_model_len") or (meta.get("n_ctx") if isinstance(meta, dict) else None)
        found[entry["id"]] = window if isinstance(window, int) else None
    return found


def events_of(body: bytes) -> Iterator[object]:
    """The JSON of a stream's data lines."""
    for line in body.splitlines():
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data != b"[DONE]":
                yield plain_json(data)


def broken_stream(body: bytes) -> str | None:
    """What is wrong with an event stream of chat, None if it is whole: each event JSON, none an error, a finish_reason
    that is no abort, and `[DONE]` at the end."""
    events = list(events_of(body))
    error = next((found for found in map(read_event_error, events) if found), None)
    if error is not None:
        return f"the stream says: {printable(error.message)}"
    if not events:
        return "the stream is empty"
    if None in events:
        return "the stream has an event that is no JSON"
    reasons = [
        choice["finish_reason"]
        for event in events
        if isinstance(event, dict)
        for choice in event.get("choices") or ()
        if isinstance(choice, dict) and choice.get("finish_reason")
    ]
    if not reasons:
        return "the stream ends without a finish_reason"
    if "abort" in reasons:
        return 'the stream ends with finish_reason "abort": the server gave up'
    return None if body.rstrip().endswith(b"[DONE]") else "the stream ends without [DONE]"


async def model_of(asker: Asker) -> str:
    """The name to ask for: the configured one, else the first that it lists. Raises `Unreachable`."""
    if asker.backend.model is not None:
        return asker.backend.model
    answer = await asker.ask("GET", "/v1/models")
    listed = models_of(answer.body) if answer.status == 200 else {}
    if not listed:
        raise Unreachable(
            f"/v1/models answers {answer.status} and lists none: {answer.quote()}", "name the model"
        )
    return next(iter(listed))
