"""Bytes of a client that another parser might read otherwise: one request in is one request out, or a 4xx and no other.

Whatever arrives, the backend sees at most one request, framed by us, on a path that is served; the connection is closed
where it is not certain where the next request begins; nothing is a 500, hangs or is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest

from tests.client import DEADLINE
from tests.faults.leaks import Leaks
from tests.proxy.conftest import CHAT, Gateway, MakeGateway
from tests.scripted import ScriptedBackend

BODY = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}).encode()
SIZE = len(BODY)
SECOND = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (SIZE, BODY)


def post(
    *lines: str, body: bytes = b"", target: str = CHAT, version: str = "1.1", host: str = "host: x"
) -> bytes:
    head = "".join(f"{line}\r\n" for line in (host, *lines) if line)
    return f"POST {target} HTTP/{version}\r\n{head}\r\n".encode("latin-1") + body


@dataclass
class Came:
    """All that came until the gateway closed the connection or said nothing more. statuses: in order."""

    raw: bytes
    closed: bool

    @property
    def statuses(self) -> list[int]:
        return [int(code) for code in re.findall(rb"(?:\A|\r\n|\})HTTP/1\.[01] (\d{3}) ", self.raw)]


class Wire:
    def __init__(self, gateway: Gateway, backend: ScriptedBackend, caplog: pytest.LogCaptureFixture) -> None:
        self.gateway, self.backend, self._log = gateway, backend, caplog

    async def say(self, data: bytes, *more: bytes, answers: int = 1) -> Came:
        """Send it, in one write each, and read until the connection ends or so many answers have come whole."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.gateway.port)
        came = Came(b"", False)
        try:
            for part in (data, *more):
                writer.write(part)
                await asyncio.sleep(0)
            async with asyncio.timeout(DEADLINE):
                while not (came.closed or self._whole(came.raw, answers, data.startswith(b"HEAD"))):
                    piece = await reader.read(65536)
                    came.raw += piece
                    came.closed = not piece
        except ConnectionResetError:
            came.closed = True
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        assert 500 not in came.statuses, came.raw
        errors = [entry for entry in self._log.records if entry.levelname in ("ERROR", "CRITICAL")]
        assert errors == [], came.raw
        return came

    @staticmethod
    def _whole(raw: bytes, answers: int, bodyless: bool) -> bool:
        count, rest = 0, raw
        while (end := rest.find(b"\r\n\r\n")) >= 0:
            found = re.search(rb"content-length: (\d+)", rest[:end], re.IGNORECASE)
            size = int(found[1]) if found and not bodyless else 0
            if len(rest) < end + 4 + size:
                return False
            count += not rest.startswith(b"HTTP/1.1 100 ")
            rest = rest[end + 4 + size :]
        return count >= answers

    def one_request_framed_by_us(self) -> None:
        """What reached the backend."""
        (request,) = self.backend.requests
        assert request.method == "POST"
        assert request.target == CHAT
        assert request.body == BODY
        assert request.header("content-length") == str(SIZE)
        assert request.header("transfer-encoding") is None


@pytest.fixture
async def wire(
    make_gateway: MakeGateway, backend: ScriptedBackend, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Wire]:
    gateway = await make_gateway(backend, config="[health]\ninterval = 86400\n")
    await backend.until(lambda: len([p for p in backend.polls if p.answered]) >= 3, "the first poll")
    leaks = await Leaks.of(gateway, [backend])
    yield Wire(gateway, backend, caplog)
    await leaks.none_left()


Say = Callable[..., Awaitable[Came]]

