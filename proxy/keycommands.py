"""`tierline keys`: make, list, change, revoke and rotate the keys of the store, and hash one for the configuration.

Rules: nothing beyond click is imported until one of them runs. A key goes to stdout alone, once, when it is made; it is
never read from argv, and nothing else is printed of it but its beginning. What is done is said on stderr.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NoReturn, TypeVar

import click

from proxy.keyrows import date, row
from proxy.replay.cli import config_option

if TYPE_CHECKING:
    from proxy.config import Config
    from proxy.keystore import Store, StoredKey

FAILED, USAGE = 1, 2
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
T = TypeVar("T")
IN_FORCE = "in force within a second"


@click.group()
def keys() -> None:
    """Client keys: those of the store (server.store), and hashes for the configuration."""


@keys.command("hash")
@click.option("--name", default="NAME", show_default=True, help="The tenant's name in the printed line.")
def hash_key(name: str) -> None:
    """Hash a key for the configuration.

    The key is read from stdin, or asked for on a terminal; never give it as an argument, where others see it.
    """
    from proxy.keystore import digest

    if sys.stdin.isatty():
        key = click.prompt("Key", hide_input=True, err=True)
    else:
        key = sys.stdin.read()
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        _fail("a key is visible ASCII characters without spaces, and at least one", USAGE)
    click.echo("[[server.keys]]")
    click.echo(f"name = {json.dumps(name)}")
    click.echo(f'sha256 = "{digest(key)}"')


def setting_options(command: Callable[..., None]) -> Callable[..., None]:
    """What a key may, as options; the same for those that make one and those that change one."""
    options = (
        click.option(
            "--model", "models", multiple=True, metavar="NAME", help="A model it may ask for. Without: all."
        ),
        click.option(
            "--tier", "tiers", multiple=True, metavar="NAME", help="A tier it may ask for. Without: all."
        ),
        click.option("--priority", type=int, metavar="N", help="Of its requests, -9 to 9."),
        click.option("--tool-format", metavar="FORMAT", help="How tool calls leave: openai, xml or json."),
        click.option("--reserve-tokens", type=int, metavar="N", help="Of an answer, reserved at most."),
        click.option(
            "--limit", "limits", multiple=True, metavar="LIMIT=N", help="Such as requests_per_minute=60."
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@keys.command()
@click.argument("name")
@config_option
@click.option("--tenant", metavar="NAME", help="Whose it is. Without: its own name.")
@click.option("--expires", metavar="WHEN", help="90d, 12h, or a date such as 2027-01-31 (UTC).")
@setting_options
def add(
    name: str, path: str, tenant: str | None, expires: str | None, limits: tuple[str, ...], **more: object
) -> None:
    """Make a key, and print it: the only time that it is shown.

    NAME is for people; limits and budgets go by the key, whatever its name.
    """
    config = _load(path)
    now = _now()
    until = None if expires is None else _when(expires, now)
    settings = _given(more)
    if limits:
        settings["limits"] = {limit: value for limit, value in map(_limit, limits) if value is not None}
    _check(config, name, tenant or name, settings)
    with _store(config) as store:
        try:
            made, text = store.add(now, name, tenant or name, settings, until)
        except ValueError as error:
            _fail(str(error))
    _show(text, f'{made.label} ("{name}") is made and {IN_FORCE}; it is not shown again')


@keys.command("list")
@config_option
@click.option("--all", "everything", is_flag=True, help="Revoked ones, too.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array.")
def list_keys(path: str, everything: bool, as_json: bool) -> None:
    """What keys there are in the store, by their beginnings.

    Left: of budgets, by what the gateway wrote last; a request that runs is not charged yet.
    """
    with _store(_load(path)) as store:
        found = [key for key in store.read() if everything or key.revoked is None]
        uses, budgets = store.uses(), store.budgets()
    now = _now()
    rows = [row(key, now, uses.get(key.label), budgets) for key in found]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        click.echo("no keys")
        return
    head = ("key", "name", "tenant", "made", "expires", "used", "state", "settings", "left")
    table = [head, *([_cell(row[name]) for name in head] for row in rows)]
    widths = [max(len(line[place]) for line in table) for place in range(len(head))]
    for line in table:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        click.echo("  ".join(padded).rstrip())


@keys.command("set")
@click.argument("which")
@config_option
@click.option(
    "--expires", metavar="WHEN", help="90d from now, 12h, a date such as 2027-01-31 (UTC), or never."
)
@setting_options
@click.option(
    "--clear", multiple=True, metavar="SETTING", help="As if it had never been set, such as models or limits."
)
def set_key(
    which: str,
    path: str,
    expires: str | None,
    limits: tuple[str, ...],
    clear: tuple[str, ...],
    **more: object,
) -> None:
    """Change what a key may, or until when. What is not named stays; --limit LIMIT=none takes one away.

    WHICH: its beginning (tl-…) or its name.
    """
    config = _load(path)
    given, limited = _given(more), [_limit(text) for text in limits]
    unknown = [name for name in clear if name not in (*more, "limits")]
    if unknown:
        _fail(f"--clear: no setting is named {unknown[0]!r}; there are {', '.join((*more, 'limits'))}", USAGE)
    if not (given or limited or clear or expires):
        _fail("nothing to change: name a setting, --expires or --clear", USAGE)
    until = None if expires in (None, "never") else _when(expires, _now())

    def changed(key: StoredKey) -> tuple[Mapping[str, object], float | None]:
        settings = {name: value for name, value in key.settings.items() if name not in clear} | given
        before = settings.pop("limits", {})
        kept = dict(before if isinstance(before, Mapping) else {}) | dict(limited)
        if kept := {limit: value for limit, value in kept.items() if value is not None}:
            settings["limits"] = kept
        _check(config, key.name, key.tenant, settings)
        return settings, key.expires if expires is None else until

    with _store(config) as store:
        now = _find(which, lambda: store.change(which, changed))
    click.echo(f'{now.label} ("{now.name}") is changed, {IN_FORCE}: {_cell(now.settings)}', err=True)


@keys.command()
@click.argument("which")
@config_option
def revoke(which: str, path: str) -> None:
    """End a key. WHICH: its beginning (tl-…) or its name."""
    with _store(_load(path)) as store:
        gone = _find(which, lambda: store.revoke(_now(), which))
    click.echo(f'{gone.label} ("{gone.name}") is revoked, {IN_FORCE}', err=True)


@keys.command()
@click.argument("which")
@config_option
@click.option(
    "--grace", default="0s", show_default=True, metavar="TIME", help="So long the old one works, too."
)
def rotate(which: str, path: str, grace: str) -> None:
    """Make another key in place of one, and print it. Name, settings, limits and budgets go on.

    WHICH: its beginning (tl-…) or its name.
    """
    seconds = _seconds(grace)
    if seconds is None:
        _fail(f"--grace: expected a time such as 12h or 7d, got {grace!r}", USAGE)
    with _store(_load(path)) as store:
        made, text = _find(which, lambda: store.rotate(_now(), which, seconds))
    still = f"the old one works until {date(_now() + seconds)}" if seconds else "the old one works no more"
    _show(text, f'{made.label} ("{made.name}") has a new key, {IN_FORCE}; {still}')


# -- inside --------------------------------------------------------------------------------------------------


def _fail(message: str, code: int = FAILED) -> NoReturn:
    click.echo(message, err=True)
    sys.exit(code)


def _load(path: str) -> Config:
    from proxy.config import ConfigError, load

    try:
        return load(path)
    except ConfigError as error:
        _fail(str(error), USAGE)


@contextmanager
def _store(config: Config) -> Iterator[Store]:
    from proxy.keystore import Store, StoreError

    if config.server.store is None:
        _fail('server.store: not set: say where keys are kept, such as store = "tierline.db"', USAGE)
    try:
        store = Store(config.server.store)
        try:
            yield store
        finally:
            store.close()
    except StoreError as error:
        _fail(str(error))


def _find(which: str, do: Callable[[], T]) -> T:
    from proxy.keystore import NoSuchKey

    try:
        return do()
    except NoSuchKey:
        if len(which) > 40:  # perhaps a key: not to be repeated
            _fail("no such key: name it by its beginning (tl- and 8 letters), never by all of it")
        _fail(f"no key that is not revoked has this beginning or name: {which}")


def _check(config: Config, name: str, tenant: str, settings: Mapping[str, object]) -> None:
    """What the configuration would say of such a key."""
    from proxy.config import check_key

    problems = check_key(config, name, tenant, settings)
    if problems:
        _fail("\n".join(problems), USAGE)


def _given(more: Mapping[str, object]) -> dict[str, object]:
    """The settings that were named."""
    given = {key: list(value) if isinstance(value, tuple) else value for key, value in more.items()}
    return {key: value for key, value in given.items() if value not in (None, [])}


def _limit(text: str) -> tuple[str, float | None]:
    """None: no limit."""
    name, _, number = text.partition("=")
    if number == "none":
        return name, None
    try:
        return name, int(number)
    except ValueError:
        pass
    try:
        return name, float(number)
    except ValueError:
        _fail(f"--limit: expected LIMIT=NUMBER, such as requests_per_minute=60, got {text!r}", USAGE)


def _seconds(text: str) -> float | None:
    found = re.fullmatch(r"(\d{1,6})([smhd])", text.strip())
    return int(found[1]) * UNITS[found[2]] if found else None


def _when(text: str, now: float) -> float:
    seconds = _seconds(text)
    if seconds is not None:
        return now + seconds
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        _fail(f"--expires: expected 90d, 12h, or a date such as 2027-01-31, got {text!r}", USAGE)
    until = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    if until <= now:
        _fail(f"--expires: {text} is over", USAGE)
    return until


def _now() -> float:
    return datetime.now(UTC).timestamp()


def _cell(value: object) -> str:
    if isinstance(value, Mapping):
        return json.dumps(value) if value else "-"
    return "-" if value is None else str(value)


def _show(text: str, what: str) -> None:
    click.echo(text)
    click.echo(what, err=True)
