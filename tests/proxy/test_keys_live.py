"""Keys of the store and of the file in a running gateway: what changes is in force at once, and who may not, may not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from proxy.config import Tenant
from proxy.errors import Outcome
from proxy.keystore import Store, StoreError
from tests.client import Response
from tests.fake_clock import FakeClock
from tests.proxy.conftest import CHAT, Gateway, MakeGateway, chat
from tests.proxy.scenes import QUIET, eventually
from tests.scripted import ScriptedBackend, chat_json, json_answer

STORE = '[server]\nport = 0\nstore = "keys.db"\n'
MODELS = "[models.tiny]\n[models.other]\n[models.other-exact]\nalias_of = 'other'\ntier = 'exact'\n"
REFERENCE = {"a": "quality = { reference = true }"}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """As `tierline keys` opens it, beside the gateway."""
    opened = Store(str(tmp_path / "keys.db"))
    yield opened
    opened.close()


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


def make_key(
    gateway: Gateway, store: Store, name: str = "k", tenant: str = "team", **settings: object
) -> str:
    return store.add(gateway.app.clock.wall(), name, tenant, settings)[1]


def code_of(response: Response) -> tuple[int, str]:
    return response.status, response.json["error"]["code"]


# -- the store --------------------------------------------------------------------------------------------------


async def test_a_key_made_revoked_or_rotated_beside_the_gateway_is_in_force_within_a_second(
    make_gateway: MakeGateway, backend: ScriptedBackend, store: Store
) -> None:
    gateway = await make_gateway(backend, config=STORE)
    assert code_of(await gateway.chat()) == (401, "invalid_api_key")
    clock = gateway.app.clock
    before = gateway.app.gateway.callers
    text = make_key(gateway, store)
    changed = clock.now()
    await eventually(lambda: gateway.app.gateway.callers is not before, "the key")
    assert clock.now() - changed < 1.0
    assert (await gateway.chat(headers=bearer(text))).status == 200
    record = await gateway.record(1)
    assert (record.tenant, record.key) == ("team", text[:11])
    before = gateway.app.gateway.callers
    _, second = store.rotate(clock.wall(), "k", 3600.0)
    await eventually(lambda: gateway.app.gateway.callers is not before, "the rotation")
    assert [(await gateway.chat(headers=bearer(t))).status for t in (text, second)] == [200, 200]
    before = gateway.app.gateway.callers
    store.revoke(clock.wall(), "k")
    await eventually(lambda: gateway.app.gateway.callers is not before, "the end of the key")
    for old in (text, second):
        assert code_of(await gateway.chat(headers=bearer(old))) == (401, "invalid_api_key")


async def test_a_key_ends_when_it_expires_and_a_rotated_one_when_its_grace_is_over(
    make_gateway: MakeGateway, backend: ScriptedBackend, store: Store
) -> None:
    gateway = await make_gateway(backend, config=STORE)
    now = gateway.app.clock.wall()
    _, expired = store.add(now, "expired", "t", {}, now - 1)
    _, lasting = store.add(now, "lasting", "t", {}, now + 3600)
    _, first = store.add(now, "rotated", "t", {})
    _, second = store.rotate(now - 60, "rotated", 30.0)
    await gateway.app.keys.turn()
    found = [(await gateway.chat(headers=bearer(t))).status for t in (expired, lasting, first, second)]
    assert found == [401, 200, 401, 200]


async def test_a_key_of_the_file_ends_when_it_expires(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    clock = FakeClock()
    at = datetime.fromtimestamp(clock.wall() + 60, UTC).isoformat()
    text = f'{QUIET}[server]\nport = 0\n[[server.keys]]\nname = "k"\nkey = "env:K"\nexpires = {at}\n'
    gateway = await make_gateway(backend, config=text, env={"K": "sk-k"}, clock=clock)
    assert (await gateway.chat(headers=bearer("sk-k"))).status == 200
    clock.time += 60
    assert code_of(await gateway.chat(headers=bearer("sk-k"))) == (401, "invalid_api_key")


async def test_a_changed_key_may_the_new_things_at_once_and_its_use_is_kept(
    make_gateway: MakeGateway, backend: ScriptedBackend, store: Store
) -> None:
    gateway = await make_gateway(backend, config=STORE + MODELS, per_backend=REFERENCE)
    app, key = gateway.app, bearer(make_key(gateway, store))
    await app.keys.turn()
    assert (await gateway.chat(headers=key)).status == 200
    before, changed = app.gateway.callers, app.clock.now()
    store.change("k", lambda _: ({"models": ["other"], "limits": {"requests_per_minute": 1}}, None))
    await eventually(lambda: app.gateway.callers is not before, "the change")
    assert app.clock.now() - changed < 1.0
    found = [(await gateway.chat(model=name, headers=key)).status for name in ("tiny", "other", "other")]
    assert found == [404, 200, 429]
    used = app.clock.wall()
    assert store.uses() == {}, "not with every turn"
    await app.keys.close()
    (at,) = store.uses().values()
    assert 0 <= used - at < 60


async def test_a_store_asks_for_a_key_also_when_nobody_has_one_and_keys_of_the_file_work_beside_it(
    make_gateway: MakeGateway, backend: ScriptedBackend, store: Store
) -> None:
    gateway = await make_gateway(backend, config=STORE)
    assert (await gateway.ask("/health")).status == 200
    assert [(await gateway.ask(path)).status for path in ("/v1/models", "/v1/nothing")] == [401, 401]
    both = await make_gateway(
        backend, config=STORE + '[[server.keys]]\nname = "filed"\nkey = "env:K"\n', env={"K": "sk-filed"}
    )
    text = make_key(both, store)
    await both.app.keys.turn()
    assert [(await both.chat(headers=bearer(t))).status for t in (text, "sk-filed")] == [200, 200]
    await both.records.get(1)
    assert [record.tenant for record, _ in both.records.closed] == ["team", "filed"]


async def test_a_store_that_cannot_be_read_leaves_the_keys_as_they_are_and_is_told_once(
    make_gateway: MakeGateway,
    backend: ScriptedBackend,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gateway = await make_gateway(backend, config=STORE)
    keys = gateway.app.keys
    text = make_key(gateway, store)
    await keys.turn()

    def broken(*_: object) -> None:
        raise StoreError("keys.db: disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(keys._store, "turn", broken)
        for _ in range(3):
            await keys.turn()
        assert (await gateway.chat(headers=bearer(text))).status == 200
    assert keys.failures >= 3
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "the store cannot be used; keys stay as they are, spending is kept here: keys.db: disk I/O error"
    ]
    metrics = (await gateway.ask("/metrics")).body.decode()
    assert f"tierline_store_failures_total {keys.failures}.0" in metrics
    store.revoke(gateway.app.clock.wall(), "k")
    await keys.turn()
    assert (await gateway.chat(headers=bearer(text))).status == 401


async def test_settings_that_nobody_understands_let_nobody_in_and_harm_no_other_key(
    make_gateway: MakeGateway, backend: ScriptedBackend, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await make_gateway(backend, config=STORE)
    good = make_key(gateway, store, "good")
    odd = make_key(gateway, store, "odd", models="all", sudo=True)
    await gateway.app.keys.turn()
    assert [(await gateway.chat(headers=bearer(t))).status for t in (good, odd)] == [200, 401]
    assert "sudo: unknown key" in caplog.text
    assert odd not in caplog.text


# -- what a key may -------------------------------------------------------------------------------------------


async def test_a_model_that_a_key_may_not_see_is_not_there(
    make_gateway: MakeGateway, backend: ScriptedBackend, store: Store
) -> None:
    gateway = await make_gateway(backend, config=STORE + MODELS, per_backend=REFERENCE)
    text = make_key(gateway, store, models=["other"])
    await gateway.app.keys.turn()
    key = bearer(text)
    listed = (await gateway.ask("/v1/models", headers=key)).json["data"]
    assert [model["id"] for model in listed] == ["other"]
    for name in ("tiny", "other-exact", "no-such-model"):
        for response in (
            await gateway.chat(model=name, headers=key),
            await gateway.ask(f"/v1/models/{name}", headers=key),
        ):
            assert code_of(response) == (404, "model_not_found")
            assert response.json["error"]["message"] == f"The model `{name}` does not exist."
    assert (await gateway.ask("/v1/models/other", headers=key)).status == 200
    assert (await gateway.chat(model="other", headers=key)).status == 200
    unnamed = chat()
    del unnamed["model"]
    response = await gateway.ask(CHAT, unnamed, headers=key)
    assert "other" in response.json["error"]["message"]
    assert "tiny" not in response.json["error"]["message"]
    assert len(backend.requests) == 1
    assert [record.model for record, _ in gateway.records.closed] == [None, None, None, "other", None]


async def test_a_stored_response_of_a_model_that_a_key_may_not_see_is_not_there(
    make_gateway: MakeGateway, backend: ScriptedBackend, store: Store
) -> None:
    gateway = await make_gateway(backend, config=STORE)
    keys = [make_key(gateway, store, "none", models=["x"]), make_key(gateway, store, "all")]
    await gateway.app.keys.turn()
    backend.default = json_answer({"id": "resp_1", "object": "response"})
    await gateway.ask("/v1/responses", {"model": "tiny", "input": "x"}, headers=bearer(keys[1]))
    found = [await gateway.ask("/v1/responses/resp_1", headers=bearer(text)) for text in keys]
    assert [response.status for response in found] == [404, 200]
    assert found[0].json["error"]["code"] == "response_not_found"


async def test_a_tier_that_a_key_may_not_use_is_a_403_whether_asked_for_or_the_models_own(
    make_gateway: MakeGateway, backend: ScriptedBackend, store: Store
) -> None:
    gateway = await make_gateway(backend, config=STORE + MODELS, per_backend=REFERENCE)
    key = bearer(make_key(gateway, store, tiers=["fast", "balanced"]))
    await gateway.app.keys.turn()
    asked = await gateway.chat(headers={**key, "x-quality-tier": "exact"})
    implied = await gateway.chat(model="other-exact", headers=key)
    for response in (asked, implied):
        assert code_of(response) == (403, "tier_not_allowed")
        assert response.json["error"]["type"] == "permission_error"
        assert response.json["error"]["message"].endswith("it may use: balanced, fast.")
    unknown = await gateway.chat(headers={**key, "x-quality-tier": "best"})
    assert code_of(unknown) == (400, "unknown_tier")
    assert (await gateway.chat(headers={**key, "x-quality-tier": "fast"})).status == 200
    await gateway.ended(Outcome.UNAUTHORIZED, Outcome.UNAUTHORIZED, Outcome.BAD_REQUEST, Outcome.OK)


TENANT = """
[tenants.team]
models = ["tiny", "other"]
tiers = ["fast", "balanced"]
priority = 3
tool_format = "xml"
"""


async def test_a_key_may_what_it_and_its_tenant_both_allow_and_its_own_values_win(
    make_gateway: MakeGateway, backend: ScriptedBackend, store: Store
) -> None:
    gateway = await make_gateway(backend, config=STORE + MODELS + TENANT, per_backend=REFERENCE)
    keys = gateway.app.keys
    store.add(0.0, "plain", "team", {})
    store.add(0.0, "own", "team", {"models": ["other", "other-exact"], "priority": -2, "tool_format": "json"})
    store.add(0.0, "apart", "team", {"models": ["other-exact"]})
    store.add(0.0, "free", "elsewhere", {})
    await keys.turn()
    callers = {row.name: row.label for row in store.read()}
    found = {c.ident: c for c, _ in gateway.app.gateway.callers._by_hash.values()}
    plain, own, apart, free = (found[callers[name]] for name in ("plain", "own", "apart", "free"))
    assert (plain.models, plain.priority, plain.tool_format) == ({"tiny", "other"}, 3, "xml")
    assert (own.models, own.priority, own.tool_format) == ({"other"}, -2, "json")
    assert apart.models == set()
    assert not apart.sees("other-exact")
    assert (free.models, free.tiers, free.priority) == (None, None, 0)
    assert plain.tiers == own.tiers == {"fast", "balanced"}


async def test_a_tool_format_of_a_key_of_the_store_is_rendered(
    make_gateway: MakeGateway, backend: ScriptedBackend, store: Store
) -> None:
    gateway = await make_gateway(backend, config=STORE)
    key = bearer(make_key(gateway, store, tool_format="xml"))
    await gateway.app.keys.turn()
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    backend.answer(chat_json(None, tool_calls=[("look", "{}")], finish="tool_calls"))
    response = await gateway.chat(tools=tools, headers=key)
    assert "<function=look>" in response.json["choices"][0]["message"]["content"]


async def test_tenants_of_the_file_change_with_a_reload(
    make_gateway: MakeGateway, backend: ScriptedBackend, store: Store
) -> None:
    gateway = await make_gateway(backend, config=STORE + MODELS, per_backend=REFERENCE)
    key = bearer(make_key(gateway, store))
    await gateway.app.keys.turn()
    app = gateway.app
    changed = app.config.model_copy(update={"tenants": {"team": Tenant(models=("other",))}})
    assert (await gateway.chat(headers=key)).status == 200
    app.configure(changed)
    assert (await gateway.chat(headers=key)).status == 404
    assert (await gateway.chat(model="other", headers=key)).status == 200


async def test_a_reload_while_changed_keys_are_read_loses_neither(
    make_gateway: MakeGateway, backend: ScriptedBackend, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await make_gateway(backend, config=STORE + MODELS, per_backend=REFERENCE)
    app = gateway.app
    key = bearer(make_key(gateway, store))
    changed = app.config.model_copy(update={"tenants": {"team": Tenant(models=("other",))}})

    async def slowly(read: Callable[..., object], *arguments: object) -> object:
        made = read(*arguments)
        app.configure(changed)
        return made

    with monkeypatch.context() as patch:
        patch.setattr("proxy.keys.asyncio.to_thread", slowly)
        await app.keys.turn()
    assert [(await gateway.chat(model=name, headers=key)).status for name in ("tiny", "other")] == [404, 200]
