"""Which headers pass, which are ours, and which stay on their side of the gateway."""

from __future__ import annotations

import re

import pytest

from proxy.errors import Outcome
from tests.client import Response
from tests.proxy.conftest import CHAT, Gateway, MakeGateway, chat
from tests.scripted import ScriptedBackend, chat_json, chat_stream, error_json

BODY = b'{"model":"tiny"}'


async def ask_raw(gateway: Gateway, headers: str, path: str = CHAT) -> Response:
    """A request whose headers are sent as they are: repeated, oddly spelt, in any bytes (latin-1)."""
    head = f"POST {path} HTTP/1.1\r\nhost: gateway\r\ncontent-length: {len(BODY)}\r\n{headers}\r\n"
    async with await gateway.connect() as connection:
        connection.send_raw(head.encode("latin-1") + BODY)
        return await connection.read()


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


# -- to the backend -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [
        "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "tracestate: vendor=1,other=2",
        "baggage: user=7",
        "user-agent: OpenAI/Python 2.0",
        "accept: text/event-stream",
        "content-type: application/json; charset=utf-8",
        "anthropic-version: 2023-06-01",
        "anthropic-beta: one,two",
        "openai-organization: org",
        "x-stainless-retry-count: 0",
        "x-custom: caf\xe9 \xff",
        "X-MiXeD-CaSe: kept",
        "x-empty: ",
        "x-data-parallel-rank: 3",
        "priority: u=1",
    ],
)
async def test_end_to_end_headers_pass_as_they_came(
    make_gateway: MakeGateway, backend: ScriptedBackend, header: str
) -> None:
    gateway = await make_gateway(backend)
    assert (await ask_raw(gateway, header + "\r\n")).status == 200
    assert header.encode("latin-1") + b"\r\n" in (await backend.received()).head


async def test_a_header_sent_twice_arrives_twice_and_in_order(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend)
    await ask_raw(gateway, "x-a: 1\r\nx-b: 2\r\nx-a: 3\r\n")
    sent = [pair for pair in (await backend.received()).headers if pair[0] in ("x-a", "x-b")]
    assert sent == [("x-a", "1"), ("x-b", "2"), ("x-a", "3")]


@pytest.mark.parametrize(
    ("headers", "gone"),
    [
        ("connection: keep-alive\r\nkeep-alive: timeout=5\r\n", ["connection", "keep-alive"]),
        ("connection: close\r\n", ["connection"]),
        ("connection: x-hop, X-Other\r\nx-hop: 1\r\nx-OTHER: 2\r\n", ["connection", "x-hop", "x-other"]),
        ("connection: x-a\r\nconnection: x-b\r\nx-a: 1\r\nx-b: 2\r\n", ["x-a", "x-b"]),
        ("te: trailers\r\n", ["te"]),
        ("trailer: x-sum\r\n", ["trailer"]),
        ("proxy-authorization: Basic x\r\n", ["proxy-authorization"]),
        ("proxy-connection: keep-alive\r\n", ["proxy-connection"]),
        (
            "connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMA\r\n",
            ["upgrade", "http2-settings"],
        ),
        ("x-quality-tier: fast\r\n", ["x-quality-tier"]),
        ("expect: 100-continue\r\n", ["expect"]),
    ],
)
async def test_hop_by_hop_headers_and_those_that_connection_names_stay_here(
    make_gateway: MakeGateway, backend: ScriptedBackend, headers: str, gone: list[str]
) -> None:
    gateway = await make_gateway(backend)
    response = await ask_raw(gateway, headers + "x-kept: 1\r\n")
    assert response.status == 200
    request = await backend.received()
    assert request.body == BODY
    assert request.header("x-kept") == "1"
    for name in gone:
        assert request.header(name) is None, name
    await gateway.ended(Outcome.OK)


async def test_connection_cannot_name_away_what_the_gateway_says(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, per_backend={"a": 'key = "env:K"'}, env={"K": "backend-secret-key"})
    named = "authorization, x-request-id, content-length, host, accept-encoding"
    await ask_raw(gateway, f"connection: {named}\r\n")
    request = await backend.received()
    assert request.header("authorization") == "Bearer backend-secret-key"
    assert request.header("content-length") == str(len(BODY))
    assert request.header("accept-encoding") == "identity"
    assert request.header("host") == backend.url.removeprefix("http://")
    assert request.header("x-request-id")


@pytest.mark.parametrize("asked", [None, "gzip, deflate, br", "identity;q=0, *"])
async def test_the_backend_is_asked_for_plain_bytes_whatever_the_client_takes(
    make_gateway: MakeGateway, backend: ScriptedBackend, asked: str | None
) -> None:
    gateway = await make_gateway(backend)
    await gateway.chat(headers={"accept-encoding": asked} if asked else None)
    request = await backend.received()
    assert request.header("accept-encoding") == "identity"
    assert request.header("host") == backend.url.removeprefix("http://")


