"""Bodies that no honest client sends: each is a 4xx that names what is wrong, or goes on byte for byte, in little time.

The rule behind the table: what the backend's own parser takes is the backend's to judge; what has to be read here is refused
where it cannot be. Never a 500, a hang, a log full of errors, or a byte more or less than was sent.
"""

from __future__ import annotations

import gzip
import time
import zlib
from collections.abc import AsyncIterator

import pytest

from tests.client import Response
from tests.faults.leaks import Leaks
from tests.proxy.conftest import CHAT, Gateway, MakeGateway
from tests.scripted import ScriptedBackend, chat_json

MODEL = b'"model":"tiny"'
DEEP = 100_000
PASS, BAD = "goes on as it came", "is a 400"
SECONDS = 5.0
"""Far more than any of these takes, far less than a quadratic one would."""


def chat(content: bytes = b'"hi"', more: bytes = b"") -> bytes:
    return b"{" + MODEL + b',"messages":[{"role":"user","content":' + content + b"}]" + more + b"}"


def field(name: str, value: bytes) -> bytes:
    return chat(more=b',"' + name.encode() + b'":' + value)


BODIES: dict[str, tuple[bytes, str]] = {
    "lists nested 100k deep": (chat(b"[" * DEEP + b"]" * DEEP), PASS),
    "objects nested 100k deep": (chat(b'{"a":' * DEEP + b"1" + b"}" * DEEP), PASS),
    "nested 100k deep in a field nobody reads": (field("x", b"[" * DEEP + b"]" * DEEP), PASS),
    "nested 100k deep in tools": (field("tools", b"[" * DEEP + b"]" * DEEP), BAD),
    "nested 100k deep in a schema": (
        field(
            "tools",
            b'[{"type":"function","function":{"name":"f","parameters":'
            + b'{"a":' * DEEP
            + b"1"
            + b"}" * DEEP
            + b"}}]",
        ),
        BAD,
    ),
    "nested 100k deep in response_format": (field("response_format", b"[" * DEEP + b"]" * DEEP), PASS),
    "nested 100k deep and never closed": (chat(b"[" * DEEP)[:-3], BAD),
    "closed more often than opened": (b"{" + MODEL + b"}" + b"}" * DEEP, BAD),
    "a list at the top": (b"[" * DEEP + b"]" * DEEP, BAD),
    "a number of 100k digits": (field("seed", b"9" * 100_000), PASS),
    "max_tokens of 100k digits": (field("max_tokens", b"9" * 100_000), BAD),
    "1e400000": (field("temperature", b"1e400000"), PASS),
    "-1e-400000": (field("temperature", b"-1e-400000"), PASS),
    "n of 100k digits": (field("n", b"9" * 100_000), BAD),
    "NaN": (field("temperature", b"NaN"), PASS),
    "Infinity": (field("temperature", b"-Infinity"), PASS),
    "max_tokens NaN": (field("max_tokens", b"NaN"), BAD),
    "a lone surrogate in the text": (chat(b'"\\ud800"'), PASS),
    "surrogates the wrong way round": (chat(b'"\\udc00\\ud800"'), PASS),
    "a surrogate in three raw bytes": (chat(b'"\xed\xa0\x80"'), PASS),
    "bad UTF-8 in the text": (chat(b'"\xff\xfe\xc0\x80"'), PASS),
    "a lone surrogate as the session": (field("prompt_cache_key", b'"\\ud800"'), PASS),
    "a lone surrogate as the model": (b'{"model":"\\ud800","messages":[]}', BAD),
    "bad UTF-8 as the model": (b'{"model":"\xff","messages":[]}', BAD),
    "the model twice": (b"{" + MODEL + b"," + MODEL + b',"messages":[]}', BAD),
    "the model twice, once escaped": (b"{" + MODEL + b',"\\u006dodel":"x","messages":[]}', BAD),
    "stream twice": (field("stream", b'false,"stream":true'), BAD),
    "a field nobody reads twice": (field("x", b'1,"x":2'), PASS),
    "NUL in the text": (chat(b'"\\u0000"'), PASS),
    "a control character in the text": (chat(b'"\x01"'), PASS),
    "a byte order mark": (b"\xef\xbb\xbf" + chat(), PASS),
    "UTF-16": (chat().decode().encode("utf-16"), BAD),
    "a comment": (b"/* hi */" + chat(), BAD),
    "a comma at the end": (chat()[:-1] + b",}", BAD),
    "single quotes": (chat().replace(b'"', b"'"), BAD),
    "something behind": (chat() + b"x", BAD),
    "two objects": (chat() + chat(), BAD),
    "nothing": (b"", BAD),
    "blanks": (b" " * 100_000, BAD),
    "null": (b"null", BAD),
    "a string": (b'"' + b"x" * 100_000 + b'"', BAD),
    "a string that never ends": (b'{"model":"' + b"\\" * 100_001, BAD),
    "100k quotes": (b'"' * 100_000, BAD),
    "100k escaped quotes": (chat(b'"' + b'\\"' * 100_000 + b'"'), PASS),
    "100k backslashes": (chat(b'"' + b"\\" * 100_000 + b'"'), PASS),
    "100k keys": (b"{" + b",".join(b'"k%d":1' % i for i in range(100_000)) + b"," + MODEL + b"}", BAD),
    "100k messages": (
        b"{" + MODEL + b',"messages":[' + b",".join([b'{"role":"user"}'] * 100_000) + b"]}",
        PASS,
    ),
    "100k pictures": (chat(b"[" + b",".join([b'{"image_url":1}'] * 100_000) + b"]"), PASS),
    "100k role keys in a text": (chat(b'"' + b'\\"role\\":' * 100_000 + b'"'), PASS),
    "a key of 1 MiB": (b'{"' + b"k" * (1 << 20) + b'":1,' + MODEL + b',"messages":[]}', PASS),
    "a text of 4 MiB": (chat(b'"' + b"x" * (4 << 20) + b'"'), PASS),
    "a text of 4 MiB of escapes": (chat(b'"' + b"\\u0041" * (4 << 20) + b'"')[: 6 << 20] + b'"}]}', PASS),
    "base64 of 4 MiB": (
        chat(b'[{"image_url":{"url":"data:image/png;base64,' + b"A" * (4 << 20) + b'"}}]'),
        PASS,
    ),
    "base64 that is none, 4 MiB": (chat(b'"' + (b"A" * 63 + b" ") * (1 << 16) + b'"'), PASS),
    "__proto__": (field("__proto__", b'{"model":"x"}'), PASS),
}


