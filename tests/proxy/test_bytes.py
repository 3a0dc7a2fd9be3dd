"""A request's body reaches the backend byte for byte. What the gateway must change is a splice; nothing else moves."""

from __future__ import annotations

import gzip
import zlib
from itertools import product

import pytest

from proxy.endpoints import RELAYED, Body
from proxy.errors import Outcome
from tests.fake_clock import FakeClock
from tests.proxy.conftest import CHAT, MakeGateway
from tests.scripted import ScriptedBackend, json_answer

JSON_PATHS = [path for path, endpoint in RELAYED.items() if endpoint.body is Body.JSON]
FORM_PATHS = [path for path, endpoint in RELAYED.items() if endpoint.body is Body.FORM]

# What a parser and an encoder between client and backend would change or refuse.
ODD = {
    "order and whitespace": b' { "zeta" :1 ,\t"model": "tiny" ,\r\n "alpha": [ 1 ,2 ] }\n ',
    "unknown fields": b'{"model":"tiny","x_vendor":{"deep":[{"a":null}]},"messages":[]}',
    "integers beyond 64 bits": b'{"model":"tiny","seed":123456789012345678901234567890,"n2":-1e400}',
    "NaN and Infinity": b'{"model":"tiny","a":NaN,"b":Infinity,"c":-Infinity}',
    "lone surrogates": rb'{"model":"tiny","messages":[{"role":"user","content":"\ud83d and \udc00"}]}',
    "escapes": rb'{"model":"tiny","messages":[{"role":"user","content":"\u0041\/\u00e9\n"}]}',
    "utf-8": '{"model":"tiny","messages":[{"role":"user","content":"Zürich 日本 👍"}]}'.encode(),
    "floats as written": b'{"model":"tiny","temperature":1.0000000000000000001,"top_p":1E-2}',
    "a key given twice that nobody reads": b'{"model":"tiny","logit_bias":{},"logit_bias":{"1":2}}',
    "names of ours in nested values": b'{"model":"tiny","metadata":{"model":"x","stream":true,"model":"y"}}',
    "the names of ours in another case": b'{"model":"tiny","Model":"x","MODEL":"y"}',
    "an escaped key": rb'{"model":"tiny","extr\u0061":1}',
    "a byte order mark": b'\xef\xbb\xbf{"model":"tiny"}',
    "control characters in strings": b'{"model":"tiny","user":"a\x01\tb"}',
}


def form(
    *fields: tuple[str, str], file: bytes = b"RIFF\0\xff\r\n--not the boundary\r\n"
) -> tuple[bytes, dict[str, str]]:
    parts = [
        f'--b0undary\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields
    ]
    head = b'--b0undary\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
    body = b"".join(parts) + head + file + b"\r\n--b0undary--\r\n"
    return body, {"content-type": "multipart/form-data; boundary=b0undary"}


@pytest.mark.parametrize("body", ODD.values(), ids=ODD.keys())
async def test_a_request_body_reaches_the_backend_as_it_came(
    make_gateway: MakeGateway, backend: ScriptedBackend, body: bytes
) -> None:
    gateway = await make_gateway(backend)
    response = await gateway.ask(CHAT, body)
    assert response.status == 200
    request = await backend.received()
    assert request.body == body
    assert request.header("content-length") == str(len(body))
    await gateway.ended(Outcome.OK)


async def test_it_does_so_on_every_endpoint(make_gateway: MakeGateway, backend: ScriptedBackend) -> None:
    gateway = await make_gateway(backend)
    backend.default = json_answer({"object": "list", "data": []})
    bodies = [ODD[kind] for kind in ("order and whitespace", "NaN and Infinity", "lone surrogates")]
    for path in JSON_PATHS:
        for body in bodies:
            assert (await gateway.ask(path, body)).status == 200, path
            assert backend.requests[-1].body == body
            assert backend.requests[-1].target == path
    await gateway.ended(*[Outcome.OK] * len(JSON_PATHS) * len(bodies))
    assert backend.open_connections <= 3  # one for the requests, two for polls


RENAMED = {"a": 'model = "org/served \\"name\\""'}
SERVED = rb'"org/served \"name\""'


