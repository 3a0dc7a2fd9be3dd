"""Recorded answers of real servers, as values.

`load` reads one exchange; `streams` and `errors` list what a test wants to run through. The files are
described in tests/captures/README.md. Nothing here interprets a body: that is what the tests are about.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "captures"
SERVERS = ("vllm-0.32-cpu", "llama-server", "llama-cpp-python")

VLLM, LLAMA_SERVER, LLAMA_CPP_PYTHON = SERVERS

# Files that are not one exchange: what happened, in words and excerpts.
NOTES = frozenset(
    {"abort", "no_parsers", "server_dies_mid_stream", "metrics_under_load", "routes", "routes_dev_mode"}
)

# Line ends after an event: trimmed in the files. llama-cpp-python's SSE library ends lines with CR LF.
_EVENT_END = {VLLM: b"\n\n", LLAMA_SERVER: b"\n\n", LLAMA_CPP_PYTHON: b"\r\n\r\n"}

_CHUNK = re.compile(rb"^--- \+(\d+)ms\n", re.MULTILINE)
_CUT_BODY = re.compile(rb" \.\.\.\[\d+ characters in all\]$")


@dataclass(frozen=True, slots=True)
class Capture:
    """One request and the answer to it.

    request_body: as sent, empty for GET; not whole when `request_cut`. headers: names as sent, in order.
    chunks: the HTTP chunks of a chunked answer, without their framing; otherwise the body as one.
    times: seconds from the request to each chunk, empty when not chunked. ended: the terminating chunk came.
    """

    server: str
    name: str
    request_method: str
    path: str
    request_headers: tuple[tuple[str, str], ...]
    request_body: bytes
    request_cut: bool
    status: int
    reason: str
    headers: tuple[tuple[str, str], ...]
    chunks: tuple[bytes, ...]
    times: tuple[float, ...]
    ended: bool

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def is_stream(self) -> bool:
        return self.header("content-type").startswith("text/event-stream")

    def header(self, name: str) -> str:
        """The first value, or an empty string."""
        return next((value for key, value in self.headers if key.lower() == name), "")

    def __str__(self) -> str:
        return f"{self.server}/{self.name}"


@cache
def load(server: str, name: str) -> Capture:
    """The exchange of that file; ValueError for one that is notes."""
    if name in NOTES:
        raise ValueError(f"{server}/{name} is not one exchange: read it with notes()")
    asked, _, answer = (FOLDER / server / f"{name}.txt").read_bytes().partition(b"\n\n")
    head, _, rest = answer.partition(b"\n\n")
    first, *asked_lines = [line[2:] for line in asked.split(b"\n")]
    method, path = first.decode().split()[:2]
    request_headers, request_body = _split_request(asked_lines)
    status_line, *header_lines = head.decode("latin-1").split("\n")
    _, status, *reason = status_line.split(" ", 2)
    headers = tuple(_header(line) for line in header_lines)
    chunked = any(key.lower() == "transfer-encoding" for key, _ in headers)
    chunks, times, ended = _split_chunks(rest, server) if chunked else _whole(rest)
    return Capture(
        server=server,
        name=name,
        request_method=method,
        path=path,
        request_headers=request_headers,
        request_body=request_body,
        request_cut=_CUT_BODY.search(request_body) is not None,
        status=int(status),
        reason="".join(reason),
        headers=headers,
        chunks=chunks,
        times=times,
        ended=ended,
    )


def notes(server: str, name: str) -> str:
    """The text of a file, as it is: for those that hold more than one exchange."""
    return (FOLDER / server / f"{name}.txt").read_bytes().decode()


def names(server: str) -> list[str]:
    """Every exchange recorded from a server, sorted."""
    return sorted(path.stem for path in (FOLDER / server).glob("*.txt") if path.stem not in NOTES)


def all_captures() -> list[Capture]:
    return [load(server, name) for server in SERVERS for name in names(server)]


def streams(path: str | None = None) -> list[Capture]:
    """Every recorded event stream, of one endpoint or of all; for parametrize with `ids=str`."""
    return [c for c in all_captures() if c.is_stream and path in (None, c.path)]


def errors() -> list[Capture]:
    """Every recorded answer with an error status."""
    return [c for c in all_captures() if c.status >= 400]


def _split_request(lines: list[bytes]) -> tuple[tuple[tuple[str, str], ...], bytes]:
    headers = []
    body = b""
    for i, line in enumerate(lines):
        if line.startswith((b"{", b"[")):
            body = b"\n".join(lines[i:])
            break
        if line:
            headers.append(_header(line.decode("latin-1")))
    return tuple(headers), body


def _header(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name, value.strip()


def _whole(rest: bytes) -> tuple[tuple[bytes, ...], tuple[float, ...], bool]:
    body = rest.removesuffix(b"\n")
    return (body,) if body else (), (), True


def _split_chunks(rest: bytes, server: str) -> tuple[tuple[bytes, ...], tuple[float, ...], bool]:
    _, *pieces = _CHUNK.split(rest)
    chunks, times, ended = [], [], False
    for milliseconds, piece in zip(pieces[::2], pieces[1::2], strict=True):
        text = piece.removesuffix(b"\n")
        if text == b"[last chunk]":
            ended = True
            break
        chunks.append(text + _EVENT_END[server])
        times.append(int(milliseconds) / 1000)
    return tuple(chunks), tuple(times), ended
