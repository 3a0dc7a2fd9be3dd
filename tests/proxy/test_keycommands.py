"""`tierline keys`: a key is shown once, and everything about it can be said without it."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from proxy.cli import Exit, main
from proxy.keystore import Spent, Store, StoredKey

CONFIG = """
[server]
store = "keys.db"
[[backends]]
name = "a"
url = "http://127.0.0.1:1"
quality.reference = true
[models.m]
[models.n]
"""
KEY = re.compile(r"tl-[a-z0-9]{8}-[A-Za-z0-9]{43}\n")


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.toml"
    path.write_text(CONFIG)
    return str(path)


def keys(config: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["keys", *arguments, "--config", config])


def stored(config: str) -> list[StoredKey]:
    store = Store(str(Path(config).parent / "keys.db"))
    try:
        return store.read()
    finally:
        store.close()


def test_add_prints_the_key_alone_on_stdout_and_what_it_may_is_kept(config: str) -> None:
    done = keys(
        config,
        *("add", "batch", "--tenant", "team", "--expires", "90d", "--model", "m", "--model", "n"),
        *("--tier", "fast", "--priority", "-3", "--tool-format", "xml", "--reserve-tokens", "200"),
        *("--limit", "requests_per_minute=60", "--limit", "tokens_per_day=1000000"),
    )
    assert (done.exit_code, done.stderr.count("\n")) == (Exit.OK, 1), done.output
    assert KEY.fullmatch(done.stdout)
    (key,) = stored(config)
    assert done.stdout.startswith(key.label)
    assert key.label in done.stderr
    assert done.stdout.strip() not in done.stderr
    assert (key.name, key.tenant) == ("batch", "team")
    assert key.settings == {
        "models": ["m", "n"],
        "tiers": ["fast"],
        "priority": -3,
        "tool_format": "xml",
        "reserve_tokens": 200,
        "limits": {"requests_per_minute": 60, "tokens_per_day": 1_000_000},
    }
    assert key.expires == pytest.approx(key.made + 90 * 86_400)


def test_a_key_without_more_may_everything_and_is_its_own_tenant(config: str) -> None:
    assert keys(config, "add", "plain").exit_code == Exit.OK
    (key,) = stored(config)
    assert (key.tenant, key.settings, key.expires) == ("plain", {}, None)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["two words"], "name: expected a name of letters"),
        (["k", "--tenant", "a b"], "tenant: expected a name of letters"),
        (["k", "--model", "nope"], 'models[0]: no model is named "nope" (configured: "m", "n")'),
        (["k", "--tier", "best"], 'tiers[0]: no tier is named "best"'),
        (["k", "--priority", "10"], "priority: expected a whole number, -9 to 9, got 10"),
        (["k", "--tool-format", "yaml"], 'tool_format: expected "openai", "xml" or "json"'),
        (["k", "--reserve-tokens", "-1"], "reserve_tokens: expected a whole number, at least 0"),
        (["k", "--limit", "requests_per_hour=5"], "limits.requests_per_hour: unknown key"),
        (["k", "--limit", "requests_per_minute=0"], "limits.requests_per_minute: expected a whole number"),
        (["k", "--limit", "requests_per_minute=1.5"], "limits.requests_per_minute: expected a whole number"),
        (["k", "--limit", "requests_per_minute"], "--limit: expected LIMIT=NUMBER"),
        (["k", "--limit", "cost_per_day=5"], "limits.cost_per_day: no model has a price"),
        (["k", "--expires", "soon"], "--expires: expected 90d, 12h, or a date"),
        (["k", "--expires", "2001-01-01"], "--expires: 2001-01-01 is over"),
    ],
)
def test_what_no_key_can_be_is_refused_and_nothing_is_made(
    config: str, arguments: list[str], problem: str
) -> None:
    done = keys(config, "add", *arguments)
    assert (done.exit_code, done.stdout) == (Exit.CONFIG, "")
    assert problem in done.stderr
    assert not (Path(config).parent / "keys.db").exists() or stored(config) == []


def test_a_date_is_midnight_utc(config: str) -> None:
    assert keys(config, "add", "k", "--expires", "2999-01-31").exit_code == Exit.OK
    assert stored(config)[0].expires == datetime(2999, 1, 31, tzinfo=UTC).timestamp()


def test_a_name_is_taken_until_its_key_is_revoked(config: str) -> None:
    assert keys(config, "add", "k").exit_code == Exit.OK
    again = keys(config, "add", "k")
    assert (again.exit_code, again.stdout) == (Exit.FAILED, "")
    assert 'a key is named "k" already' in again.stderr
    assert keys(config, "revoke", "k").exit_code == Exit.OK
    assert keys(config, "add", "k").exit_code == Exit.OK


def test_list_shows_beginnings_and_states_and_never_a_key(config: str) -> None:
    assert keys(config, "list").stdout == "no keys\n"
    made = {name: keys(config, "add", name).stdout.strip() for name in ("kept", "gone", "turned")}
    keys(config, "revoke", "gone")
    made["turned again"] = keys(config, "rotate", "turned", "--grace", "12h").stdout.strip()
    shown = keys(config, "list")
    everything = keys(config, "list", "--all")
    assert [line.split()[1] for line in shown.stdout.splitlines()] == ["name", "kept", "turned"]
    assert "revoked" not in shown.stdout
    states = {row["name"]: row["state"] for row in json.loads(keys(config, "list", "--all", "--json").stdout)}
    assert states == {"kept": "active", "gone": "revoked", "turned": "rotating"}
    assert not any(text[12:] in everything.output for text in made.values())
    assert all(text[:11] in everything.output for text in made.values())


def test_rotate_prints_another_key_for_the_same_settings(config: str) -> None:
    first = keys(config, "add", "k", "--model", "m").stdout
    done = keys(config, "rotate", first[:11])
    assert KEY.fullmatch(done.stdout)
    assert done.stdout != first
    assert done.stdout[:11] == first[:11]
    assert "the old one works no more" in done.stderr
    (key,) = stored(config)
    assert (key.settings, len(key.hashes)) == ({"models": ["m"]}, 1)
    graced = keys(config, "rotate", "k", "--grace", "2h")
    assert "the old one works until 2" in graced.stderr
    assert keys(config, "rotate", "k", "--grace", "soon").exit_code == Exit.CONFIG


def test_set_changes_what_is_named_and_leaves_the_rest(config: str) -> None:
    keys(
        config,
        "add",
        "k",
        "--model",
        "m",
        "--priority",
        "2",
        "--limit",
        "requests_per_minute=60",
        "--expires",
        "90d",
    )
    done = keys(
        config,
        *("set", "k", "--limit", "tokens_per_day=5", "--tier", "fast", "--expires", "2999-01-31"),
        *("--tool-format", "json"),
    )
    assert (done.exit_code, done.stdout) == (Exit.OK, ""), done.output
    (key,) = stored(config)
    assert key.label in done.stderr
    assert key.settings == {
        "models": ["m"],
        "tiers": ["fast"],
        "priority": 2,
        "tool_format": "json",
        "limits": {"requests_per_minute": 60, "tokens_per_day": 5},
    }
    assert key.expires == datetime(2999, 1, 31, tzinfo=UTC).timestamp()
    done = keys(
        config,
        *(
            "set",
            key.label,
            "--clear",
            "models",
            "--clear",
            "tool_format",
            "--limit",
            "requests_per_minute=none",
        ),
        *("--expires", "never", "--tier", "exact"),
    )
    assert done.exit_code == Exit.OK, done.output
    (key,) = stored(config)
    assert key.settings == {"tiers": ["exact"], "priority": 2, "limits": {"tokens_per_day": 5}}
    assert key.expires is None
    keys(config, "set", "k", "--clear", "limits", "--clear", "tiers", "--priority", "0")
    (key,) = stored(config)
    assert key.settings == {"priority": 0}


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        ([], Exit.CONFIG, "nothing to change"),
        (["--clear", "name"], Exit.CONFIG, "--clear: no setting is named 'name'; there are models, tiers"),
        (["--model", "nobody"], Exit.CONFIG, 'models[0]: no model is named "nobody"'),
        (["--limit", "requests_per_hour=5"], Exit.CONFIG, "requests_per_hour: unknown key"),
        (["--limit", "requests_per_minute=few"], Exit.CONFIG, "--limit: expected LIMIT=NUMBER"),
        (["--expires", "soon"], Exit.CONFIG, "--expires: expected 90d"),
    ],
)
def test_what_no_key_may_be_set_to_changes_nothing(
    config: str, arguments: list[str], code: Exit, problem: str
) -> None:
    keys(config, "add", "k", "--model", "m")
    before = stored(config)
    done = keys(config, "set", "k", *arguments)
    assert (done.exit_code, done.stdout) == (code, "")
    assert problem in done.stderr
    assert stored(config) == before


def test_list_shows_the_last_use_and_what_is_left_of_budgets_today(config: str) -> None:
    Path(config).write_text(CONFIG + "[models.priced]\nprice.prompt = 1\n")
    for name, limit in (
        ("spent", "tokens_per_day=100"),
        ("over", "tokens_per_day=50"),
        ("money", "cost_per_day=2.5"),
    ):
        keys(config, "add", name, "--limit", limit, "--limit", "requests_per_minute=5")
    keys(config, "add", "free")
    labels = {key.name: key.label for key in stored(config)}
    day = int(datetime.now(UTC).timestamp() // 86_400) * 86_400
    store = Store(str(Path(config).parent / "keys.db"))
    store.turn(
        [
            Spent(f"key:{labels['spent']}", "tokens_per_day", day, 30),
            Spent(f"key:{labels['over']}", "tokens_per_day", day - 86_400, 80),
            Spent(f"key:{labels['money']}", "cost_per_day", day, 10**9),
        ],
        {labels["spent"]: datetime(2026, 3, 4, 5, 6, tzinfo=UTC).timestamp()},
    )
    store.close()
    rows = {row["name"]: row for row in json.loads(keys(config, "list", "--json").stdout)}
    assert {name: (row["used"], row["left"]) for name, row in rows.items()} == {
        "spent": ("2026-03-04T05:06Z", {"tokens_per_day": 70}),
        "over": (None, {"tokens_per_day": 20}),
        "money": (None, {"cost_per_day": 1.5}),
        "free": (None, {}),
    }
    (line,) = [line for line in keys(config, "list").stdout.splitlines() if " spent " in line]
    assert "2026-03-04T05:06Z" in line
    assert line.endswith('{"tokens_per_day": 70}')


@pytest.mark.parametrize("command", ["revoke", "rotate"])
def test_a_key_that_is_not_there_is_said_so_and_a_whole_key_is_not_repeated(
    config: str, command: str
) -> None:
    done = keys(config, command, "nobody")
    assert (done.exit_code, done.stdout) == (Exit.FAILED, "")
    assert done.stderr == "no key that is not revoked has this beginning or name: nobody\n"
    text = keys(config, "add", "k").stdout.strip()
    done = keys(config, command, text)
    assert done.exit_code == Exit.FAILED
    assert text not in done.output
    assert len(stored(config)[0].hashes) == 1


def test_without_a_store_it_says_what_to_set(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(CONFIG.replace('store = "keys.db"', ""))
    for command in (
        ["add", "k"],
        ["list"],
        ["revoke", "k"],
        ["rotate", "k"],
        ["set", "k", "--priority", "1"],
    ):
        done = keys(str(path), *command)
        assert (done.exit_code, done.stdout) == (Exit.CONFIG, "")
        assert done.stderr.startswith("server.store: not set")


def test_a_file_that_is_no_store_fails_and_the_gateway_does_not_start_with_it(config: str) -> None:
    (Path(config).parent / "keys.db").write_bytes(b"x" * 5000)
    done = keys(config, "list")
    assert (done.exit_code, done.stdout) == (Exit.FAILED, "")
    assert "keys.db: file is not a database" in done.stderr
    served = CliRunner().invoke(main, ["serve", "--config", config])
    assert served.exit_code == Exit.CONFIG
    assert "keys.db: file is not a database" in served.stderr