@pytest.mark.parametrize("body", ODD.values(), ids=ODD.keys())
async def test_the_backends_model_name_takes_the_place_of_the_public_one_and_nothing_else_moves(
    make_gateway: MakeGateway, backend: ScriptedBackend, body: bytes
) -> None:
    gateway = await make_gateway(backend, per_backend=RENAMED)
    assert (await gateway.ask(CHAT, body)).status == 200
    assert (await backend.received()).body == body.replace(b'"tiny"', SERVED)


@pytest.mark.parametrize("path", FORM_PATHS)
@pytest.mark.parametrize(
    "fields", [[("model", "tiny"), ("language", "de")], [("language", "de")]], ids=["named", "absent"]
)
async def test_in_a_form_too(
    make_gateway: MakeGateway, backend: ScriptedBackend, path: str, fields: list[tuple[str, str]]
) -> None:
    gateway = await make_gateway(backend, per_backend={"a": 'model = "whisper"'})
    backend.default = json_answer({"text": "hi"})
    body, headers = form(*fields)
    response = await gateway.ask(path, body, headers=headers)
    assert (response.status, response.json) == (200, {"text": "hi"})
    wanted = [("model", "whisper"), *(f for f in fields if f[0] != "model")]
    assert (await backend.received()).body == form(*wanted)[0]
    assert (await backend.received()).header("content-type") == headers["content-type"]
    await gateway.ended(Outcome.OK)