REFUSED = {
    "length and chunked": post(f"content-length: {SIZE}", "transfer-encoding: chunked", body=CHUNKED),
    "chunked and length": post("transfer-encoding: chunked", f"content-length: {SIZE}", body=CHUNKED),
    "two lengths": post(f"content-length: {SIZE}", "content-length: 0", body=BODY),
    "two lengths in one": post(f"content-length: {SIZE}, 0", body=BODY),
    "a length with a sign": post(f"content-length: +{SIZE}", body=BODY),
    "a negative length": post("content-length: -1", body=BODY),
    "a length in hex": post("content-length: 0x10", body=BODY),
    "a length with a blank": post("content-length: 1 0", body=BODY),
    "a length with an underscore": post("content-length: 1_0", body=BODY),
    "a length beyond 64 bits": post(f"content-length: {2**64 + SIZE}", body=BODY),
    "an empty length": post("content-length:", body=BODY),
    "chunked and something behind": post("transfer-encoding: chunked, identity", body=CHUNKED),
    "twice chunked": post("transfer-encoding: chunked, chunked", body=CHUNKED),
    "a coding nobody knows": post("transfer-encoding: xchunked", body=CHUNKED),
    "a coding with a vertical tab": post("transfer-encoding: \x0bchunked", body=CHUNKED),
    "a blank before the colon": post("transfer-encoding : chunked", body=CHUNKED),
    "a length with a blank before its colon": post(f"content-length : {SIZE}", body=BODY),
    "a folded header": post("x-a: b\r\n transfer-encoding: chunked", f"content-length: {SIZE}", body=BODY),
    "a header without a name": post(": x", f"content-length: {SIZE}", body=BODY),
    "a header without a colon": post("transfer-encoding", f"content-length: {SIZE}", body=BODY),
    "NUL in a header": post("x-a: b\0c", f"content-length: {SIZE}", body=BODY),
    "CR in a header": post("x-a: b\rtransfer-encoding: chunked", f"content-length: {SIZE}", body=BODY),
    "LF alone behind a header": post(f"x-a: b\ncontent-length: {SIZE}", body=BODY),
    "a chunk size that overflows": post("transfer-encoding: chunked", body=b"1" + b"0" * 17 + b"\r\n" + BODY),
    "a negative chunk size": post("transfer-encoding: chunked", body=b"-5\r\nhello\r\n0\r\n\r\n"),
    "a chunk size in 0x": post("transfer-encoding: chunked", body=b"0x5\r\nhello\r\n0\r\n\r\n"),
    "a chunk that is longer than it says": post(
        "transfer-encoding: chunked", body=b"5\r\nhello!\r\n0\r\n\r\n"
    ),
    "a chunk behind LF alone": post("transfer-encoding: chunked", body=b"5\nhello\n0\n\n"),
    "a chunk extension with LF": post("transfer-encoding: chunked", body=b"5;a\nb\r\nhello\r\n0\r\n\r\n"),
    "HTTP/0.9": b"POST /v1/chat/completions\r\n\r\n",
    "HTTP/1.2": post(f"content-length: {SIZE}", body=BODY, version="1.2"),
    "HTTP/2 in words": post(f"content-length: {SIZE}", body=BODY, version="2.0"),
    "HTTP/2 for real": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(60),
    "a method with a tab": b"PO\tST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n\r\n",
    "a head without an end": b"POST / HTTP/1.1\r\nx: " + b"y" * 40_000,
    "a line without an end": b"POST /" + b"y" * 40_000,
}


@pytest.mark.parametrize("shape", REFUSED)
async def test_a_shape_that_can_be_read_in_two_ways_is_refused_and_nothing_behind_it_is_heard(
    wire: Wire, shape: str
) -> None:
    came = await wire.say(REFUSED[shape] + SECOND * 2, answers=3)
    assert came.closed, "where the next request begins nobody knows"
    assert len(came.statuses) <= 1
    assert all(400 <= status < 500 or status == 505 for status in came.statuses), came.raw
    assert wire.backend.requests == []


PASSED = {
    "the same length twice": post(f"content-length: {SIZE}", f"content-length: {SIZE}", body=BODY),
    "zeros before a length": post(f"content-length: 00{SIZE}", body=BODY),
    "chunked": post("transfer-encoding: chunked", body=CHUNKED),
    "CHUNKED": post("Transfer-Encoding: CHUNKED", body=CHUNKED),
    "chunked with extensions": post(
        "transfer-encoding: chunked", body=b'%x;a="b;c"\r\n%b\r\n0\r\n\r\n' % (SIZE, BODY)
    ),
    "chunked with trailers": post(
        "transfer-encoding: chunked", body=CHUNKED[:-2] + b"content-length: 3\r\n\r\n"
    ),
    "byte by byte": post(
        "transfer-encoding: chunked", body=b"".join(b"1\r\n%c\r\n" % b for b in BODY) + b"0\r\n\r\n"
    ),
    "a body on HTTP/1.0": post(f"content-length: {SIZE}", body=BODY, version="1.0"),
    "no host": post(f"content-length: {SIZE}", body=BODY, host=""),
    "another host": post(f"content-length: {SIZE}", body=BODY, host="host: backend.internal:8000"),
    "a whole URL of another host": post(
        f"content-length: {SIZE}", body=BODY, target=f"http://169.254.169.254{CHAT}"
    ),
    "an upgrade": post("connection: upgrade", "upgrade: h2c", f"content-length: {SIZE}", body=BODY),
    "hop-by-hop headers that are named": post(
        "connection: content-length, x-a", "x-a: b", f"content-length: {SIZE}", body=BODY
    ),
}


