"""Who may ask, and whose credentials go where."""

from __future__ import annotations

import pytest

from proxy.errors import Outcome
from tests.proxy.conftest import CHAT, MakeGateway, chat
from tests.proxy.test_endpoints import PATHS, asked
from tests.scripted import ScriptedBackend, chat_json, chat_stream, error_json, json_answer

KEY, OTHER = "client-secret-key-one", "client-secret-key-two"
KEYS = """
[server]
port = 0
[[server.keys]]
name = "team"
key = "env:ONE"
[[server.keys]]
name = "other-team"
key = "env:TWO"
"""
ENV = {"ONE": KEY, "TWO": OTHER, "BACKEND": "backend-secret-key"}
HAS_KEY = {"a": 'key = "env:BACKEND"'}

GOOD = {
    "bearer": ({"authorization": f"Bearer {KEY}"}, "team"),
    "lower case": ({"authorization": f"bearer {OTHER}"}, "other-team"),
    "anthropic's": ({"x-api-key": KEY}, "team"),
    "both, one a placeholder": ({"authorization": "Bearer none", "x-api-key": OTHER}, "other-team"),
}
BAD = {
    "none": {},
    "empty": {"authorization": ""},
    "no scheme": {"authorization": KEY},
    "basic": {"authorization": f"Basic {KEY}"},
    "wrong": {"authorization": "Bearer wrong"},
    "a part": {"authorization": f"Bearer {KEY[:-1]}"},
    "more": {"authorization": f"Bearer {KEY}x"},
    "two": {"authorization": f"Bearer {KEY} {OTHER}"},
    "the backend's": {"authorization": "Bearer backend-secret-key"},
    "a cookie": {"cookie": f"key={KEY}"},
    "the name": {"authorization": "Bearer team"},
    "another header": {"api-key": KEY},
}


@pytest.mark.parametrize(("headers", "tenant"), GOOD.values(), ids=GOOD.keys())
async def test_a_key_lets_in_and_its_name_is_in_the_record(
    make_gateway: MakeGateway, backend: ScriptedBackend, headers: dict[str, str], tenant: str
) -> None:
    gateway = await make_gateway(backend, config=KEYS, env=ENV)
    assert (await gateway.chat(headers=headers)).status == 200
    assert (await gateway.record()).tenant == tenant
    await gateway.ended(Outcome.OK)


@pytest.mark.parametrize("headers", BAD.values(), ids=BAD.keys())
async def test_anything_else_is_a_401_in_the_endpoints_shape(
    make_gateway: MakeGateway, backend: ScriptedBackend, headers: dict[str, str]
) -> None:
    gateway = await make_gateway(backend, config=KEYS, env=ENV, per_backend=HAS_KEY)
    response = await gateway.chat(headers=headers)
    assert response.status == 401
    assert response.json["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    assert not any(secret in str(response) for secret in ENV.values())
    response = await gateway.ask("/v1/messages", chat(), headers=headers)
    assert (response.status, response.json["type"]) == (401, "error")
    assert response.json["error"]["type"] == "authentication_error"
    assert backend.requests == []
    assert (await gateway.record()).tenant is None
    await gateway.ended(Outcome.UNAUTHORIZED, Outcome.UNAUTHORIZED)


@pytest.mark.parametrize(
    "path", [*PATHS, "/v1/models", "/v1/models/tiny", "/v1/responses/resp_1", "/v1/nothing", "/", "/docs"]
)
async def test_every_path_but_the_four_needs_a_key(
    make_gateway: MakeGateway, backend: ScriptedBackend, path: str
) -> None:
    gateway = await make_gateway(backend, config=KEYS, env=ENV)
    backend.default = json_answer({"id": "resp_1", "object": "response"})
    body, headers = asked(path)
    post = path in PATHS
    refused = await gateway.ask(path, body if post else None, headers=headers if post else None)
    assert refused.status == 401
    assert backend.requests == []
    key = {"authorization": f"Bearer {KEY}"}
    caller = gateway.app.gateway.callers.find({"Authorization": f"Bearer {KEY}"}, 0.0)
    assert caller is not None
    gateway.app.gateway.owners.learn("resp_1", "a", caller.whose)
    let_in = await gateway.ask(path, body if post else None, headers={**(headers if post else {}), **key})
    assert let_in.status == (404 if path in ("/v1/nothing", "/", "/docs") else 200)


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics"])
@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}], ids=["none", "wrong"])
async def test_those_need_none(
    make_gateway: MakeGateway, backend: ScriptedBackend, path: str, headers: dict[str, str]
) -> None:
    gateway = await make_gateway(backend, config=KEYS, env=ENV)
    assert (await gateway.ask(path, headers=headers)).status == 200