class Sender:
    def __init__(self, gateway: Gateway, backend: ScriptedBackend, caplog: pytest.LogCaptureFixture) -> None:
        self.gateway, self.backend, self._log = gateway, backend, caplog

    async def send(self, body: bytes, path: str = CHAT, headers: dict[str, str] | None = None) -> Response:
        started = time.process_time()
        response = await self.gateway.ask(path, body, headers=headers, method="POST")
        assert time.process_time() - started < SECONDS
        await self.gateway.records.get(len(self.gateway.records.closed) - 1)
        errors = [entry for entry in self._log.records if entry.levelname in ("ERROR", "CRITICAL")]
        assert errors == []
        assert response.status != 500
        return response

    def refused(self, response: Response, *statuses: int) -> None:
        assert response.status in (statuses or (400,)), response.body[:300]
        error = response.json["error"]
        assert error["message"]
        assert len(error["message"]) < 1000, "what is wrong, not all that was sent"
        assert self.backend.requests == []


@pytest.fixture
async def sender(
    make_gateway: MakeGateway, backend: ScriptedBackend, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Sender]:
    limits = "limits.kv_tokens = 1_000_000_000\nlimits.window_tokens = 1_000_000_000\n"
    gateway = await make_gateway(backend, config="[health]\ninterval = 86400\n", per_backend={"a": limits})
    await backend.until(lambda: len([p for p in backend.polls if p.answered]) >= 3, "the first poll")
    backend.default = chat_json()
    leaks = await Leaks.of(gateway, [backend])
    yield Sender(gateway, backend, caplog)
    await leaks.none_left()


@pytest.mark.parametrize("name", BODIES)
async def test_a_body_is_refused_with_what_is_wrong_or_goes_on_as_it_came(sender: Sender, name: str) -> None:
    body, end = BODIES[name]
    response = await sender.send(body)
    if end is BAD:
        sender.refused(response, 400, 404)
    else:
        assert response.status == 200, response.body[:300]
        assert (await sender.backend.received(0)).body == body