@pytest.mark.parametrize("shape", PASSED)
async def test_what_is_said_once_and_clearly_goes_on_as_one_request_in_our_words(
    wire: Wire, shape: str
) -> None:
    came = await wire.say(PASSED[shape])
    if came.statuses == [400]:  # a parser may be stricter; never laxer
        assert wire.backend.requests == []
        return
    assert came.statuses == [200], came.raw
    wire.one_request_framed_by_us()


async def test_what_stands_behind_a_body_is_the_next_request_and_nothing_of_the_first(wire: Wire) -> None:
    came = await wire.say(post(f"content-length: {SIZE}", body=BODY) * 2, answers=2)
    assert came.statuses == [200, 200]
    assert [request.body for request in wire.backend.requests] == [BODY, BODY]


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "DELETE", "TRACE"])
async def test_a_body_on_a_method_that_takes_none_is_read_and_does_not_become_a_request(
    wire: Wire, method: str
) -> None:
    inner = post(f"content-length: {SIZE}", body=BODY)
    data = f"{method} /v1/models HTTP/1.1\r\nhost: x\r\ncontent-length: {len(inner)}\r\n\r\n".encode() + inner
    await wire.say(data)
    assert wire.backend.requests == []


PATHS = (
    "/v1/../v1/chat/completions",
    "/v1/./chat/completions",
    "/v1//chat/completions",
    "//v1/chat/completions",
    "/v1/chat/completions/..%2f..%2fadmin",
    "/v1/chat%2fcompletions",
    "/v1/%63hat/completions",
    "/v1/chat/completions%00",
    "/v1/chat/completions;x=y",
    "/v1/chat/completions\\..\\..\\admin",
    "/admin/backends",
    "/v1/responses/%2e%2e",
    "/v1/responses/..%5c..%5cmetrics",
    "/v1/responses/resp_1/../../../metrics",
    "/v1/responses/resp_1%0d%0ax-a:%20b",
    "http://x/../v1/chat/completions",
    "http://x@y:80/v1/./chat/completions",
    "file:///etc/passwd",
    "gopher://x/",
)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_a_path_that_a_backend_might_resolve_to_another_reaches_none(
    wire: Wire, path: str, method: str
) -> None:
    data = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {SIZE}\r\n\r\n".encode() + BODY
    came = await wire.say(data)
    assert [status // 100 for status in came.statuses] == [4], came.raw
    assert wire.backend.requests == []


HEADERS = {
    "x-request-id": ("a\x0bb", "a b", "%0d%0ax-a: b", "x" * 129, "\xff\xfe", "", "../../etc"),
    "x-quality-tier": ("%0d%0a", "\xe9xact", "x" * 5000, "fast, exact", "__proto__"),
    "x-tool-format": ("xml;json", "\xff"),
    "x-tierline-deadline": ("nan", "inf", "-1", "1e999", "0x1", "1_0", "\xb2", "1" * 4000),
    "x-tierline-priority": ("10", "-10", "1.5", "1e3", "+\xb2", "9" * 5000),
    "authorization": ("Bearer", "Bearer  ", "Bearer \xff", "Basic !!!!", "bearer " + "x" * 20_000),
    "content-type": ("", "multipart/form-data", "text/plain; charset=utf-16", "\xff"),
    "accept-encoding": ("gzip;q=\xff", "*;q=0"),
    "origin": ("null", "\xff", "http://x\t"),
    "expect": ("100-continue, x", "200-ok"),
    "traceparent": ("00-" + "f" * 4000,),
    "connection": ("close, close, keep-alive", ", ,,", "x-request-id, host, content-length"),
    "cookie": ("a=b; " * 2000,),
}
ODD = [(name, value) for name, values in HEADERS.items() for value in values]


@pytest.mark.parametrize(
    ("name", "value"), ODD, ids=[f"{name}-{number}" for number, (name, _) in enumerate(ODD)]
)
async def test_an_odd_header_is_a_4xx_or_harmless(wire: Wire, name: str, value: str) -> None:
    came = await wire.say(post(f"{name}: {value}", f"content-length: {SIZE}", body=BODY))
    status = [code for code in came.statuses if code != 100]
    assert len(status) == 1
    assert status[0] == 200 or 400 <= status[0] < 500, came.raw
    head = came.raw.rpartition(b"\r\n\r\n")[0]
    assert b"\r\nx-a: b" not in head
    for request in wire.backend.requests:
        assert not re.search(rb"[^\r]\n|\r[^\n]", request.head), "no line of theirs in our head"
        assert b"\r\nx-a: b" not in request.head


async def test_many_headers_are_too_many_or_pass(wire: Wire) -> None:
    lines = [f"x-{number}: y" for number in range(5000)]
    came = await wire.say(post(*lines, f"content-length: {SIZE}", body=BODY))
    assert came.statuses in ([200], [400], [431]), came.raw[:200]