# -- x-request-id ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ident", ["abc", "0af7651916cd43dd8448eb211c80319c", "a.b_c:d/e+f=g@h-1", "x" * 128])
async def test_a_request_id_that_is_fit_for_a_log_is_kept_everywhere(
    make_gateway: MakeGateway, backend: ScriptedBackend, ident: str, stream: bool
) -> None:
    gateway = await make_gateway(backend)
    backend.answer(
        chat_stream(headers=[("x-request-id", "backends-own")])
        if stream
        else chat_json(headers=[("X-Request-Id", "backends-own")])
    )
    response = await gateway.chat(stream=stream, headers={"x-request-id": ident})
    assert response.values("x-request-id") == [ident]
    assert (await backend.received()).header("x-request-id") == ident
    assert (await gateway.record()).request_id == ident


@pytest.mark.parametrize(
    "ident", [None, "", "two words", "x" * 129, 'a"b', "a;b", "<script>", "\xff\xfe", "a\tb"]
)
async def test_any_other_is_replaced_by_a_new_one_everywhere(
    make_gateway: MakeGateway, backend: ScriptedBackend, ident: str | None
) -> None:
    gateway = await make_gateway(backend)
    header = "" if ident is None else f"x-request-id: {ident}\r\n"
    first, second = await ask_raw(gateway, header), await ask_raw(gateway, header)
    made = first.headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", made)
    assert made != second.headers["x-request-id"]
    assert backend.requests[0].header("x-request-id") == made
    assert (await gateway.record()).request_id == made


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [("/v1/nothing", "POST", 404), (CHAT, "GET", 405), ("/health", "GET", 200), ("/v1/models/x", "GET", 404)],
)
async def test_what_the_gateway_answers_itself_has_the_id_too(
    make_gateway: MakeGateway, backend: ScriptedBackend, path: str, method: str, status: int
) -> None:
    gateway = await make_gateway(backend)
    response = await gateway.ask(path, method=method, headers={"x-request-id": "mine"})
    assert (response.status, response.values("x-request-id")) == (status, ["mine"])


# -- back to the client ---------------------------------------------------------------------------------------

UPSTREAM = [
    ("date", "Mon, 30 Nov 2026 12:00:00 GMT"),
    ("server", "uvicorn"),
    ("openai-processing-ms", "12"),
    ("x-ratelimit-remaining", "9"),
    ("set-cookie", "a=1"),
    ("set-cookie", "b=2"),
    ("x-odd", "caf\xe9"),
    ("cache-control", "no-cache"),
]


async def test_the_backends_headers_pass_as_they_came(
    make_gateway: MakeGateway, backend: ScriptedBackend, stream: bool
) -> None:
    gateway = await make_gateway(backend)
    backend.answer(chat_stream(headers=UPSTREAM) if stream else chat_json(headers=UPSTREAM))
    response = await gateway.chat(stream=stream)
    assert [pair for pair in response.header_list if pair in UPSTREAM] == UPSTREAM


async def test_the_backends_hop_by_hop_headers_and_words_in_our_name_do_not(
    make_gateway: MakeGateway, backend: ScriptedBackend, stream: bool
) -> None:
    gateway = await make_gateway(backend)
    headers = [
        ("connection", "x-hop"),
        ("x-hop", "1"),
        ("keep-alive", "timeout=5"),
        ("proxy-authenticate", "Basic"),
        ("x-tierline-backend", "somebody"),
        ("X-Tierline-Tier", "exact"),
        ("x-tierline-reason", "magic"),
        ("access-control-allow-origin", "*"),
        ("access-control-allow-credentials", "true"),
        ("alt-svc", 'h3=":443"'),
        ("strict-transport-security", "max-age=1"),
    ]
    backend.answer(chat_stream(headers=headers) if stream else chat_json(headers=headers))
    response = await gateway.chat(stream=stream)
    assert response.status == 200
    assert response.values("x-tierline-backend") == ["a"]
    assert response.values("x-tierline-tier") == ["balanced"]
    assert response.values("x-tierline-reason") == ["only"]
    for name, _ in headers:
        if not name.lower().startswith("x-tierline"):
            assert response.values(name) == [], name


async def test_an_error_says_which_backend_too_and_keeps_retry_after(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend)
    headers = [("retry-after", "7"), ("x-should-retry", "false"), ("x-tierline-tier", "z"), ("etag", '"1"')]
    backend.answer(error_json(429, "slow down", headers=headers))
    response = await gateway.chat()
    assert response.status == 429
    assert (response.values("retry-after"), response.values("x-should-retry")) == (["7"], ["false"])
    assert response.values("x-tierline-backend") == ["a"]
    assert response.values("x-tierline-tier") == ["balanced"]
    assert response.values("content-type") == ["application/json"]
    assert response.values("etag") == []