READ = {
    CHAT: (
        "model",
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "n",
        "tools",
        "tool_choice",
    ),
    "/v1/completions": ("model", "prompt", "stream", "max_tokens", "n", "echo", "suffix"),
    "/v1/responses": (
        "model",
        "input",
        "stream",
        "max_output_tokens",
        "previous_response_id",
        "tools",
        "instructions",
    ),
    "/v1/messages": ("model", "messages", "stream", "max_tokens", "system", "metadata", "tools"),
    "/v1/embeddings": ("model", "input"),
    "/tokenize": ("model", "prompt", "messages"),
}
TYPES = (
    b"null",
    b"true",
    b"0",
    b"-1",
    b"1.5",
    b'""',
    b'"x"',
    b"[]",
    b"[[]]",
    b"[null]",
    b"{}",
    b'{"a":[]}',
    b"1e999",
    b"[1,-1]",
)


@pytest.mark.parametrize("path", READ)
async def test_a_field_of_any_type_is_a_4xx_that_names_it_or_the_backends_to_judge(
    sender: Sender, path: str
) -> None:
    for name in READ[path]:
        for value in TYPES:
            if name == "stream" and value == b"true":
                continue  # the backend of this test answers in one way only
            sender.backend.requests.clear()
            other = b"" if name == "model" else MODEL + b","
            response = await sender.send(b"{" + other + b'"' + name.encode() + b'":' + value + b"}", path)
            assert response.status == 200 or 400 <= response.status < 500, (name, value, response.body[:200])
            if response.status != 200:
                sender.refused(response, response.status)


def bomb(size: int, wbits: int) -> bytes:
    packer = zlib.compressobj(1, wbits=wbits)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(size >> 20)) + packer.flush()


@pytest.mark.parametrize(("encoding", "wbits"), [("gzip", 31), ("deflate", 15), ("GZIP", 31)])
async def test_a_compressed_bomb_is_a_413(sender: Sender, encoding: str, wbits: int) -> None:
    response = await sender.send(bomb(80 << 20, wbits), headers={"content-encoding": encoding})
    sender.refused(response, 413)


async def test_a_bomb_in_a_bomb_is_no_json(sender: Sender) -> None:
    body = gzip.compress(gzip.compress(chat()))
    sender.refused(await sender.send(body, headers={"content-encoding": "gzip"}))


@pytest.mark.parametrize("encoding", ["gzip, gzip", "gzip, deflate", "x-gzip", "compress", "\xff"])
async def test_an_encoding_that_is_not_unpacked_is_a_415(sender: Sender, encoding: str) -> None:
    sender.refused(await sender.send(gzip.compress(chat()), headers={"content-encoding": encoding}), 400, 415)


FORMS = {
    "no boundary": ("multipart/form-data", b"x"),
    "an empty boundary": ("multipart/form-data; boundary=", b"--\r\n\r\n"),
    "a boundary of 10k": ("multipart/form-data; boundary=" + "b" * 10_000, b"x"),
    "no end": (
        "multipart/form-data; boundary=b",
        b"--b\r\ncontent-disposition: form-data; name=model\r\n\r\ntiny",
    ),
    "100k parts": (
        "multipart/form-data; boundary=b",
        b"--b\r\ncontent-disposition: form-data; name=x\r\n\r\n1\r\n" * 100_000 + b"--b--\r\n",
    ),
    "100k headers in a part": (
        "multipart/form-data; boundary=b",
        b"--b\r\n" + b"x: y\r\n" * 100_000 + b"\r\n1\r\n--b--\r\n",
    ),
    "100k dashes": ("multipart/form-data; boundary=-", b"-" * 100_000),
    "a name that never ends": (
        "multipart/form-data; boundary=b",
        b'--b\r\ncontent-disposition: form-data; name="' + b"\\" * 100_000 + b"\r\n\r\n1\r\n--b--\r\n",
    ),
    "a model of 1 MiB": (
        "multipart/form-data; boundary=b",
        b"--b\r\ncontent-disposition: form-data; name=model\r\n\r\n" + b"m" * (1 << 20) + b"\r\n--b--\r\n",
    ),
    "json": ("application/json", chat()),
    "nothing": ("multipart/form-data; boundary=b", b""),
}


@pytest.mark.parametrize("name", FORMS)
async def test_a_form_is_refused_with_what_is_wrong_or_goes_on_as_it_came(sender: Sender, name: str) -> None:
    kind, body = FORMS[name]
    response = await sender.send(body, "/v1/audio/transcriptions", headers={"content-type": kind})
    if response.status == 200:
        assert (await sender.backend.received(0)).body == body
    else:
        sender.refused(response, 400, 404)
