"""`tierline admin`: the admin API of a running gateway, for a terminal.

Rules
1. The address and the key come from the configuration file, from options or from the environment. A key is never taken from
   argv: `--key-from` names a variable or a file.
2. Human words by default, the API's JSON with --json. Results go to stdout, problems to stderr.
3. Exit codes: 0 done; 1 the gateway refused it, or does not answer; 2 the command line or the configuration cannot be used.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote, urlsplit

import click

from proxy.replay.cli import config_option

FAILED, USAGE = 1, 2
TIMEOUT, REPLAY_TIMEOUT = 30.0, 330.0


@dataclass(slots=True)
class Api:
    """Where the gateway's admin listener is, and how to get in."""

    url: str
    key: str | None
    tls: ssl.SSLContext | None
    as_json: bool

    def ask(self, method: str, path: str, body: object = None, timeout: float = TIMEOUT) -> Any:
        """The answer; whatever went wrong is said, and ends the command."""
        parts = urlsplit(self.url)
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        data = None
        if body is not None:
            data, headers["Content-Type"] = json.dumps(body), "application/json"
        host, port = parts.hostname or "", parts.port
        try:
            if parts.scheme == "https":
                connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                    host, port, timeout=timeout, context=self.tls
                )
            else:
                connection = http.client.HTTPConnection(host, port, timeout=timeout)
            with closing(connection):
                connection.request(method, path, body=data, headers=headers)
                response = connection.getresponse()
                answer = json.loads(response.read())
        except (OSError, ValueError, http.client.HTTPException) as error:
            _fail(f"the admin listener at {self.url} does not answer: {error}")
        if response.status >= 400:
            told = answer.get("error", {}) if isinstance(answer, dict) else {}
            _fail(f"refused ({response.status}): {told.get('message', 'no reason is given')}")
        return answer

    def say(self, answer: Any, words: Callable[[Any], str]) -> None:
        click.echo(json.dumps(answer, indent=2, ensure_ascii=False) if self.as_json else words(answer))


pass_api = click.make_pass_decorator(Api)


@click.group()
@config_option
@click.option(
    "--url", envvar="TIERLINE_ADMIN_URL", show_envvar=True, help="Of the admin listener; else the file says."
)
@click.option(
    "--key-from",
    metavar="env:NAME|file:PATH",
    help="Where the admin key is; else TIERLINE_ADMIN_KEY, else the file says.",
)
@click.option("--ca", metavar="FILE", help="Certificates to trust, for https.")
@click.option("--json", "as_json", is_flag=True, help="Print the API's JSON.")
@click.pass_context
def admin(
    context: click.Context, path: str, url: str | None, key_from: str | None, ca: str | None, as_json: bool
) -> None:
    """Ask and change a running gateway, through its admin listener.

    Exit codes: 0 done, 1 refused or no answer, 2 the command line or configuration cannot be used.
    """
    context.obj = _api(path, url, key_from, ca, as_json)


def _api(path: str, url: str | None, key_from: str | None, ca: str | None, as_json: bool) -> Api:
    key = _key(key_from) if key_from is not None else os.environ.get("TIERLINE_ADMIN_KEY")
    trust = ca
    if url is None:
        from proxy.config import ConfigError, load

        try:
            section = load(path).admin
        except ConfigError as error:
            _fail(f"{error}\nsay --url, or mend the file", USAGE)
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(section.host, section.host)
        scheme = "https" if section.tls.cert is not None else "http"
        trust = trust or section.tls.cert
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{section.port}"
        own = section.key or next((one.key for one in section.keys if one.key is not None), None)
        key = key or (own.reveal() if own is not None else None)
    tls = None
    if url.startswith("https:"):
        try:
            tls = ssl.create_default_context(cafile=trust)
        except OSError as error:
            _fail(f"--ca: {trust} cannot be used: {error}", USAGE)
    elif not url.startswith("http:"):
        _fail(f"--url: expected http://HOST:PORT or https://HOST:PORT, got {url!r}", USAGE)
    return Api(url, key, tls, as_json)


def _key(source: str) -> str:
    kind, _, rest = source.partition(":")
    if kind == "env" and rest in os.environ:
        return os.environ[rest].strip()
    if kind != "file":
        _fail("--key-from: expected env:NAME of a variable that is set, or file:PATH", USAGE)
    try:
        return Path(rest).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        _fail(f"--key-from: {rest} cannot be read: {error}", USAGE)


# -- backends -------------------------------------------------------------------------------------------------


@admin.command()
@click.argument("name", required=False)
@pass_api
def backends(api: Api, name: str | None) -> None:
    """Which backends there are and how they are; of one, its table, too."""
    if name is not None:
        api.say(api.ask("GET", _path("backends", name)), lambda one: json.dumps(one, indent=2))
        return
    api.say(api.ask("GET", "/admin/backends"), lambda answer: _table(answer["backends"]))


