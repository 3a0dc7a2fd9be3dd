"""A stored response is its tenant's: for anybody else it is not there."""

from __future__ import annotations

import json

import pytest

from proxy.access import ANYBODY, Caller
from proxy.owners import Owners
from tests.proxy.conftest import Gateway, MakeGateway
from tests.scripted import Received, ScriptedBackend, Steps, json_answer

KEYS = """
[server]
port = 0
[[server.keys]]
name = "ann"
key = "env:ANN"
tenant = "research"
[[server.keys]]
name = "bob"
key = "env:BOB"
tenant = "research"
[[server.keys]]
name = "eve"
key = "env:EVE"
"""
ENV = {name: f"sk-{name.lower()}" for name in ("ANN", "BOB", "EVE")}


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {ENV[name]}"}


def as_vllm(request: Received) -> Steps:
    """Stores by the id that the request chooses, as vLLM does."""
    asked = json.loads(request.body) if request.body else {}
    ident = asked.get("request_id", "resp_1")
    return json_answer({"id": ident, "object": "response", "status": "completed", "output": []})


@pytest.fixture
async def gateway(make_gateway: MakeGateway, backend: ScriptedBackend) -> Gateway:
    """A response of ann's is stored."""
    backend.default = as_vllm
    made = await make_gateway(backend, config=KEYS, env=ENV)
    stored = await made.ask("/v1/responses", {"model": "tiny", "input": "secret"}, headers=bearer("ANN"))
    assert stored.json["id"] == "resp_1"
    return made


WAYS = [
    ("GET", "/v1/responses/resp_1", None),
    ("GET", "/v1/responses/resp_1?stream=true", None),
    ("GET", "/v1/responses/resp_1/input_items", None),
    ("POST", "/v1/responses/resp_1/cancel", None),
    ("DELETE", "/v1/responses/resp_1", None),
    ("POST", "/v1/responses", {"model": "tiny", "input": "go on", "previous_response_id": "resp_1"}),
]


@pytest.mark.parametrize(("method", "path", "body"), WAYS)
async def test_another_tenant_can_neither_read_nor_change_nor_go_on_from_it(
    gateway: Gateway, backend: ScriptedBackend, method: str, path: str, body: object
) -> None:
    before = len(backend.requests)
    response = await gateway.ask(path, body, method=method, headers=bearer("EVE"))
    nobodys = await gateway.ask(
        path.replace("resp_1", "resp_2"),
        body and {**body, "previous_response_id": "resp_2"},  # type: ignore[dict-item]
        method=method,
        headers=bearer("EVE"),
    )
    assert response.status == nobodys.status == 404
    assert response.body.replace(b"resp_1", b"") == nobodys.body.replace(b"resp_2", b"") or b"x-request-id"
    assert response.json["error"]["code"] == nobodys.json["error"]["code"]
    assert len(backend.requests) == before


@pytest.mark.parametrize(("method", "path", "body"), WAYS)
@pytest.mark.parametrize("who", ["ANN", "BOB"])
async def test_every_key_of_its_tenant_can(
    gateway: Gateway, method: str, path: str, body: object, who: str
) -> None:
    assert (await gateway.ask(path, body, method=method, headers=bearer(who))).status == 200


async def test_an_id_of_which_nothing_is_known_opens_nothing_where_keys_are_asked_for(
    gateway: Gateway, backend: ScriptedBackend
) -> None:
    """As after a restart: the one backend may still have it, and whose it is nobody knows."""
    before = len(backend.requests)
    assert (await gateway.ask("/v1/responses/resp_9", headers=bearer("ANN"))).status == 404
    assert len(backend.requests) == before


async def test_nobody_can_have_a_response_stored_by_the_id_of_somebody_elses(
    gateway: Gateway, backend: ScriptedBackend
) -> None:
    before = len(backend.requests)
    body = {"model": "tiny", "input": "forged", "request_id": "resp_1"}
    response = await gateway.ask("/v1/responses", body, headers=bearer("EVE"))
    assert (response.status, response.json["error"]["code"]) == (400, "request_id_in_use")
    raw = rb'{"model":"tiny","input":"x","request_id":"mine","request\u005fid":"resp_1"}'
    assert (await gateway.ask("/v1/responses", raw, headers=bearer("EVE"))).status == 400
    assert len(backend.requests) == before
    assert (await gateway.ask("/v1/responses", body, headers=bearer("BOB"))).status == 200
    assert (await gateway.ask("/v1/responses/resp_1", headers=bearer("ANN"))).status == 200


async def test_without_keys_everything_is_everybodys(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    backend.default = as_vllm
    gateway = await make_gateway(backend)
    await gateway.ask("/v1/responses", {"model": "tiny", "input": "x"})
    assert (await gateway.ask("/v1/responses/resp_1")).status == 200


def test_a_backend_that_repeats_an_id_gives_it_to_nobody_else() -> None:
    owners = Owners()
    owners.learn("r", "a", "research")
    owners.learn("r", "b", "eve")
    assert (owners.find("r"), owners.opens("r", "research"), owners.opens("r", "eve")) == ("a", True, False)
    owners.learn("s", "a")
    assert not owners.opens("s", "eve")
    assert owners.opens("r", None)


def test_a_key_without_a_tenant_is_its_own() -> None:
    assert [one.whose for one in (Caller("k", "t"), Caller("k"), ANYBODY)] == ["t", "k", None]


def test_the_ids_that_are_remembered_are_bounded() -> None:
    owners = Owners(limit=10)
    for number in range(1000):
        owners.learn(f"r{number}", "a", "research")
    owners.learn("x" * 10_000, "a", "research")
    assert len(owners._known) == 10
    assert not owners.opens("r0", "research")
