"""TLS to backends: whom we believe, whom we are to them, and files that change meanwhile."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme

from proxy.errors import Outcome
from tests.fake_clock import FakeClock
from tests.proxy.conftest import CHAT, MakeGateway, chat
from tests.proxy.scenes import QUIET, polled
from tests.proxy.test_tls import replace
from tests.scripted import ScriptedBackend

OURS = 'tls.ca = "ca.pem"\ntls.cert = "client.pem"\ntls.key = "client.key"'


@asynccontextmanager
async def serving(ca: trustme.CA, *names: str, asks: bool = False) -> AsyncIterator[ScriptedBackend]:
    """A backend with a certificate for these names. asks: for one of ours."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert(*names).configure_cert(context)
    if asks:
        ca.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
        context.num_tickets = 0
    async with ScriptedBackend(tls=context) as backend:
        yield backend


def write(folder: Path, ca: trustme.CA, by: trustme.CA | None = None) -> None:
    ca.cert_pem.write_to_path(folder / "ca.pem")
    made = (by or ca).issue_cert("gateway@example.org")
    replace(folder / "client.pem", made.cert_chain_pems[0].bytes())
    replace(folder / "client.key", made.private_key_pem.bytes())


async def test_a_backend_that_asks_for_a_certificate_gets_ours(
    make_gateway: MakeGateway, tmp_path: Path
) -> None:
    ca = trustme.CA()
    write(tmp_path, ca)
    async with serving(ca, "127.0.0.1", asks=True) as backend:
        gateway = await make_gateway(backend, per_backend={"a": OURS})
        assert (await gateway.ask(CHAT, chat())).status == 200
        await backend.until(lambda: bool(backend.polls), "a poll")  # health comes in the same way
        stranger = await make_gateway(backend, per_backend={"a": 'tls.ca = "ca.pem"'})
        assert (await stranger.ask(CHAT, chat())).status == 502


async def test_a_backend_is_known_by_the_name_that_is_configured(
    make_gateway: MakeGateway, tmp_path: Path
) -> None:
    ca = trustme.CA()
    write(tmp_path, ca)
    async with serving(ca, "vllm.example.org") as backend:
        named = 'tls.ca = "ca.pem"\ntls.server_name = "vllm.example.org"'
        gateway = await make_gateway(backend, per_backend={"a": named})
        assert (await gateway.ask(CHAT, chat())).status == 200
        await backend.until(lambda: bool(backend.polls), "a poll")
        assert (await backend.received()).head.count(b"host: 127.0.0.1") == 1
        for settings in ('tls.ca = "ca.pem"', 'tls.ca = "ca.pem"\ntls.server_name = "other.example.org"'):
            other = await make_gateway(backend, per_backend={"a": settings})
            assert (await other.ask(CHAT, chat())).status == 502
            assert (await other.record()).outcome is Outcome.UPSTREAM_CONNECT


async def test_a_certificate_that_nobody_vouches_for_is_accepted_only_loudly(
    make_gateway: MakeGateway, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(trustme.CA(), "127.0.0.1") as backend:
        careful = await make_gateway(backend)
        assert (await careful.ask(CHAT, chat())).status == 502
        assert "any certificate" not in caplog.text
        careless = await make_gateway(backend, per_backend={"a": "tls.insecure_any_certificate = true"})
        assert (await careless.ask(CHAT, chat())).status == 200
        assert "backend a: any certificate is accepted" in caplog.text


async def test_files_that_change_are_for_new_connections_and_broken_ones_for_none(
    make_gateway: MakeGateway, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ca = trustme.CA()
    write(tmp_path, ca, by=trustme.CA())  # a certificate that the backend does not know
    clock = FakeClock()
    async with serving(ca, "127.0.0.1", asks=True) as backend:
        gateway = await make_gateway(
            backend, per_backend={"a": OURS + "\nmax_idle = 0"}, config=QUIET, clock=clock
        )
        await polled(gateway)
        assert (await gateway.ask(CHAT, chat())).status == 502
        write(tmp_path, ca)
        clock.advance(1.1)
        assert (await gateway.ask(CHAT, chat())).status == 200
        replace(tmp_path / "client.pem", b"hello")
        clock.advance(1.1)
        assert (await gateway.ask(CHAT, chat())).status == 200
        assert "TLS of backend a: the changed files cannot be used" in caplog.text
        page = gateway.app.metrics.render()[0].decode()
        assert 'tierline_tls_loads_total{of="backend a",outcome="loaded"} 1.0' in page
        assert 'tierline_tls_loads_total{of="backend a",outcome="failed"} 1.0' in page