@admin.command()
@click.argument("name")
@pass_api
def drain(api: Api, name: str) -> None:
    """No new requests for a backend; what runs there may finish."""
    api.say(api.ask("POST", _path("backends", name, "drain")), _state)


@admin.command()
@click.argument("name")
@pass_api
def undrain(api: Api, name: str) -> None:
    """Requests for a backend again."""
    api.say(api.ask("POST", _path("backends", name, "undrain")), _state)


@admin.command()
@click.argument("name")
@click.argument("url")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="As in [[backends]]: limits.max_in_flight=64.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME",
    help="A model that lists its backends and shall list this one.",
)
@pass_api
def add(api: Api, name: str, url: str, settings: tuple[str, ...], models: tuple[str, ...]) -> None:
    """Add a backend: asked at once, and used when it is well."""
    body = {"name": name, "url": url, **_settings(settings)}
    if models:
        body["models"] = list(models)
    api.say(api.ask("POST", "/admin/backends", body), _state)


@admin.command()
@click.argument("name")
@click.argument("settings", nargs=-1, required=True)
@pass_api
def change(api: Api, name: str, settings: tuple[str, ...]) -> None:
    """Change keys of a backend: limits.max_in_flight=64, or KEY= for the default again."""
    api.say(api.ask("PATCH", _path("backends", name), _settings(settings)), _state)


@admin.command()
@click.argument("name")
@pass_api
def remove(api: Api, name: str) -> None:
    """Remove a backend: what runs there ends by itself."""
    answer = api.ask("DELETE", _path("backends", name))
    api.say(answer, lambda one: f"backend {one['name']} is removed, {_lasts(one)}")


# -- policy ---------------------------------------------------------------------------------------------------


@admin.group()
def policy() -> None:
    """The policy in force: show, check, replay, activate, roll back."""


@policy.command("show")
@pass_api
def show_policy(api: Api) -> None:
    """Which policy is in force, from where, and which were before."""

    def words(one: Any) -> str:
        lines = [f"{one['policy']}  {one['name']}, from {one['from']}, by {one['by']}"]
        lines += [f"  before: {was['policy']}  {was['name']}, by {was['by']}" for was in one["before"]]
        return "\n".join(lines)

    api.say(api.ask("GET", "/admin/policy"), words)


policy_file = click.argument("file", type=click.Path(path_type=Path))
margin_option = click.option(
    "--margin", default=5.0, show_default=True, metavar="PERCENT", help="How much worse is too much."
)


@policy.command("check")
@policy_file
@pass_api
def check_policy(api: Api, file: Path) -> None:
    """Whether the [policy] and [tiers] of a TOML file could be put in force. Nothing is changed."""
    answer = api.ask("POST", "/admin/policy/check", _tables(file))
    api.say(
        answer,
        lambda one: f"{one['policy']} can be put in force; changes {', '.join(one['changed']) or 'nothing'}",
    )


@policy.command("replay")
@policy_file
@margin_option
@pass_api
def replay_policy(api: Api, file: Path, margin: float) -> None:
    """The gateway's recorded traffic under the policy of a TOML file. Exit code 1 if that is worse."""
    body = {**_tables(file), "margin_percent": margin}
    answer = api.ask("POST", "/admin/policy/replay", body, REPLAY_TIMEOUT)
    api.say(answer, lambda one: "\n".join([*one["report"], *(f"worse: {line}" for line in one["worse"])]))
    if not answer["passed"]:
        sys.exit(FAILED)


@policy.command("activate")
@policy_file
@click.option("--replay", is_flag=True, help="Only if the recorded traffic is no worse off under it.")
@margin_option
@pass_api
def activate_policy(api: Api, file: Path, replay: bool, margin: float) -> None:
    """Put the [policy] and [tiers] of a TOML file in force."""
    body = {**_tables(file), "replay": replay, "margin_percent": margin}
    api.say(api.ask("POST", "/admin/policy/activate", body, REPLAY_TIMEOUT), _in_force)


@policy.command("rollback")
@click.argument("digest", required=False)
@pass_api
def roll_back(api: Api, digest: str | None) -> None:
    """Back to the policy that was in force before, or to the one of DIGEST."""
    body = {} if digest is None else {"digest": digest}
    api.say(api.ask("POST", "/admin/policy/rollback", body), _in_force)


@policy.command("revert")
@pass_api
def revert_policy(api: Api) -> None:
    """Back to the policy of the configuration file."""
    api.say(api.ask("POST", "/admin/policy/revert"), _in_force)


# -- limits, configuration -------------------------------------------------------------------------------------


@admin.group()
def limits() -> None:
    """How far limits are used; a key's may be set."""


