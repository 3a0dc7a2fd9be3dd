"""The command line: what it prints, what it exits with, and what it must not load or show."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner, Result

from proxy import __version__
from proxy.cli import Exit, main
from proxy.config import Config
from proxy.logs import JsonFormatter, set_up_logging

ROOT = Path(__file__).parents[2]
GOOD = '[[backends]]\nname = "a"\nurl = "http://127.0.0.1:1"\n[models.m]\n'


def run(*arguments: str, stdin: str = "", env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, list(arguments), input=stdin, env=env)


@pytest.fixture
def good(tmp_path: Path) -> str:
    path = tmp_path / "good.toml"
    path.write_text(GOOD)
    return str(path)


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before, level


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Config], int]], None]:
    """Put a stand-in where the gateway would be imported from: these tests are about the command."""

    def stand_in(run: Callable[[Config], int]) -> None:
        module = ModuleType("proxy.serve")
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "proxy.serve", module)

    return stand_in


def test_help_names_every_command_and_the_exit_codes() -> None:
    text = run("--help").output
    for word in ("serve", "check", "keys", "version", "0 done", "1 failed", "2 config or usage", "3 cannot"):
        assert word in text
    for command in (["serve"], ["check"], ["keys"], ["keys", "hash"], ["version"]):
        assert run(*command, "--help").exit_code == Exit.OK
        assert run(*command, "-h").output.startswith("Usage:")


def test_help_and_version_load_neither_the_gateway_nor_rich() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from proxy.cli import main\n"
        "assert CliRunner().invoke(main, ['--help']).exit_code == 0\n"
        "assert CliRunner().invoke(main, ['version']).exit_code == 0\n"
        "print(sorted({'aiohttp', 'rich', 'pydantic', 'prometheus_client'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_python_dash_m_proxy_is_the_same_command() -> None:
    command = [sys.executable, "-m", "proxy", "version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == run("version").output
    assert done.stdout.startswith(f"tierline {__version__} (Python 3.")


def test_an_unknown_option_is_a_usage_error() -> None:
    assert run("serve", "--nope").exit_code == Exit.CONFIG


# -- serve ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1])
def test_serve_hands_the_config_to_the_gateway_and_exits_with_its_code(
    gateway: Callable[..., None], good: str, code: int
) -> None:
    served: list[Config] = []

    def gateway_run(config: Config) -> int:
        served.append(config)
        return code

    gateway(gateway_run)
    assert run("serve", "--config", good).exit_code == code
    assert [config.backends[0].name for config in served] == ["a"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.EADDRINUSE, "Address already in use"), "cannot listen: Address already in use\n"),
        (PermissionError(errno.EACCES, "Permission denied"), "cannot listen: Permission denied\n"),
        (OSError(errno.EADDRNOTAVAIL, "no such address"), "cannot listen: no such address\n"),
        (
            socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
            "cannot listen: Name or service not known\n",
        ),
    ],
)
def test_an_address_that_cannot_be_had_has_its_own_exit_code(
    gateway: Callable[..., None], good: str, error: OSError, expected: str
) -> None:
    def gateway_run(config: Config) -> int:
        raise error

    gateway(gateway_run)
    done = run("serve", "-c", good)
    assert (done.exit_code, done.stderr, done.stdout) == (Exit.BIND, expected, "")


def test_another_failure_is_not_taken_for_an_address(gateway: Callable[..., None], good: str) -> None:
    def gateway_run(config: Config) -> int:
        raise OSError(errno.ENOSPC, "disk full")

    gateway(gateway_run)
    done = run("serve", "-c", good)
    assert done.exit_code == Exit.FAILED
    assert isinstance(done.exception, OSError)


@pytest.mark.parametrize("command", ["serve", "check"])
def test_a_config_with_problems_lists_them_on_stderr_and_exits_2(command: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(GOOD + "[server]\nport = 'x'\nprot = 1\n")
    done = run(command, "--config", str(path))
    assert done.exit_code == Exit.CONFIG
    assert done.stdout == ""
    assert done.stderr == (
        f'{path}: server.port: expected a port, 0 to 65535 (0: any free one), got "x"\n'
        f'{path}: server.prot: unknown key, did you mean "port"?\n'
    )


def test_the_config_may_be_named_by_the_environment(tmp_path: Path) -> None:
    done = run("check", env={"TIERLINE_CONFIG": str(tmp_path / "none.toml")})
    assert (done.exit_code, done.stderr) == (
        Exit.CONFIG,
        f"{tmp_path}/none.toml: cannot be read: No such file or directory\n",
    )


# -- check ---------------------------------------------------------------------------------------------------


def test_check_prints_the_effective_config_as_toml_and_who_may_serve_what(good: str) -> None:
    done = run("check", "--config", good)
    assert (done.exit_code, done.stderr) == (Exit.OK, "")
    toml, _, table = done.stdout.partition("Who may serve what")
    assert tomllib.loads(toml)["timeouts"]["keepalive_after"] == 15.0
    assert "│ m     │ balanced     │ nobody │ a        │ a    │" in table


def test_check_masks_secrets(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(GOOD + '[admin]\nkey = "env:ADMIN"\n')
    done = run("check", "--config", str(path), env={"ADMIN": "sk-hunter2"})
    assert done.exit_code == Exit.OK
    assert 'key = "*** (env:ADMIN)"' in done.stdout
    assert "hunter2" not in done.output


def test_check_notes_what_may_not_be_meant(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(
        GOOD.replace("[models.m]", '[models.m]\nbackends = ["a"]')
        + '[[backends]]\nname = "idle"\nurl = "https://h"\ntls.insecure_any_certificate = true\n'
        + "[server]\nallow_unauthenticated = true\n"
    )
    done = run("check", "--config", str(path))
    assert [line for line in done.stdout.splitlines() if line.startswith("note: ")] == [
        'note: backend "idle" serves no model',
        'note: backend "idle" is trusted whatever certificate it shows (tls.insecure_any_certificate = true)',
        "note: clients need no key (server.allow_unauthenticated = true)",
    ]


def test_check_probe_exits_1_when_a_backend_is_not_there(good: str) -> None:
    done = run("check", "--config", good, "--probe")
    assert done.exit_code == Exit.FAILED
    assert (
        "problem: a: reachable: Connection refused; is the server running, and is this its port?"
        in done.stdout
    )


# -- keys hash -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stdin", ["sk-hunter2", "sk-hunter2\n", "  sk-hunter2\r\n"])
def test_keys_hash_prints_what_the_config_wants_and_never_the_key(stdin: str) -> None:
    done = run("keys", "hash", "--name", "team a", stdin=stdin)
    assert done.exit_code == Exit.OK
    assert tomllib.loads(done.stdout)["server"]["keys"] == [
        {"name": "team a", "sha256": hashlib.sha256(b"sk-hunter2").hexdigest()}
    ]
    assert "hunter2" not in done.output


@pytest.mark.parametrize("stdin", ["", "\n", "two words", "schlüssel", "tab\tbed"])
def test_keys_hash_refuses_what_cannot_be_sent_as_a_key(stdin: str) -> None:
    done = run("keys", "hash", stdin=stdin)
    assert (done.exit_code, done.stdout) == (Exit.CONFIG, "")
    assert done.stderr == "a key is visible ASCII characters without spaces, and at least one\n"


def test_keys_hash_takes_no_key_from_the_command_line() -> None:
    assert run("keys", "hash", "sk-hunter2").exit_code == Exit.CONFIG


# -- logging -------------------------------------------------------------------------------------------------


def test_json_logs_are_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", "json")
    log = logging.getLogger("tierline.test")
    log.debug("not this")
    log.info("two\nlines of %s", "ünïcode")
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("failed")
    out, err = capsys.readouterr()
    first, second = (json.loads(line) for line in err.splitlines())
    assert out == ""
    assert first["message"] == "two\\nlines of ünïcode"
    assert (first["level"], first["logger"]) == ("info", "tierline.test")
    assert second["level"] == "error"
    assert second["traceback"].endswith("ValueError: why")


def test_json_logs_carry_utc_time_to_the_millisecond() -> None:
    record = logging.makeLogRecord(
        {"created": 1_700_000_000.25, "msg": "x", "name": "n", "levelname": "INFO"}
    )
    assert json.loads(JsonFormatter().format(record))["time"] == "2023-11-14T22:13:20.250+00:00"


def test_console_logs_go_to_stderr_from_the_level_on(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("warning", "console")
    logging.getLogger("tierline.test").info("not this")
    logging.getLogger("tierline.test").warning("this")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith(" WARNING tierline.test: this\n")
    assert err.count("\n") == 1


def test_every_exit_code_is_documented() -> None:
    page = (ROOT / "docs/configuration.md").read_text().replace("\n", " ")
    for code in Exit:
        assert f"{code.value} " in page.partition("Exit codes of every command:")[2][:400], code
