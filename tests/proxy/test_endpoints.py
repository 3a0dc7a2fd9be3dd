"""Which paths there are, where each one goes, and what the gateway answers itself."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from proxy import __version__
from proxy.endpoints import RELAYED, Body
from proxy.errors import Outcome
from tests.proxy.conftest import CHAT, Gateway, MakeGateway, chat
from tests.proxy.test_bytes import form
from tests.scripted import ScriptedBackend, error_json, event, json_answer, sse, whole

# The issue's list, by hand: what is missing in the code must fail here.
ISSUE = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/pooling",
    "/classify",
    "/tokenize",
    "/detokenize",
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
]
PATHS = [*ISSUE, *(path for path in RELAYED if path not in ISSUE)]
KEYS = '[server]\nport = 0\n[[server.keys]]\nname = "team"\nkey = "env:K"\n'
ENV = {"K": "secret-key-of-ours"}


def asked(path: str) -> tuple[bytes, dict[str, str]]:
    endpoint = RELAYED.get(path)
    if endpoint is not None and endpoint.body is Body.FORM:
        return form(("model", "tiny"))
    return b'{"model":"tiny","x":1}', {"content-type": "application/json"}


# -- to a backend ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("prefix", ["", "/engines/one", "/deep/er/"], ids=["root", "prefix", "slash"])
async def test_each_path_reaches_the_backend_under_its_prefix_with_its_query(
    make_gateway: MakeGateway, backend: ScriptedBackend, path: str, prefix: str
) -> None:
    gateway = await make_gateway(backend.url + prefix)
    backend.default = json_answer({"ok": path})
    body, headers = asked(path)
    for query in ("", "?beta=true&a=%2F%20b&c", "?"):
        response = await gateway.ask(path + query, body, headers=headers)
        assert (response.status, response.json) == (200, {"ok": path})
    posts = [r for r in backend.requests if r.method == "POST"]  # under a prefix, polls are requests, too
    targets = [r.target for r in posts]
    base = prefix.rstrip("/") + path
    assert targets == [base, base + "?beta=true&a=%2F%20b&c", base + "?"]
    assert posts[-1].body == body
    record = await gateway.record(1)
    assert (record.path, record.model, record.tier, record.backend) == (path, "tiny", "balanced", "a")
    await gateway.ended(*[Outcome.OK] * 3)


@pytest.mark.parametrize("path", PATHS)
async def test_they_take_post_alone(make_gateway: MakeGateway, backend: ScriptedBackend, path: str) -> None:
    gateway = await make_gateway(backend)
    methods = ["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"]
    for method in methods:
        response = await gateway.ask(path, method=method, headers={"connection": "close"})
        assert (response.status, response.headers["allow"]) == (405, "POST")
        if method != "HEAD":
            error = response.json["error"]
            assert method in error["message"]
            assert error["type"] == "invalid_request_error"
    assert backend.requests == []
    await gateway.ended(*[Outcome.BAD_REQUEST] * len(methods))


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "/v1",
        "/v1/",
        "/favicon.ico",
        "/v1/files",
        "/v1/chat/completions/",
        "//v1/chat/completions",
        "/v1/v1/chat/completions",
        "/chat/completions",
        "/V1/chat/completions",
        "/v1/chat%2Fcompletions",
        "/v1/../v1/chat/completions",
        "/v1/./chat/completions",
        "/v1/chat/completions;x=1",
        "/load_lora_adapter",
        "/v1/load_lora_adapter",
        "/sleep",
        "/reset_prefix_cache",
        "/v1/responses/",
        "/v1/responses/../chat/completions",
        "/v1/responses/..%2f..%2fsleep",
        "/v1/responses/%2e%2e/sleep",
        "/v1/responses/a/../../../sleep",
        "/v1/responses/a/b",
        "/v1/responses//sleep",
        "/v1/responses/./a",
        "/v1/responses/a\\..\\b",
        "/v1/audio/",
        "/admin/state",
        "/health/",
        "/metrics/x",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_any_other_path_is_an_openai_shaped_404_and_no_backend_hears_of_it(
    make_gateway: MakeGateway, backend: ScriptedBackend, target: str, method: str
) -> None:
    gateway = await make_gateway(backend)
    async with await gateway.connect() as connection:
        connection.send_raw(
            f"{method} {target} HTTP/1.1\r\nhost: x\r\ncontent-length: 16\r\n\r\n".encode("latin-1")
            + b'{"model":"tiny"}'
        )
        response = await connection.read()
    assert response.status == 404
    error = response.json["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "unknown_url", None)
    assert method in error["message"]
    assert backend.requests == []
    await gateway.ended(Outcome.BAD_REQUEST)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", CHAT),
        ("/v1/v1/chat/completions", CHAT),
        ("/v1/chat/completions/", CHAT),
        ("/openai/v1/embeddings", "/v1/embeddings"),
        ("/messages", "/v1/messages"),
        ("/models", "/v1/models"),
        ("/v1/nothing", None),
    ],
)
async def test_a_path_a_bit_off_is_told_the_right_one(
    make_gateway: MakeGateway, backend: ScriptedBackend, path: str, meant: str | None
) -> None:
    gateway = await make_gateway(backend)
    message = (await gateway.ask(path, chat())).json["error"]["message"]
    assert ("mean" in message) is (meant is not None)
    assert meant is None or message.endswith(f"{meant}?")


@pytest.mark.parametrize("base", ["http://gateway", "HTTP://gateway:8080", "https://user@gateway"])
async def test_a_whole_url_as_the_target_means_its_path(
    make_gateway: MakeGateway, backend: ScriptedBackend, base: str
) -> None:
    gateway = await make_gateway(backend)
    assert (await gateway.ask(f"{base}{CHAT}?a=b", chat())).status == 200
    assert (await backend.received()).target == f"{CHAT}?a=b"
    assert (await gateway.ask(f"{base}/v1/models")).json["data"][0]["id"] == "tiny"
    assert (await gateway.ask(base)).status == 404


@pytest.mark.parametrize(
    "target", ["/\xff", "/v1/chat/completions?q=\xe9", "*", "v1/models", "/v1/models\x00", "/a b"]
)
async def test_a_target_that_http_does_not_allow_is_a_400_in_the_same_shape(
    make_gateway: MakeGateway, backend: ScriptedBackend, target: str
) -> None:
    gateway = await make_gateway(backend)
    async with await gateway.connect() as connection:
        connection.send_raw(f"GET {target} HTTP/1.1\r\nhost: x\r\n\r\n".encode("latin-1"))
        response = await connection.read()
    assert (response.status, response.json["error"]["code"]) == (400, "bad_http")
    assert backend.requests == []


async def test_speech_is_piped_and_its_length_kept(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend)
    sound = bytes(range(256)) * 1000
    backend.answer(whole(sound, content_type="audio/mpeg"))
    response = await gateway.ask("/v1/audio/speech", {"model": "tiny", "input": "hi", "voice": "x"})
    assert (response.body, response.headers["content-type"]) == (sound, "audio/mpeg")
    assert response.headers["content-length"] == str(len(sound))
    await gateway.ended(Outcome.OK)


# -- stored responses -----------------------------------------------------------------------------------------


def stored(ident: str) -> list[object]:
    return list(json_answer({"id": ident, "object": "response", "status": "completed", "output": []}))


def stored_stream(ident: str) -> list[object]:
    response = {"id": ident, "object": "response", "status": "in_progress"}
    made = {"type": "response.created", "sequence_number": 0, "response": response}
    done = {
        "type": "response.completed",
        "sequence_number": 1,
        "response": {**response, "status": "completed"},
    }
    return list(sse(event(made, "response.created"), event(done, "response.completed"), done=False))


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
async def test_what_refers_to_a_response_goes_to_the_backend_that_made_it(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend, streamed: bool
) -> None:
    gateway = await make_gateway(backend, other)
    make = stored_stream if streamed else stored
    backend.default = lambda request: make("resp_of_a")  # type: ignore[return-value,arg-type]
    other.default = lambda request: make("resp_of_b")  # type: ignore[return-value,arg-type]
    made: dict[str, str] = {}
    while len(made) < 2:  # until either has made one
        response = await gateway.ask("/v1/responses", {"model": "tiny", "input": "hi", "stream": streamed})
        which = response.headers["x-tierline-backend"]
        made[f"resp_of_{which}"] = which
    for ident, which in made.items():
        maker = backend if which == "a" else other
        backend.default = other.default = json_answer(
            {"id": "resp_new", "object": "response", "status": "completed"}
        )
        for method, path, body in (
            ("POST", "/v1/responses", {"model": "tiny", "input": "on", "previous_response_id": ident}),
            ("GET", f"/v1/responses/{ident}", None),
            ("GET", f"/v1/responses/{ident}?include=a", None),
            ("GET", f"/v1/responses/{ident}/input_items", None),
            ("POST", f"/v1/responses/{ident}/cancel", None),
            ("DELETE", f"/v1/responses/{ident}", None),
        ):
            response = await gateway.ask(path, body, method=method)
            assert (response.status, response.headers["x-tierline-backend"]) == (200, which)
            assert response.headers["x-tierline-reason"] == "pinned"
            assert (maker.requests[-1].method, maker.requests[-1].target) == (method, path)
    gateway.assert_idle()


async def test_an_id_that_nobody_knows_is_a_404_where_several_could_have_made_it(
    make_gateway: MakeGateway, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, other)
    got = await gateway.ask("/v1/responses/resp_nobodys")
    said = await gateway.ask(
        "/v1/responses", {"model": "tiny", "input": "x", "previous_response_id": "resp_nobodys"}
    )
    assert (got.status, got.json["error"]["code"]) == (404, "response_not_found")
    assert (said.status, said.json["error"]["code"]) == (404, "previous_response_not_found")
    assert "resp_nobodys" in said.json["error"]["message"]
    assert backend.requests == other.requests == []


async def test_a_single_backend_is_asked_for_it(make_gateway: MakeGateway, backend: ScriptedBackend) -> None:
    gateway = await make_gateway(backend)
    backend.default = error_json(404, "no such response", type="NotFoundError")
    response = await gateway.ask("/v1/responses/resp_x")
    assert (response.status, response.json["error"]["message"]) == (404, "no such response")
    assert backend.requests[0].target == "/v1/responses/resp_x"
    await gateway.ended(Outcome.UPSTREAM_REJECTED)


@pytest.mark.parametrize(
    ("path", "method", "allow"),
    [
        ("/v1/responses/resp_1", "POST", "GET, DELETE"),
        ("/v1/responses/resp_1", "PUT", "GET, DELETE"),
        ("/v1/responses/resp_1/cancel", "GET", "POST"),
        ("/v1/responses/resp_1/input_items", "DELETE", "GET"),
    ],
)
async def test_a_stored_response_takes_its_own_methods(
    make_gateway: MakeGateway, backend: ScriptedBackend, path: str, method: str, allow: str
) -> None:
    gateway = await make_gateway(backend)
    response = await gateway.ask(path, method=method)
    assert (response.status, response.headers["allow"]) == (405, allow)
    assert backend.requests == []


# -- the gateway's own pages ----------------------------------------------------------------------------------

OWN = ["/health", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/tiny"]


@pytest.mark.parametrize("path", OWN)
async def test_head_gives_the_head_of_get(
    make_gateway: MakeGateway, backend: ScriptedBackend, path: str
) -> None:
    # A window that is found out between the two would change the pages.
    gateway = await make_gateway(backend, per_backend={"a": "limits.window_tokens = 4096"})
    got = await gateway.ask(path)
    head = await gateway.ask(path, method="HEAD", headers={"connection": "close"})
    assert (got.status, head.status, head.body) == (200, 200, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    if path != "/metrics":  # it counts between the two
        assert head.headers["content-length"] == got.headers["content-length"]
    assert gateway.records.closed == []


@pytest.mark.parametrize("path", OWN)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
async def test_they_take_get_alone(
    make_gateway: MakeGateway, backend: ScriptedBackend, path: str, method: str
) -> None:
    gateway = await make_gateway(backend)
    response = await gateway.ask(path, {}, method=method)
    assert (response.status, response.headers["allow"]) == (405, "GET, HEAD")


MODELS = """
[models."org/Big-7B"]
backends = ["a"]
tier = "exact"
[models.quick]
alias_of = "org/Big-7B"
tier = "fast"
[models."gpt:5@x"]
backends = ["a"]
"""


async def models(make_gateway: MakeGateway, backend: ScriptedBackend) -> Gateway:
    limits = "quality.reference = true\nlimits.window_tokens = 8192"
    return await make_gateway(backend, config=MODELS, per_backend={"a": limits})


async def test_the_models_are_the_public_names_with_window_and_tier(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await models(make_gateway, backend)
    listed = (await gateway.ask("/v1/models")).json
    assert listed["object"] == "list"
    found = {m["id"]: (m["object"], m["max_model_len"], m["tier"]) for m in listed["data"]}
    assert found == {
        "org/Big-7B": ("model", 8192, "exact"),
        "quick": ("model", 8192, "fast"),
        "gpt:5@x": ("model", 8192, "balanced"),
    }
    assert [m for m in listed["data"] if set(m) < {"id", "object", "created", "owned_by"}] == []


@pytest.mark.parametrize(
    "spelt", ["org/Big-7B", "org%2FBig-7B", "%6Frg/Big-7B", "gpt:5@x", "gpt%3A5%40x", "quick?x=1"]
)
async def test_a_model_is_found_by_its_id_slashes_or_not(
    make_gateway: MakeGateway, backend: ScriptedBackend, spelt: str
) -> None:
    gateway = await models(make_gateway, backend)
    response = await gateway.ask(f"/v1/models/{spelt}")
    listed = {m["id"]: m for m in (await gateway.ask("/v1/models")).json["data"]}
    assert response.status == 200
    assert response.json == listed[response.json["id"]]


@pytest.mark.parametrize("name", ["nope", "org", "org/", "ORG/Big-7B", "../health", "", "\xff", "x" * 5000])
async def test_an_unknown_model_is_a_404_with_its_name(
    make_gateway: MakeGateway, backend: ScriptedBackend, name: str
) -> None:
    gateway = await models(make_gateway, backend)
    response = await gateway.ask(f"/v1/models/{quote(name)}")
    error = response.json["error"]
    assert (response.status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert name[:100] in error["message"]
    assert len(response.body) < 1000


async def test_health_ready_version_and_metrics(make_gateway: MakeGateway, backend: ScriptedBackend) -> None:
    gateway = await make_gateway(backend)
    assert (await gateway.ask("/health")).json == {"status": "ok"}
    assert (await gateway.ask("/version")).json == {"version": __version__}
    await gateway.chat()
    page = await gateway.ask("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    assert b"tierline_requests_total{" in page.body
    page = await gateway.ask(
        "/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0;q=0.5"}
    )
    assert page.headers["content-type"].startswith("application/openmetrics-text")
    assert page.body.endswith(b"# EOF\n")
    ready = (await gateway.ask("/ready")).json
    assert ready["status"] == "ready"
    assert ready["models"]["tiny"] == {"ready": True, "backends": ["a"], "not": {}}


async def test_ready_is_503_when_a_model_has_nobody_and_names_why(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend)
    gateway.app.pool.set_draining("a", True)
    ready = await gateway.ask("/ready")
    assert ready.status == 503
    assert ready.json["models"]["tiny"] == {"ready": False, "backends": [], "not": {"a": "draining"}}
    assert (await gateway.ask("/health")).status == 200  # alive it is
    gateway.app.pool.set_draining("a", False)
    assert (await gateway.ask("/ready")).status == 200
