"""Pages that somebody looks at: they may not use what only that somebody can reach."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.errors import Outcome
from proxy.origins import refused_by_admin, refused_by_data
from tests.client import Connection, Response
from tests.proxy.conftest import CHAT, Gateway, MakeGateway, chat
from tests.scripted import ScriptedBackend

ADMIN = "[admin]\nport = 0\n"
KEYED = ADMIN + 'key = "env:ADMIN"\n'
ENV = {"ADMIN": "sk-admin"}
DRAIN = "/admin/backends/a/drain"


async def admin(gateway: Gateway, path: str, method: str = "GET", **headers: str) -> Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    async with await Connection.open(gateway.app.admin_port) as client:
        client.send(path, method=method, headers={"host": f"127.0.0.1:{gateway.app.admin_port}", **names})
        return await client.read()


FOREIGN = {
    "a page from elsewhere": {"origin": "https://evil.example.org"},
    "a page without an origin": {"origin": "null"},
    "another port of this machine": {"origin": "http://127.0.0.1:3000"},
    "an address that begins like ours": {"origin": "http://127.0.0.1.evil.org"},
    "a page that hides its origin": {"sec_fetch_site": "cross-site"},
    "a page next door": {"sec_fetch_site": "same-site"},
}


@pytest.mark.parametrize("headers", FOREIGN.values(), ids=FOREIGN.keys())
@pytest.mark.parametrize("config", [ADMIN, KEYED], ids=["without a key", "with one"])
async def test_a_page_from_elsewhere_changes_nothing_on_the_admin_listener(
    make_gateway: MakeGateway, backend: ScriptedBackend, headers: dict[str, str], config: str
) -> None:
    gateway = await make_gateway(backend, config=config, env=ENV)
    response = await admin(gateway, DRAIN, "POST", authorization="Bearer sk-admin", **headers)
    assert (response.status, response.json["error"]["code"]) == (403, "origin_not_allowed")
    assert not gateway.app.pool.backends["a"].draining


async def test_a_name_that_leads_here_is_not_this_machine(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    """DNS rebinding: the page is from where it asks."""
    gateway = await make_gateway(backend, config=ADMIN)
    for method, path in (("POST", DRAIN), ("GET", "/admin/config"), ("GET", "/admin/backends")):
        response = await admin(gateway, path, method, host="evil.org:80", origin="http://evil.org:80")
        assert response.status == 403
        assert (await admin(gateway, path, method, host="evil.org:80")).status == 403
    assert not gateway.app.pool.backends["a"].draining


async def test_programs_and_our_own_pages_are_served(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=ADMIN)
    port = gateway.app.admin_port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}", "localhost"):
        headers: dict[str, Any]
        for headers in ({}, {"origin": f"http://{host}"}, {"sec_fetch_site": "same-origin"}):
            assert (await admin(gateway, "/admin/backends", host=host, **headers)).status == 200, (
                host,
                headers,
            )
    keyed = await make_gateway(backend, config=KEYED, env=ENV)
    assert (
        await admin(keyed, "/admin/backends", host="ops.example.org", authorization="Bearer sk-admin")
    ).status == 200


def test_what_came_by_tls_is_not_for_a_page_that_did_not() -> None:
    def asked(origin: str, *, secure: bool) -> str | None:
        return refused_by_admin("POST", origin, None, "ops.example.org", keyed=True, secure=secure, own="")

    assert asked("https://ops.example.org", secure=True) is None
    assert asked("http://ops.example.org", secure=True)
    assert asked("http://ops.example.org", secure=False) is None


async def test_the_admin_pages_are_not_on_the_data_listener(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    gateway = await make_gateway(backend, config=ADMIN)
    for path in ("/admin/backends", "/admin/config", DRAIN, "/admin/../admin/backends", "//admin/backends"):
        for method in ("GET", "POST"):
            assert (await gateway.ask(path, method=method)).status == 404
    assert not backend.requests


# -- the data listener


@pytest.mark.parametrize(
    ("origin", "refused"),
    [
        ("https://evil.example.org", True),
        ("http://localhost.evil.org", True),
        ("http://192.168.1.7:3000", True),
        ("http://[::1", True),
        ("http://localhost:3000", False),
        ("http://app.localhost", False),
        ("https://127.0.0.1", False),
        ("http://[::1]:3000", False),
        ("null", False),
        ("app://client", False),
        ("file://", False),
    ],
)
async def test_where_no_key_is_asked_for_a_page_from_elsewhere_spends_nothing(
    make_gateway: MakeGateway, backend: ScriptedBackend, origin: str, refused: bool
) -> None:
    assert refused_by_data(origin) is refused
    gateway = await make_gateway(backend)
    response = await gateway.ask(CHAT, chat(), headers={"origin": origin})
    assert response.status == (403 if refused else 200)
    assert len(backend.requests) == (not refused)
    await gateway.ended(Outcome.BAD_REQUEST if refused else Outcome.OK)


async def test_an_origin_of_the_operators_and_a_key_let_it_in(
    make_gateway: MakeGateway, backend: ScriptedBackend
) -> None:
    page = {"origin": "https://app.example.org"}
    listed = await make_gateway(
        backend, config='[server]\nport = 0\ncors_origins = ["https://app.example.org"]\n'
    )
    assert (await listed.ask(CHAT, chat(), headers=page)).status == 200
    keys = '[server]\nport = 0\n[[server.keys]]\nname = "k"\nkey = "env:K"\n'
    keyed = await make_gateway(backend, config=keys, env={"K": "sk-k"})
    assert (await keyed.ask(CHAT, chat(), headers={**page, "authorization": "Bearer sk-k"})).status == 200