async def test_which_paths_are_open_is_the_operators_choice(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    config = KEYS.replace("port = 0\n", 'port = 0\npublic_paths = ["/health", "/v1/models", "/tokenize"]\n')
    gateway = await make_gateway(backend, config=config, env=ENV)
    assert [(await gateway.ask(p)).status for p in ("/health", "/v1/models")] == [200, 200]
    assert [(await gateway.ask(p, chat())).status for p in ("/tokenize", CHAT)] == [200, 401]
    assert [(await gateway.ask(p)).status for p in ("/metrics", "/ready", "/version")] == [401, 401, 401]
    key = {"x-api-key": KEY}
    assert [(await gateway.ask(p, headers=key)).status for p in ("/metrics", "/ready", "/version")] == [
        200,
        200,
        200,
    ]


# -- to the backend -------------------------------------------------------------------------------------------

CREDENTIALS = {"authorization": f"Bearer {KEY}", "x-api-key": KEY, "api-key": KEY, "cookie": f"session={KEY}"}


@pytest.mark.parametrize("gateway_keys", [False, True], ids=["gateway open", "gateway has keys"])
@pytest.mark.parametrize("backend_key", [False, True], ids=["backend open", "backend has a key"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_clients_credentials_pass_only_if_neither_side_has_keys(
    make_gateway: MakeGateway, backend: ScriptedBackend, gateway_keys: bool, backend_key: bool, stream: bool
) -> None:
    gateway = await make_gateway(
        backend,
        config=KEYS if gateway_keys else "",
        per_backend=HAS_KEY if backend_key else None,
        env=ENV,
    )
    assert (await gateway.chat(stream=stream, headers={**CREDENTIALS, "x-other": "1"})).status == 200
    request = await backend.received()
    assert request.header("x-other") == "1"
    passes = not gateway_keys and not backend_key
    for name, value in CREDENTIALS.items():
        expected = value if passes else None
        if name == "authorization" and backend_key:
            expected = "Bearer backend-secret-key"
        assert request.header(name) == expected, name
    assert (KEY.encode() in request.head) is passes


async def test_a_backends_key_goes_to_that_backend_alone(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, other, per_backend=HAS_KEY, env=ENV)
    while not (backend.requests and other.requests):
        await gateway.chat(headers={"authorization": "Bearer the-clients-own"})
    assert {r.header("authorization") for r in backend.requests} == {"Bearer backend-secret-key"}
    assert {r.header("authorization") for r in other.requests} == {"Bearer the-clients-own"}


async def test_a_clients_key_is_in_no_record(make_gateway: MakeGateway, backend: ScriptedBackend) -> None:
    gateway = await make_gateway(backend, config=KEYS, env=ENV, per_backend=HAS_KEY)
    await gateway.chat(headers=CREDENTIALS)
    await gateway.chat()
    shown = str(gateway.records.closed)
    assert "team" in shown
    assert not any(secret in shown for secret in ENV.values())


# -- what the backend says of a key ---------------------------------------------------------------------------


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("gateway_keys", [False, True], ids=["gateway open", "gateway has keys"])
@pytest.mark.parametrize("backend_key", [False, True], ids=["backend open", "backend has a key"])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/embeddings"])
async def test_a_backends_no_is_the_clients_only_if_the_clients_own_key_was_sent(
    make_gateway: MakeGateway,
    backend: ScriptedBackend,
    status: int,
    gateway_keys: bool,
    backend_key: bool,
    path: str,
) -> None:
    gateway = await make_gateway(
        backend,
        config=KEYS if gateway_keys else "",
        per_backend=HAS_KEY if backend_key else None,
        env=ENV,
    )
    words = [("www-authenticate", 'Bearer realm="backend"')]
    backend.answer(error_json(status, "bad key backend-secret-key", type="AuthError", headers=words))
    response = await gateway.ask(path, chat(), headers=CREDENTIALS)
    error = response.json["error"]
    if gateway_keys or backend_key:
        assert response.status == 502
        assert "backend-secret-key" not in str(response)
        assert "'a'" in error["message"]
        assert "www-authenticate" not in response.headers
        assert path == "/v1/messages" or error["code"] == "upstream_auth"
        await gateway.ended(Outcome.UPSTREAM_ERROR)
    else:
        assert response.status == status
        assert "bad key" in error["message"]
        assert response.headers["www-authenticate"] == 'Bearer realm="backend"'
        await gateway.ended(Outcome.UPSTREAM_REJECTED)
    assert response.headers["x-tierline-backend"] == "a"


# -- redirects ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [300, 301, 302, 303, 304, 307, 308])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_redirect_is_never_followed(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend, status: int, stream: bool
) -> None:
    gateway = await make_gateway(backend)
    elsewhere = [("location", f"{other.url}{CHAT}"), ("set-cookie", "a=b")]
    backend.answer(json_answer({}, status, headers=elsewhere)[: 1 if status == 304 else 2])
    response = await gateway.chat(stream=stream)
    assert (response.status, response.json["error"]["code"]) == (502, "upstream_redirect")
    assert "location" not in response.headers
    assert other.url not in str(response)
    assert other.requests == other.polls == []
    assert len(backend.requests) == 1
    await gateway.ended(Outcome.UPSTREAM_ERROR)


async def test_cookies_and_locations_of_a_good_answer_are_the_backends_own(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend)
    headers = [("location", "/v1/x"), ("set-cookie", "a=b")]
    backend.answer(chat_json(headers=headers), chat_stream(headers=headers))
    for stream in (False, True):
        response = await gateway.chat(stream=stream)
        assert (response.values("location"), response.values("set-cookie")) == (["/v1/x"], ["a=b"])