async def test_a_framing_header_comes_once(
    make_gateway: MakeGateway, backend: ScriptedBackend, stream: bool
) -> None:
    gateway = await make_gateway(backend)
    response = await gateway.chat(stream=stream)
    framing = response.values("content-length") + response.values("transfer-encoding")
    assert framing == (["chunked"] if stream else [str(len(response.body))])


# -- CORS -----------------------------------------------------------------------------------------------------

ORIGIN = "https://app.example.org"
CORS = f'[server]\nport = 0\ncors_origins = ["{ORIGIN}"]\n'
ANY = '[server]\nport = 0\ncors_origins = ["*"]\n'
ASK = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,x-stainless-os",
}


def cors(response: Response) -> dict[str, str]:
    prefix = "access-control-"
    return {k.removeprefix(prefix): v for k, v in response.headers.items() if k.startswith(prefix)}


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/v1/responses/resp_1", "/health"])
async def test_a_preflight_from_a_configured_origin_needs_no_key(
    make_gateway: MakeGateway, backend: ScriptedBackend, path: str
) -> None:
    keys = '[[server.keys]]\nname = "team"\nkey = "env:K"\n'
    gateway = await make_gateway(backend, config=CORS + keys, env={"K": "secret-key-of-ours"})
    response = await gateway.ask(path, method="OPTIONS", headers={"origin": ORIGIN, **ASK})
    assert (response.status, response.body) == (204, b"")
    said = cors(response)
    assert said["allow-origin"] == ORIGIN
    assert "POST" in said["allow-methods"]
    assert said["allow-headers"] == "authorization,x-stainless-os"
    assert "origin" in response.headers["vary"].lower()
    assert backend.requests == []
    assert gateway.records.closed == []


@pytest.mark.parametrize(
    ("config", "origin"),
    [
        ("", ORIGIN),
        (CORS, "https://evil.example.org"),
        (CORS, "null"),
        (CORS, None),
        (CORS, ORIGIN + ".evil.org"),
        (ANY, None),
    ],
)
async def test_any_other_preflight_is_a_405_without_a_word_of_cors(
    make_gateway: MakeGateway, backend: ScriptedBackend, config: str, origin: str | None
) -> None:
    gateway = await make_gateway(backend, config=config)
    headers = ASK if origin is None else {"origin": origin, **ASK}
    response = await gateway.ask(CHAT, method="OPTIONS", headers=headers)
    assert response.status == 405
    assert cors(response) == {}
    await gateway.ended(Outcome.BAD_REQUEST)


@pytest.mark.parametrize(
    ("config", "origin", "allowed"),
    [
        ("", ORIGIN, None),
        (CORS, ORIGIN, ORIGIN),
        (CORS, "https://evil.example.org", None),
        (ANY, "https://x.org", "*"),
    ],
)
async def test_answers_say_who_may_read_them_and_the_backends_word_does_not_count(
    make_gateway: MakeGateway,
    backend: ScriptedBackend,
    stream: bool,
    config: str,
    origin: str,
    allowed: str | None,
) -> None:
    gateway = await make_gateway(backend, config=config)
    loose = [("access-control-allow-origin", "*"), ("Access-Control-Allow-Headers", "*"), ("vary", "Accept")]
    backend.answer(chat_stream(headers=loose) if stream else chat_json(headers=loose))
    answers = [
        await gateway.chat(stream=stream, headers={"origin": origin}),
        await gateway.ask("/v1/models", headers={"origin": origin}),
        await gateway.ask("/v1/nothing", headers={"origin": origin}),
        await gateway.ask(CHAT, chat(model="nope"), headers={"origin": origin}),
    ]
    # Without keys, a page from elsewhere gets nothing done (tests/security/test_browsers.py).
    assert [answer.status for answer in answers] == (
        [403, 200, 404, 403] if allowed is None else [200, 200, 404, 404]
    )
    for answer in answers:
        assert answer.values("access-control-allow-origin") == ([] if allowed is None else [allowed])
        assert ("access-control-expose-headers" in answer.headers) is (allowed is not None)
        assert answer.values("access-control-allow-credentials") == []
    assert allowed is None or "Accept" in answers[0].values("vary")


async def test_a_preflight_with_bytes_that_are_no_text_is_answered(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=ANY)
    async with await gateway.connect() as connection:
        connection.send_raw(
            b"OPTIONS /v1/models HTTP/1.1\r\nhost: x\r\norigin: https://\xff\r\n"
            b"access-control-request-headers: \xff, x-\xc3\xa9\r\n\r\n"
        )
        assert (await connection.read()).status == 204