@limits.command("show")
@click.argument("account", required=False)
@pass_api
def show_limits(api: Api, account: str | None) -> None:
    """Every limit and how far it is used; or those of key:BEGINNING, tenant:NAME, model:NAME."""

    def words(answer: Any) -> str:
        accounts = answer.get("accounts", [answer])
        lines = [
            f"{one['account']}  {kind}: {one['used'].get(kind, 0):g} of {limit:g}"
            for one in accounts
            for kind, limit in one["limits"].items()
        ]
        return "\n".join(lines) or "nothing is limited"

    path = "/admin/limits" if account is None else _path("limits", account)
    api.say(api.ask("GET", path), words)


@limits.command("set")
@click.argument("account")
@click.argument("settings", nargs=-1)
@pass_api
def set_limits(api: Api, account: str, settings: tuple[str, ...]) -> None:
    """All limits of a key of the store, by key:BEGINNING; those not named are none."""
    answer = api.ask("PUT", _path("limits", account), _settings(settings))
    api.say(
        answer, lambda one: f"{one['key']} ({one['name']}): {json.dumps(one['settings'].get('limits', {}))}"
    )


@admin.command()
@pass_api
def config(api: Api) -> None:
    """The configuration in force, secrets masked, and what of it came from the admin API."""

    def words(answer: Any) -> str:
        from proxy.tomltext import toml_lines

        beside, digest = answer.pop("from_admin_api"), answer.pop("policy_digest")
        lines = [f"# policy {digest}", *_beside(beside), *toml_lines(answer)]
        return "\n".join(lines).rstrip()

    api.say(api.ask("GET", "/admin/config"), words)


@admin.command()
@click.option("--revert", is_flag=True, help="Back to the file; who is drained stays drained.")
@pass_api
def changes(api: Api, revert: bool) -> None:
    """What is in force beside the file."""
    if revert:
        api.say(api.ask("DELETE", "/admin/changes"), _in_force)
        return
    api.say(api.ask("GET", "/admin/changes"), lambda one: "\n".join(_beside(one)))


@admin.command()
@pass_api
def reload(api: Api) -> None:
    """Read the configuration file again. Exit code 1 if it is refused; then nothing has changed."""
    api.say(api.ask("POST", "/admin/reload"), _in_force)


# -- inside ---------------------------------------------------------------------------------------------------


def _fail(message: str, code: int = FAILED) -> NoReturn:
    click.echo(message, err=True)
    sys.exit(code)


def _path(*parts: str) -> str:
    return "/admin/" + "/".join(quote(part, safe="") for part in parts)


def _settings(given: tuple[str, ...]) -> dict[str, Any]:
    """KEY=VALUE with dots for tables; a value is JSON where it is, else text; empty is null."""
    out: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key:
            _fail(f"expected KEY=VALUE, got {text!r}", USAGE)
        *tables, last = key.split(".")
        here = out
        for name in tables:
            here = here.setdefault(name, {})
        try:
            here[last] = json.loads(value) if value else None
        except ValueError:
            here[last] = value
    return out


def _tables(file: Path) -> dict[str, Any]:
    import tomllib

    try:
        data = tomllib.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        _fail(f"{file}: {error}", USAGE)
    taken: dict[str, Any] = {name: data[name] for name in ("policy", "tiers") if name in data}
    if not taken:
        _fail(f"{file}: has neither [policy] nor [tiers]", USAGE)
    return taken


def _table(rows: list[dict[str, Any]]) -> str:
    head = ("name", "state", "in_flight", "max_in_flight", "waiting", "kv_usage", "model", "url")
    table = [head, *(["-" if row[key] is None else str(row[key]) for key in head] for row in rows)]
    widths = [max(len(line[place]) for line in table) for place in range(len(head))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in table)
    return "\n".join(line.rstrip() for line in lines)


def _lasts(one: Mapping[str, Any]) -> str:
    return f"which stays {one['lasts']}" if "over restarts" in one["lasts"] else f"{one['lasts']}"


def _state(one: Mapping[str, Any]) -> str:
    return f"backend {one['name']} is {one['state']}, {one['in_flight']} in flight; {_lasts(one)}"


def _in_force(one: Mapping[str, Any]) -> str:
    told = f"policy {one['policy']} is in force; changed: {', '.join(one['changed']) or 'nothing'}"
    return f"{told}; {_lasts(one)}" if "lasts" in one else told


def _beside(one: Mapping[str, Any]) -> list[str]:
    lines = [
        f"# from admin API: backend {name} {'is removed' if added is None else 'is as given there'}"
        for name, added in one["backends"].items()
    ]
    lines += ["# from admin API: policy and tiers"] if one["policy"] is not None else []
    lines += [f"# from admin API: {name} is drained" for name in one["draining"]]
    return [*lines, f"# ({one['lasts']})"] if lines else ["# nothing is changed beside the file"]
