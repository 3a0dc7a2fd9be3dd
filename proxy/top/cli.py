"""`tierline top`: the command line.

Rules: nothing beyond click is imported until it runs. The admin key comes from the configuration, and goes to the admin
listener only. What does not answer ends it with code 1 and says what did not.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
import sys
from contextlib import closing
from typing import TYPE_CHECKING, NoReturn

import click

if TYPE_CHECKING:
    from proxy.config import Config
    from proxy.config.tls import ListenerTls
    from proxy.top.figures import Look

FAILED, USAGE = 1, 2


@click.command()
@click.option(
    "-c",
    "--config",
    "path",
    default="config.toml",
    envvar="TIERLINE_CONFIG",
    show_default=True,
    show_envvar=True,
    metavar="FILE",
    help="The configuration.",
)
@click.option("--every", default=2.0, show_default=True, metavar="SECONDS", help="Between two looks.")
@click.option("--once", is_flag=True, help="Two looks, one page, then end.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, once.")
def top(path: str, every: float, once: bool, as_json: bool) -> None:
    """What a running gateway does now: rates, first tokens, the queue, each backend.

    Asks the admin listener of the configuration, with its key. Ends with Ctrl-C.
    """
    from proxy.config import ConfigError, load

    try:
        config = load(path)
    except ConfigError as error:
        click.echo(str(error), err=True)
        sys.exit(USAGE)
    if not config.admin.enabled:
        _fail("the configuration has no admin listener: admin.enabled is false", USAGE)
    if every <= 0:
        _fail("--every: more than 0 seconds", USAGE)
    try:
        asyncio.run(_once(config, every, as_json) if once or as_json else _live(config, every))
    except KeyboardInterrupt:
        return


async def _once(config: Config, every: float, as_json: bool) -> None:
    from rich.console import Console

    from proxy.clock import LoopClock
    from proxy.top import view
    from proxy.top.figures import now

    clock = LoopClock()
    before = look(config, clock.now())
    await clock.sleep(every)
    after = look(config, clock.now())
    if as_json:
        click.echo(json.dumps(view.as_json(after, now(before, after))))
    else:
        console = Console()
        width = console.width if console.is_terminal else 160
        Console(width=width).print(view.view(after, now(before, after), _where(config)))


async def _live(config: Config, every: float) -> None:
    from rich.live import Live

    from proxy.clock import LoopClock
    from proxy.top.figures import now
    from proxy.top.view import view

    clock = LoopClock()
    last = look(config, clock.now())
    with Live(view(last, now(None, last), _where(config)), screen=True, auto_refresh=False) as live:
        while True:
            await clock.sleep(every)
            last, before = look(config, clock.now()), last
            live.update(view(last, now(before, last), _where(config)), refresh=True)


def look(config: Config, at: float) -> Look:
    """One look at both pages, at that moment of a clock."""
    from proxy.top.figures import Look, samples_of

    admin, server = config.admin, config.server
    key = {"Authorization": f"Bearer {admin.key.reveal()}"} if admin.key is not None else {}
    backends = json.loads(_get(admin.host, admin.port, admin.tls, "/admin/backends", key))["backends"]
    if admin.metrics_on in ("admin", "both"):
        text = _get(admin.host, admin.port, admin.tls, "/metrics", key)
    else:
        text = _get(server.host, server.port, server.tls, "/metrics", {})
    return Look(at, samples_of(text), backends)


def _get(host: str, port: int, tls: ListenerTls, path: str, headers: dict[str, str]) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        connection: http.client.HTTPConnection
        if tls.cert is not None:
            connection = http.client.HTTPSConnection(host, port, timeout=10, context=_trusts(str(tls.cert)))
        else:
            connection = http.client.HTTPConnection(host, port, timeout=10)
        with closing(connection):
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            text = response.read().decode()
    except (OSError, ValueError, http.client.HTTPException) as error:
        _fail(f"{host}:{port} does not answer: {error}")
    if response.status != 200:
        _fail(f"{host}:{port}{path} answers {response.status}: {text[:200]}")
    return text


def _trusts(cert: str) -> ssl.SSLContext:
    """The listener's own certificate, and no other, whatever name it has: the address is the configuration's."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cert)
    return context


def _where(config: Config) -> str:
    return f"{config.admin.host}:{config.admin.port}"


def _fail(text: str, code: int = FAILED) -> NoReturn:
    click.echo(text, err=True)
    sys.exit(code)