ALIASES = """
[models.tiny]
[models.thinker]
alias_of = "tiny"
defaults = { temperature = 0.6, chat_template_kwargs = { enable_thinking = true } }
overrides = { max_tokens = 5, stop = ["END"] }
"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            b'{ "model": "thinker", "messages": [] }',
            b'{ "model": "tiny", "messages": [],"temperature":0.6,"chat_template_kwargs":{"enable_thinking":true},'
            b'"max_tokens":5,"stop":["END"] }',
        ),
        (
            b'{"max_tokens": 99,"model":"thinker","temperature":1.0,"chat_template_kwargs":{"a":NaN},"stop":"x"}',
            b'{"max_tokens": 5,"model":"tiny","temperature":1.0,"chat_template_kwargs":{"a":NaN,"enable_thinking":true},'
            b'"stop":["END"]}',
        ),
        (
            b'{"temperature":null,"model":"thinker","chat_template_kwargs":{"enable_thinking":false}}',
            b'{"temperature":0.6,"model":"tiny","chat_template_kwargs":{"enable_thinking":false},"max_tokens":5,'
            b'"stop":["END"]}',
        ),
    ],
    ids=["absent", "given", "null"],
)
async def test_an_aliass_fields_are_spliced_in(
    make_gateway: MakeGateway, backend: ScriptedBackend, body: bytes, expected: bytes
) -> None:
    gateway = await make_gateway(backend, config=ALIASES)
    assert (await gateway.ask(CHAT, body)).status == 200
    assert (await backend.received()).body == expected


TWICE = [
    b'{"model":"tiny","model":"other"}',
    b'{"model":"tiny","model":"tiny"}',
    rb'{"model":"tiny","mod\u0065l":"other"}',
    rb'{"\u006dodel":"other","messages":[],"model":"tiny"}',
    b'{"stream":false,"model":"tiny","stream":true}',
]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, rb'{"model":"tiny","stream_options":{},"stream\u005foptions":{}}'),
        ("/v1/responses", b'{"model":"tiny","previous_response_id":"a","previous_response_id":"b"}'),
        *product((CHAT, "/v1/messages", "/v1/responses", "/v1/embeddings", "/v1/audio/speech"), TWICE),
    ],
)
async def test_a_second_copy_of_a_key_that_the_gateway_reads_is_refused(
    make_gateway: MakeGateway, backend: ScriptedBackend, path: str, body: bytes
) -> None:
    gateway = await make_gateway(backend)
    response = await gateway.ask(path, body)
    assert response.status == 400
    assert "more than once" in response.json["error"]["message"]
    assert backend.requests == []
    await gateway.ended(Outcome.BAD_REQUEST)


@pytest.mark.parametrize("path", FORM_PATHS)
async def test_a_second_model_field_in_a_form_is_refused(
    make_gateway: MakeGateway, backend: ScriptedBackend, path: str
) -> None:
    gateway = await make_gateway(backend)
    body, headers = form(("model", "tiny"), ("model", "other"))
    response = await gateway.ask(path, body, headers=headers)
    assert (response.status, response.json["error"]["param"]) == (400, "model")
    assert backend.requests == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b'"x"',
        b'{"model":"tiny"',
        b"{'model':'tiny'}",
        b'{"model":"tiny"}x',
        b'{"model":7}',
        b"\xff\xfe{",
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/embeddings"])
async def test_what_is_no_json_object_is_a_400_that_says_so_in_the_endpoints_shape(
    make_gateway: MakeGateway, backend: ScriptedBackend, path: str, body: bytes
) -> None:
    gateway = await make_gateway(backend)
    response = await gateway.ask(path, body, method="POST")
    assert response.status == 400
    error = response.json["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert (response.json.get("type") == "error") is (path == "/v1/messages")
    assert backend.requests == []
    await gateway.ended(Outcome.BAD_REQUEST)


# -- how a body arrives ---------------------------------------------------------------------------------------

PLAIN = b'{"model":"tiny","messages":[{"role":"user","content":"' + b"hello " * 50 + b'"}]}'


def chunks(body: bytes, size: int, trailer: bytes = b"") -> bytes:
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces) + b"0\r\n" + trailer + b"\r\n"


def raw_deflate(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(body) + packer.flush()


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("trailer", [b"", b"x-checksum: 1\r\n"], ids=["", "trailer"])
async def test_a_chunked_body_goes_on_with_a_length(
    make_gateway: MakeGateway, backend: ScriptedBackend, size: int, trailer: bytes
) -> None:
    gateway = await make_gateway(backend)
    headers = {"transfer-encoding": "chunked"}
    response = await gateway.ask(CHAT, chunks(PLAIN, size, trailer), headers=headers)
    assert response.status == 200
    request = await backend.received()
    assert (request.body, request.header("content-length")) == (PLAIN, str(len(PLAIN)))
    assert request.header("transfer-encoding") is None
    await gateway.ended(Outcome.OK)


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        ("gzip", gzip.compress(PLAIN, mtime=0)),
        ("GZIP", gzip.compress(PLAIN, mtime=0)),
        ("deflate", zlib.compress(PLAIN)),
        ("deflate", raw_deflate(PLAIN)),
        ("identity", PLAIN),
        ("", PLAIN),
    ],
    ids=["gzip", "GZIP", "deflate", "raw deflate", "identity", "empty"],
)
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_a_compressed_body_is_unpacked(
    make_gateway: MakeGateway, backend: ScriptedBackend, encoding: str, packed: bytes, chunked: bool
) -> None:
    gateway = await make_gateway(backend)
    headers = {"content-encoding": encoding}
    if chunked:
        headers["transfer-encoding"] = "chunked"
    response = await gateway.ask(CHAT, chunks(packed, 11) if chunked else packed, headers=headers)
    assert response.status == 200
    request = await backend.received()
    assert request.body == PLAIN
    assert request.header("content-encoding") is None
    assert (await gateway.record()).bytes_in == len(PLAIN)


@pytest.mark.parametrize("encoding", ["compress", "gzip, gzip", "snappy", "\xff"])
async def test_a_packing_that_is_not_known_is_refused_by_its_name(
    make_gateway: MakeGateway, backend: ScriptedBackend, encoding: str
) -> None:
    gateway = await make_gateway(backend)
    response = await gateway.ask(CHAT, b"\x1f\x9d packed", headers={"content-encoding": encoding})
    assert response.status == 415
    assert "content-encoding" in response.json["error"]["message"]
    assert "gzip" in response.headers["accept-encoding"]
    assert backend.requests == []
    await gateway.ended(Outcome.BAD_REQUEST)


@pytest.mark.parametrize(
    "packed",
    [
        gzip.compress(PLAIN, mtime=0)[:-12],
        gzip.compress(PLAIN, mtime=0)[:20],
        b"not packed at all",
        gzip.compress(PLAIN, mtime=0)[:30] + b"\0" * 90,
    ],
    ids=["no end", "cut", "plain", "damaged"],
)
async def test_a_damaged_packing_is_a_400(
    make_gateway: MakeGateway, backend: ScriptedBackend, packed: bytes
) -> None:
    gateway = await make_gateway(backend)
    response = await gateway.ask(CHAT, packed, headers={"content-encoding": "gzip"})
    assert response.status == 400
    assert response.json["error"]["message"]
    assert backend.requests == []
    await gateway.ended(Outcome.BAD_REQUEST)


SMALL = "[server]\nport = 0\nmax_body_bytes = 2000\n"


def sized(length: int) -> bytes:
    empty = b'{"model":"tiny","user":""}'
    return empty[:-2] + b"x" * (length - len(empty)) + empty[-2:]


@pytest.mark.parametrize("way", ["length", "chunked", "gzip"])
@pytest.mark.parametrize("size", [2000, 2001, 50_000_000])
async def test_a_body_above_the_limit_is_refused_and_one_at_the_limit_is_not(
    make_gateway: MakeGateway, backend: ScriptedBackend, way: str, size: int
) -> None:
    gateway = await make_gateway(backend, config=SMALL)
    body, headers = sized(min(size, 5_000_000) if way != "gzip" else size), {}
    if way == "chunked":
        body, headers = chunks(body, 60_000), {"transfer-encoding": "chunked"}
    elif way == "gzip":
        body, headers = gzip.compress(body, 1, mtime=0), {"content-encoding": "gzip"}
    response = await gateway.ask(CHAT, body, headers=headers)
    if size <= 2000:
        assert response.status == 200
        await gateway.ended(Outcome.OK)
        return
    assert (response.status, response.json["error"]["code"]) == (413, "request_too_large")
    assert "2000" in response.json["error"]["message"]
    assert backend.requests == []
    await gateway.ended(Outcome.BAD_REQUEST)


async def test_on_messages_too_large_has_anthropics_shape(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=SMALL)
    response = await gateway.ask("/v1/messages", sized(3000))
    assert response.status == 413
    assert response.json["type"] == "error"
    assert response.json["error"]["type"] == "request_too_large"


EXPECT = {"expect": "100-continue"}


async def test_expect_100_continue_is_answered_before_the_body(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend)
    async with await gateway.connect() as connection:
        connection.send(CHAT, method="POST", headers={**EXPECT, "content-length": str(len(PLAIN))})
        await connection.read_continue()
        connection.send_more(PLAIN)
        response = await connection.read()
    assert (response.status, response.continued) == (200, True)
    request = await backend.received()
    assert (request.body, request.header("expect")) == (PLAIN, None)


@pytest.mark.parametrize(
    ("why", "headers", "path", "status"),
    [
        ("too large", {"content-length": "2001"}, CHAT, 413),
        ("no such path", {"content-length": "10"}, "/v1/nothing", 404),
        ("no key", {"content-length": "10", "authorization": "Bearer wrong"}, CHAT, 401),
    ],
)
async def test_a_refusal_that_needs_no_body_does_not_ask_for_it(
    make_gateway: MakeGateway,
    backend: ScriptedBackend,
    why: str,
    headers: dict[str, str],
    path: str,
    status: int,
) -> None:
    config = SMALL + '[[server.keys]]\nname = "team"\nkey = "env:K"\n'
    gateway = await make_gateway(backend, config=config, env={"K": "secret-key-of-ours"})
    asked = {"authorization": "Bearer secret-key-of-ours", **EXPECT, **headers}
    async with await gateway.connect() as connection:
        connection.send(path, method="POST", headers=asked)
        response = await connection.read()
    assert (response.status, response.continued) == (status, False)
    # The body may or may not follow: what comes next on this connection cannot be told apart.
    assert response.headers["connection"] == "close"


@pytest.mark.parametrize("sent", [0, 10], ids=["nothing came", "a part came"])
async def test_a_body_that_does_not_come_is_a_408_after_the_limit(
    make_gateway: MakeGateway, backend: ScriptedBackend, sent: int
) -> None:
    clock = FakeClock()
    config = "[server]\nport = 0\nbody_timeout = 20.0\n"
    gateway = await make_gateway(backend, config=config, clock=clock)
    async with await gateway.connect() as connection:
        connection.send(CHAT, method="POST", headers={**EXPECT, "content-length": str(len(PLAIN))})
        await connection.read_continue()
        connection.send_more(PLAIN[:sent])
        clock.advance(19.9)
        assert len(gateway.app.gateway.exchanges) == 1
        clock.advance(0.2)
        response = await connection.read()
    assert (response.status, response.json["error"]["code"]) == (408, "request_timeout")
    assert "20 s" in response.json["error"]["message"]
    assert response.headers["connection"] == "close"
    assert backend.requests == []
    await gateway.ended(Outcome.CLIENT_TIMEOUT)
