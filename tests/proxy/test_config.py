"""The configuration: what is read, what is refused and in which words, and that every key is documented."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from policies import BreakerParams, RouterParams, Tier
from proxy.config import (
    AdminKey,
    ApiKey,
    Backend,
    Config,
    ConfigError,
    Model,
    Secret,
    Tenant,
    effective,
    is_loopback,
    load,
    loads,
    serving,
)
from proxy.config.problems import key_names
from proxy.config.problems import line as worded
from proxy.tomltext import toml_lines

ROOT = Path(__file__).parents[2]

BASE = """
[[backends]]
name = "fp8"
url = "http://127.0.0.1:8001"
quality.kl_bits = 0.0055
[[backends]]
name = "bf16"
url = "http://127.0.0.1:8002"
quality.reference = true
[models.qwen]
"""


def problems(text: str, env: dict[str, str] | None = None, folder: Path = Path()) -> list[str]:
    with pytest.raises(ConfigError) as error:
        loads(text, env or {}, folder=folder)
    assert str(error.value) == "\n".join(error.value.problems)
    return list(error.value.problems)


# -- what is read --------------------------------------------------------------------------------------------


def test_a_backend_and_a_model_are_enough_and_the_rest_has_defaults() -> None:
    config = loads('backends = [{ name = "a", url = "http://h:1/" }]\n[models.m]\n', {})
    assert config.server.host == "127.0.0.1"
    assert config.server.port == 8080
    assert config.server.max_body_bytes == 64 * 1024 * 1024
    assert config.server.public_paths == ("/health", "/ready", "/version", "/metrics")
    assert config.backends[0].url == "http://h:1"
    assert config.backends[0].health_path == "/health"
    assert config.policy.router == RouterParams()
    assert config.health.breaker == BreakerParams()
    assert config.timeouts.keepalive_after == 15.0
    assert config.pool.idle_seconds < 5  # vLLM closes idle connections at 5 s
    assert config.telemetry.records_path is None
    route = config.resolve("m")
    assert route is not None
    assert (route.target, route.backends, route.tier, route.response_model) == (
        "m",
        ("a",),
        "balanced",
        "backend",
    )


def test_nothing_can_be_changed_after_loading() -> None:
    config = loads(BASE, {})
    with pytest.raises(ValidationError, match="frozen"):
        config.server.port = 1  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.policy.router.kv_limit = 0.5  # type: ignore[misc]


def test_policy_tables_become_the_dataclasses_of_policies() -> None:
    config = loads(BASE + "[policy.router]\nkv_limit = 1\n[policy.retry]\nmax_attempts = 1\n", {})
    assert config.policy.router == RouterParams(kv_limit=1.0)
    assert config.policy.retry.max_attempts == 1


def test_a_tier_table_changes_only_the_keys_it_names() -> None:
    config = loads(BASE + "[tiers.exact]\nmax_kl_bits = 0.1\n[tiers.draft]\nmax_kl_bits = 1\n", {})
    assert config.tier("exact") == Tier("exact", reference=True, max_kl_bits=0.1)
    assert config.tier("balanced") == Tier("balanced")
    assert config.tier("draft") == Tier("draft", max_kl_bits=1.0)
    assert config.tier("other") is None


def test_serving_asks_the_filter_that_routes() -> None:
    config = loads(BASE + "[tiers.close]\nmax_kl_bits = 0.001\n", {})
    both = ("fp8", "bf16")
    assert serving(config, both, "exact") == ("bf16",)
    assert serving(config, both, "close") == ("bf16",)
    assert serving(config, both, "balanced") == both
    assert serving(config, both, "nonsense") == ()


def test_a_backend_may_have_timeouts_of_its_own() -> None:
    config = loads(BASE.replace("quality.kl_bits = 0.0055", "timeouts.gap = 5"), {})
    fp8, bf16 = config.backends
    assert config.timeouts_for(fp8).gap == 5.0
    assert config.timeouts_for(fp8).connect == config.timeouts.connect
    assert config.timeouts_for(bf16) == config.timeouts


def test_an_alias_inherits_along_its_chain_and_the_nearest_wins() -> None:
    config = loads(
        BASE
        + """
backends = ["bf16"]
aliases = ["plain"]
tier = "exact"
defaults = { temperature = 1.0, top_k = 20 }
overrides.chat_template_kwargs = { enable_thinking = true, preserve_thinking = true }
[models.cool]
alias_of = "plain"
defaults.temperature = 0.5
[models.cooler]
alias_of = "cool"
tier = "fast"
response_model = "public"
defaults.temperature = 0.1
overrides.chat_template_kwargs.enable_thinking = false
""",
        {},
    )
    plain, cool, cooler = (config.resolve(name) for name in ("plain", "cool", "cooler"))
    assert plain is not None
    assert cool is not None
    assert cooler is not None
    assert (plain.name, plain.target, plain.tier, plain.backends) == ("plain", "qwen", "exact", ("bf16",))
    assert (cool.target, cool.tier, cool.response_model) == ("qwen", "exact", "backend")
    assert cool.defaults == {"temperature": 0.5, "top_k": 20}
    assert (cooler.target, cooler.tier, cooler.response_model) == ("qwen", "fast", "public")
    assert cooler.defaults == {"temperature": 0.1, "top_k": 20}
    kwargs = {"enable_thinking": False, "preserve_thinking": True}
    assert cooler.overrides == {"chat_template_kwargs": kwargs}
    assert cool.overrides["chat_template_kwargs"] == {"enable_thinking": True, "preserve_thinking": True}
    assert config.resolve("unknown") is None
    assert list(config.routes) == ["qwen", "plain", "cool", "cooler"]


def test_relative_paths_start_at_the_folder_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "key.txt").write_text("sk-from-file\n")
    path = tmp_path / "config.toml"
    text = BASE.replace("quality.kl_bits = 0.0055", 'key = "file:key.txt"')
    path.write_text(text + '[telemetry]\nrecords = "file:out/r.jsonl"\n')
    config = load(path, {})
    assert config.telemetry.records_path == tmp_path / "out/r.jsonl"
    assert config.backends[0].key is not None
    assert config.backends[0].key.reveal() == "sk-from-file"


# -- what is refused, word for word ---------------------------------------------------------------------------

# (text added to BASE, the problems it makes)
WRONG_VALUES = [
    ("[server]\nport = '8080'", ['server.port: expected a port, 0 to 65535 (0: any free one), got "8080"']),
    ("[server]\nport = 70000", ["server.port: expected a port, 0 to 65535 (0: any free one), got 70000"]),
    ("[server]\nport = true", ["server.port: expected a port, 0 to 65535 (0: any free one), got true"]),
    (
        "[server]\nmax_body_bytes = '64MiB'",
        ['server.max_body_bytes: expected a whole number of bytes, at least 1, got "64MiB"'],
    ),
    (
        "[server]\nmax_body_bytes = 1.5",
        ["server.max_body_bytes: expected a whole number of bytes, at least 1, got 1.5"],
    ),
    ("[timeouts]\ngap = 0", ["timeouts.gap: expected a number of seconds above 0, got 0"]),
    ("[timeouts]\ngap = nan", ["timeouts.gap: expected a number of seconds above 0, got NaN"]),
    ("[timeouts]\ngap = inf", ["timeouts.gap: expected a number of seconds above 0, got Infinity"]),
    ("[timeouts]\ngap = 2020-01-01", ["timeouts.gap: expected a number of seconds above 0, got 2020-01-01"]),
    (
        "[timeouts]\nkeepalive_after = -1",
        ["timeouts.keepalive_after: expected a number of seconds, or 0 for never, got -1"],
    ),
    ("[pool]\nmax_idle = -1", ["pool.max_idle: expected a whole number, at least 0, got -1"]),
    ("[server]\ncors_origins = 'x'", ['server.cors_origins: expected an array, got "x"']),
    (
        "[server]\ncors_origins = ['*', 'https://a.example/app']",
        [
            'server.cors_origins[1]: expected an origin such as "https://app.example.org" (no path), or "*", '
            'got "https://a.example/app"'
        ],
    ),
    (
        "[server]\npublic_paths = ['health']",
        ['server.public_paths[0]: expected a path that starts with "/", got "health"'],
    ),
    ("[server]\nallow_unauthenticated = 1", ["server.allow_unauthenticated: expected true or false, got 1"]),
    ("[server]\nuvloop = 'yes'", ['server.uvloop: expected "auto", "on" or "off", got "yes"']),
    ("server = 3", ["server: expected a table, got 3"]),
    ("[models.a]\ndefaults = 3", ["models.a.defaults: expected a table, got 3"]),
    ("[models.a]\ntier = ['x']", ["models.a.tier: expected a string, got an array"]),
    (
        "[admin]\nmetrics_on = { x = 1 }",
        ['admin.metrics_on: expected "data", "admin" or "both", got a table'],
    ),
    (
        "[models.'Qwen/3.6 27B']\n[models.'Qwen/3.6']\ntier = 3",
        [
            'models."Qwen/3.6 27B": expected a name of letters, digits and . _ - : / @ +, at most 128, '
            'got "Qwen/3.6 27B"',
            'models."Qwen/3.6".tier: expected a string, got 3',
        ],
    ),
    (
        "[telemetry]\nrecords = 'records.jsonl'",
        ['telemetry.records: expected "stdout", "off" or "file:PATH", got "records.jsonl"'],
    ),
    ("[policy.router]\nkv_limit = 2", ["policy.router: kv_limit must be above 0 and at most 1"]),
    (
        "[policy.router]\nfresh_seconds = inf",
        ["policy.router.fresh_seconds: expected a finite number, got Infinity"],
    ),
    ("[policy.router]\nkv_limit = '1'", ['policy.router.kv_limit: expected a number, got "1"']),
    ("[policy.router]\nkv_limit = true", ["policy.router.kv_limit: expected a number, got true"]),
    (
        "[policy.tokens]\ntokens_per_image = 1.5",
        ["policy.tokens.tokens_per_image: expected a whole number, got 1.5"],
    ),
    ("[policy.retry]\nmax_attempts = 0", ["policy.retry: max_attempts must be 1 or more"]),
    (
        "[models.a]\ndefaults.when = 2020-01-01",
        ["models.a.defaults: when: a TOML date or time has no JSON form; write a string"],
    ),
    ("[models.a]\noverrides.x = [1, nan]", ["models.a.overrides: x: JSON has no infinity and no NaN"]),
    ("[models.a]\ndefaults.x.y.z = 1", ["models.a.defaults: x.y: tables can be nested once, not deeper"]),
    (
        "[models.a]\ndefaults.stream = true",
        ['models.a.defaults: "stream" belongs to the request itself and cannot be set here'],
    ),
    (f"[telemetry]\nlog_level = '{'x' * 80}'", None),
]


@pytest.mark.parametrize(("text", "expected"), WRONG_VALUES, ids=[text for text, _ in WRONG_VALUES])
def test_a_wrong_value_is_named_with_its_place_what_was_expected_and_what_it_got(
    text: str, expected: list[str] | None
) -> None:
    # First, so that a bare `key = value` is not read as part of a table.
    found = problems(text + "\n" + BASE)
    if expected is None:  # long values are cut
        assert found[0].endswith(', got "' + "x" * 58 + "…")
    else:
        assert found == [f"config: {line}" for line in expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[server]\nprot = 1", 'server.prot: unknown key, did you mean "port"?'),
        ("[servers]\nport = 1", 'servers: unknown key, did you mean "server"?'),
        ("[[backend]]\nname = 'x'", 'backend: unknown key, did you mean "backends"?'),
        (
            "[server]\nkeepalive_after = 1",
            'server.keepalive_after: unknown key, did you mean "timeouts.keepalive_after"?',
        ),
        ("[policy]\nkv_limit = 1", 'policy.kv_limit: unknown key, did you mean "policy.router.kv_limit"?'),
        ("[policy.router]\nkv_limits = 1", 'policy.router.kv_limits: unknown key, did you mean "kv_limit"?'),
        ("[models.a]\nteir = 1", 'models.a.teir: unknown key, did you mean "tier"?'),
        (
            "[tiers.a]\nkl_bits = 1",
            'tiers.a.kl_bits: unknown key, did you mean "backends[].quality.kl_bits"?',
        ),
        (
            "[tiers.a]\nbound = 1",
            "tiers.a.bound: unknown key, known here: reference, max_kl_bits, no_speculation, slo, spill, last_resort, "
            "continuation, hedge, requires_gate, gate_max_age",
        ),
        ("[pool]\nzzz = 'sk-secret'", "pool.zzz: unknown key, known here: idle_seconds, max_idle"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_right_one(text: str, expected: str) -> None:
    assert problems(text + "\n" + BASE) == [f"config: {expected}"]


def test_unknown_keys_inside_arrays_are_found_too() -> None:
    text = '[[backends]]\nnmae = "x"\nurl = "http://h:1"\nlimits.window = 3\n[models.m]\n'
    assert problems(text) == [
        "config: backends[0].name: required, but missing",
        'config: backends[0].limits.window: unknown key, did you mean "window_tokens"?',
        'config: backends[0].nmae: unknown key, did you mean "name"?',
    ]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("127.0.0.1:8000", None),
        ("ftp://h", None),
        ("http://", None),
        ("http://h h", None),
        ("http://h:99999", "the host or port of this URL cannot be read"),
        ("http://h:x", "the host or port of this URL cannot be read"),
        ("http://[::1", "the host or port of this URL cannot be read"),
        ("http://user:hunter2@h:1", 'credentials do not belong into a URL: use key = "env:NAME"'),
        ("http://h:1/x?token=hunter2", "a base URL has no query and no fragment"),
        ("http://h:1/#hunter2", "a base URL has no query and no fragment"),
        ("http://:80", "this URL has no host"),
        ("http://h:1/v1", 'leave out the "/v1" at the end: the endpoint\'s own path is added'),
        ("http://h:1/v1/", 'leave out the "/v1" at the end: the endpoint\'s own path is added'),
    ],
)
def test_a_backend_url_is_refused_without_repeating_it(url: str, expected: str | None) -> None:
    what = expected or (
        'expected "http://HOST:PORT" or "https://HOST:PORT", with a path where the backend has one'
    )
    assert problems(f'[models.m]\n[[backends]]\nname = "a"\nurl = "{url}"\n') == [
        f"config: backends[0].url: {what}"
    ]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h", 'expected "valkey://HOST:PORT", "valkeys://HOST:PORT" (TLS) or "unix:///PATH"'),
        ("valkey://h:x", "the host or port of this URL cannot be read"),
        ("valkey://u:hunter2@h", 'credentials do not belong into a URL: use password = "env:NAME"'),
        ("valkey://h/0?token=hunter2", "this URL has no query and no fragment"),
        ("unix://h/s", 'expected the path of a socket: "unix:///run/valkey.sock"'),
        ("valkey://:1", "this URL has no host"),
        ("redis://h/hunter2", 'behind the host comes the number of a database, such as "valkey://HOST/0"'),
    ],
)
def test_the_url_of_shared_limits_is_refused_without_repeating_it(url: str, expected: str) -> None:
    assert problems(f'{BASE}[limits.shared]\nurl = "{url}"\n') == [f"config: limits.shared.url: {expected}"]


@pytest.mark.parametrize("url", ["http://h", "https://h:8000/a/b", "http://[::1]:8000", "http://10.0.0.1:1"])
def test_a_backend_url_may_be_http_or_https_with_a_path(url: str) -> None:
    config = loads(f'[models.m]\n[[backends]]\nname = "a"\nurl = "{url}/"\n', {})
    assert config.backends[0].url == url


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a = ?", "line 1, column 5"),
        ("[a]\nb = 1\n c = = 2", "line 3, column 6"),
        ("a = 1\na = 2\n", "line 2, column 6"),
        ("a = ", "end of document"),
        ('a = "x', "end of document"),
    ],
)
def test_a_syntax_error_names_line_and_column(text: str, place: str) -> None:
    (found,) = problems(text)
    assert re.fullmatch(rf"config: {place}: not valid TOML: \w[^()]+", found)


def test_a_file_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=re.escape(f"{tmp_path / 'no.toml'}: cannot be read: No such file or directory")
    ):
        load(tmp_path / "no.toml")
    (tmp_path / "latin.toml").write_bytes(b"a = '\xe9'")
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path / 'latin.toml'}: not UTF-8 at byte 5")):
        load(tmp_path / "latin.toml")


# (text added to BASE, the problems it makes)
REACHABLE = (
    'server.host: "0.0.0.0" can be reached from other machines, and without keys anyone there could use the backends: '
    'add [[server.keys]] or server.store, or bind to "127.0.0.1", or accept it with allow_unauthenticated = true'
)
BROKEN_RULES: list[tuple[str, list[str]]] = [
    (
        'backends = ["fp9", "fp8", "fp8"]',
        [
            'models.qwen.backends[0]: no backend is named "fp9" (configured: "bf16", "fp8")',
            'models.qwen.backends[2]: "fp8" is listed twice',
        ],
    ),
    (
        '[[backends]]\nname = "fp8"\nurl = "http://127.0.0.1:8002/"',
        [
            'backends[2].name: "fp8" is already the name of backends[0]',
            "backends[2].url: http://127.0.0.1:8002 is already the URL of backends[1]",
        ],
    ),
    (
        '[[backends]]\nname = "x"\nurl = "http://h:1"\nprofile = "fp8-mtp3-tp2-v18"',
        ['backends[2].profile: no profile is named "fp8-mtp3-tp2-v18", did you mean "fp8-mtp3-tp2-v17"?'],
    ),
    (
        '[[backends]]\nname = "x"\nurl = "http://h:1"\ntls.insecure_any_certificate = true',
        ["backends[2].tls: the URL is http, so no TLS can be set up: write https, or drop it"],
    ),
    (
        '[[backends]]\nname = "x"\nurl = "http://h:1"\nquality = { reference = true, kl_bits = 0.5 }',
        [
            "backends[2].quality: reference weights diverge from themselves by 0 bits, not 0.5: "
            "drop kl_bits or reference"
        ],
    ),
    (
        '[models.a]\naliases = ["qwen", "b", "b"]\n[models.c]\naliases = ["b"]',
        [
            'models.a.aliases[0]: "qwen" is already the name of a model: models.qwen',
            'models.a.aliases[2]: "b" is listed twice',
            'models.c.aliases[0]: "b" is already an alias of "a"',
        ],
    ),
    (
        '[models.a]\nalias_of = "nope"\nbackends = ["fp8"]',
        [
            "models.a.backends: an alias is served where its model is: drop backends or alias_of",
            'models.a.alias_of: no model is named "nope" (configured: "qwen")',
        ],
    ),
    ('[models.a]\nalias_of = "a"', ["models.a.alias_of: goes in a circle: a → a"]),
    (
        '[models.a]\nalias_of = "b"\n[models.b]\nalias_of = "a2"\n[models.c]\nalias_of = "a"\n'
        '[models.a2]\nalias_of = "a"',
        [
            "models.a.alias_of: goes in a circle: a → b → a2 → a",
            "models.b.alias_of: goes in a circle: b → a2 → a → b",
            "models.a2.alias_of: goes in a circle: a2 → a → b → a2",
        ],
    ),
    (
        'tier = "best"\n[policy]\ndefault_tier = "good"',
        [
            'policy.default_tier: no tier is named "good" (configured: "exact", "balanced", "fast")',
            'models.qwen.tier: no tier is named "best" (configured: "exact", "balanced", "fast")',
        ],
    ),
    (
        'backends = ["fp8"]\n[models.strict]\nalias_of = "qwen"\ntier = "exact"',
        [
            'models.strict: tier "exact" wants reference weights, and none of its backends has that (fp8): '
            "set their quality, or another tier"
        ],
    ),
    (
        'backends = ["fp8"]\ntier = "fine"\n[tiers.fine]\nmax_kl_bits = 0.001',
        [
            'models.qwen: tier "fine" wants kl_bits of at most 0.001, and none of its backends has that (fp8): '
            "set their quality, or another tier"
        ],
    ),
    (
        "[tiers.exact]\nreference = false",
        ["tiers.exact.reference: must stay true: exact promises the reference weights"],
    ),
    (
        "[admin]\nport = 8080",
        ["admin.port: 8080 is already the port of server: give the admin listener another"],
    ),
    (
        '[admin]\nport = 8080\nhost = "localhost"',
        ["admin.port: 8080 is already the port of server: give the admin listener another"],
    ),
    ('[server]\nhost = "0.0.0.0"', [REACHABLE]),
    (
        '[admin]\nhost = "::"',
        [
            'admin.host: "::" can be reached from other machines, and whoever reaches it could drain backends: '
            'set admin.key, or bind to "127.0.0.1"'
        ],
    ),
    (
        '[[server.keys]]\nname = "a"\n[[server.keys]]\nname = "b"\nkey = "env:K"\nsha256 = "'
        + "0" * 64
        + '"',
        [
            "server.keys[0]: give either key or sha256, and not both",
            "server.keys[1]: give either key or sha256, and not both",
        ],
    ),
    (
        '[[server.keys]]\nname = "a"\nkey = "env:K"\n[[server.keys]]\nname = "a"\nsha256 = "'
        + hashlib.sha256(b"sk-k").hexdigest()
        + '"\n[admin]\nkey = "env:K"',
        [
            'server.keys[1].name: "a" is already the name of server.keys[0]',
            "server.keys[1]: the same key as server.keys[0], but another tenant",
            "admin.key: the same key as server.keys[0]: a client could drain backends",
            "admin.key: the same key as server.keys[1]: a client could drain backends",
        ],
    ),
    (
        '[[server.keys]]\nname = "a"\nkey = "env:K"\nmodels = ["qwn"]\n[tenants."t.u"]\ntiers = ["best"]',
        [
            'server.keys[0].models[0]: no model is named "qwn" (configured: "qwen")',
            'tenants."t.u".tiers[0]: no tier is named "best" (configured: "exact", "balanced", "fast")',
        ],
    ),
    (
        '[limits.shared]\nurl = "valkey://h"\nverify = false\nusername = "u"\n'
        "[tenants.t]\nlimits.requests_per_minute = 200000000\nlimits.concurrent_requests = 200000000\n"
        "limits.cost_per_day = 1e9\n[models.dear]\nprice.prompt = 1\n[server]\nstore = 'k.db'",
        [
            'limits.shared.verify: only with "valkeys://"; this connection is not encrypted',
            "limits.shared.username: needs a password",
            "tenants.t.limits.requests_per_minute: at most 150119987 where limits are shared "
            "(limits.shared), got 200000000",
            "tenants.t.limits.cost_per_day: at most 9007199 where limits are shared (limits.shared), "
            "got 1000000000.0",
        ],
    ),
    (
        '[models.nick]\nalias_of = "qwen"\nlimits.concurrent_requests = 1\nprice.prompt = 1',
        [
            "models.nick.limits: an alias shares those of its model: move them there, or drop them",
            "models.nick.price: an alias shares those of its model: move them there, or drop them",
        ],
    ),
    (
        "[tenants.t]\nlimits.tokens_per_day = 5",
        [
            "tenants.t.limits.tokens_per_day: would begin anew at each restart: set server.store, where it is kept"
        ],
    ),
    (
        '[server]\nstore = "k.db"\n[tenants.t]\nlimits.cost_per_month = 5',
        [
            "tenants.t.limits.cost_per_month: no model has a price, so it could never be reached: set "
            "models.NAME.price"
        ],
    ),
    (
        '[admin]\nenabled = false\nmetrics_on = "admin"',
        ['admin.metrics_on: "admin", but the admin listener is not enabled: nothing could be scraped'],
    ),
    (
        "[timeouts]\nkeepalive_after = 60",
        [
            "timeouts.keepalive_after: 60 s is not below first_token (60 s), so no comment would ever be sent; "
            "0 turns them off"
        ],
    ),
    (
        "[timeouts]\ntotal = 30\nkeepalive_after = 0",
        [
            "timeouts.first_token: 60 s is above total (30 s)",
            "timeouts.gap: 60 s is above total (30 s)",
        ],
    ),
    (
        '[[backends]]\nname = "x"\nurl = "http://h:1"\ntimeouts.connect = 9000',
        ["backends[2].timeouts.connect: 9000 s is above total (3600 s)"],
    ),
]


@pytest.mark.parametrize(("text", "expected"), BROKEN_RULES, ids=[text for text, _ in BROKEN_RULES])
def test_keys_that_are_right_alone_may_be_wrong_together(text: str, expected: list[str]) -> None:
    found = problems(BASE + text + "\n", {"K": "sk-k"})
    assert found == [f"config: {line}" for line in expected]


def test_uvloop_can_be_demanded_only_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert problems(BASE + '[server]\nuvloop = "on"\n') == [
        'config: server.uvloop: "on", but uvloop is not installed here: install it, or write "auto"'
    ]
    assert loads(BASE + '[server]\nuvloop = "auto"\n', {}).server.uvloop == "auto"


def test_an_empty_file_says_what_a_configuration_needs() -> None:
    assert problems("") == [
        "config: backends: none is configured: add [[backends]] with name and url",
        "config: models: none is configured: add [models.NAME], where NAME is what clients ask for",
    ]


@pytest.mark.parametrize(
    "text",
    [
        '[server]\nhost = "0.0.0.0"\nallow_unauthenticated = true',
        '[server]\nhost = "0.0.0.0"\nkeys = [{ name = "a", key = "env:K" }]',
        '[server]\nhost = "::1"',
        '[server]\nhost = "127.8.8.8"',
        '[admin]\nhost = "0.0.0.0"\nkey = "env:K"',
        '[admin]\nhost = "0.0.0.0"\nenabled = false',
        "[server]\nport = 0\n[admin]\nport = 0",
        "[admin]\nenabled = false\nport = 8080",
        '[server]\nhost = "10.0.0.1"\nallow_unauthenticated = true\n[admin]\nport = 8080',
        '[[backends]]\nname = "lora"\nurl = "http://127.0.0.1:8001"\nmodel = "lora"',
        "[timeouts]\nkeepalive_after = 0",
    ],
)
def test_what_the_rules_must_let_pass(text: str) -> None:
    loads(BASE + text, {"K": "sk-k"})


def test_all_problems_come_at_once_and_sound_sections_are_still_checked_against_each_other() -> None:
    text = 'tier = "nope"\n[timeouts]\ngap = "1"\n[server]\nhost = "0.0.0.0"\n[admin]\nport = "x"\n[pool]\nidle = 1\n'
    assert problems(BASE + text) == [
        'config: admin.port: expected a port, 0 to 65535 (0: any free one), got "x"',
        'config: timeouts.gap: expected a number of seconds above 0, got "1"',
        'config: pool.idle: unknown key, did you mean "max_idle"?',
        'config: models.qwen.tier: no tier is named "nope" (configured: "exact", "balanced", "fast")',
        f"config: {REACHABLE}",
    ]


def test_a_broken_section_causes_no_guesses_about_what_refers_to_it() -> None:
    text = '[[backends]]\nname = "a"\nurl = "http://h?x"\n[models.m]\nbackends = ["a"]\n'
    assert problems(text) == ["config: backends[0].url: a base URL has no query and no fragment"]


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("gw", False),
    ],
)
def test_loopback_is_what_only_this_machine_reaches(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


# -- secrets -------------------------------------------------------------------------------------------------

PLAIN_TEXT = (
    "a key is never written into this file: put it into an environment variable or a file of its own, "
    'and write "env:NAME" or "file:PATH"'
)


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("sk-hunter2", PLAIN_TEXT),
        ("hunter2:hunter2", PLAIN_TEXT),
        ("env:", PLAIN_TEXT),
        ("env:MISSING", "environment variable MISSING is not set"),
        ("env:EMPTY", "env:EMPTY is empty"),
        ("env:LINES", "env:LINES holds characters that cannot go into a header"),
        ("file:none.txt", "{folder}/none.txt cannot be read: No such file or directory"),
        ("file:binary", "{folder}/binary cannot be read: not UTF-8"),
    ],
)
def test_a_secret_that_cannot_be_read_is_refused_without_showing_it(
    reference: str, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfehunter2")
    env = {"EMPTY": " \n", "LINES": "hunter2\nhunter2"}
    found = problems(f'{BASE}[admin]\nkey = "{reference}"\n', env, tmp_path)
    assert found == [f"config: admin.key: {expected.format(folder=tmp_path)}"]
    assert "hunter2" not in str(found)


@pytest.mark.parametrize(
    "text",
    [
        'admin = { key = "HUNTER2" }',
        "admin = { key = 4711 }",
        'admin = { key = ["HUNTER2"] }',
        'admin = { keys = ["HUNTER2"] }',
        'api_key = "HUNTER2"',
        'server = { keys = "HUNTER2" }',
        'server = { keys = ["HUNTER2"] }',
        'server = { keys = [{ name = "a", sha256 = "HUNTER2" }] }',
        'server = { keys = [{ name = "a", secret = "HUNTER2" }] }',
        'server = { keys = [{ name = { HUNTER2 = "HUNTER2" } }] }',
        'health = { interval = ["HUNTER2"] }',
    ],
)
def test_no_message_repeats_what_may_be_a_secret(text: str) -> None:
    found = problems(text + "\n" + BASE)
    assert "HUNTER2" not in "\n".join(found)
    assert "4711" not in "\n".join(found)


def test_a_loaded_secret_shows_nowhere() -> None:
    config = loads(
        BASE.replace("quality.kl_bits = 0.0055", 'key = "env:K"')
        + '[admin]\nkey = "env:A"\n[[server.keys]]\nname = "a"\nkey = "env:C"\n',
        {"K": "sk-hunter2-k", "A": "sk-hunter2-a", "C": "sk-hunter2-c"},
    )
    assert config.admin.key is not None
    assert config.admin.key.reveal() == "sk-hunter2-a"
    assert config.server.keys[0].digest == hashlib.sha256(b"sk-hunter2-c").hexdigest()
    plain = effective(config)
    shown = [repr(config), str(config), f"{config.admin.key}", json.dumps(plain), str(config.model_dump())]
    shown += list(toml_lines(plain))
    assert "hunter2" not in "\n".join(shown)
    assert config.server.keys[0].digest not in json.dumps(plain)
    assert plain["admin"]["key"] == "*** (env:A)"  # type: ignore[index]


def test_a_hash_is_shortened_where_it_is_printed() -> None:
    config = loads(BASE + f'[[server.keys]]\nname = "a"\nsha256 = "{"ab" * 32}"\n', {})
    (shown,) = effective(config)["server"]["keys"]  # type: ignore[index]
    assert {name: shown[name] for name in ("name", "key", "sha256")} == {
        "name": "a",
        "key": None,
        "sha256": "abababab…",
    }
    assert config.server.keys[0].digest == "ab" * 32


def test_secrets_compare_by_value() -> None:
    assert Secret("a", "env:X") == Secret("a", "file:y")
    assert Secret("a", "env:X") != Secret("b", "env:X")
    assert len({Secret("a", "env:X"), Secret("a", "env:Y")}) == 1


# -- TLS -----------------------------------------------------------------------------------------------------


def test_certificates_are_read_while_loading(tmp_path: Path) -> None:
    trustme = pytest.importorskip("trustme")
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")
    (tmp_path / "text.pem").write_text("hello")
    text = '[models.m]\n[[backends]]\nname = "a"\nurl = "https://h"\ntls.ca = "%s"\n'
    tls = loads(text % "ca.pem", {}, folder=tmp_path).backends[0].tls
    assert len(tls.context().get_ca_certs()) >= 1
    assert problems(text % "text.pem", folder=tmp_path) == [
        f"config: backends[0].tls.ca: {tmp_path}/text.pem holds no PEM certificates"
    ]
    assert problems(text % "none.pem", folder=tmp_path) == [
        f"config: backends[0].tls.ca: {tmp_path}/none.pem cannot be read: No such file or directory"
    ]


FILES = {
    "a certificate without a key": (
        'tls.cert = "server.pem"',
        "server.tls.key: missing: a listener with TLS needs tls.cert and tls.key",
    ),
    "a key without a certificate": (
        'tls.key = "server.key"',
        "server.tls.cert: missing: a listener with TLS needs tls.cert and tls.key",
    ),
    "an authority alone": (
        'tls.client_ca = "ca.pem"',
        "server.tls.cert: missing: a listener with TLS needs tls.cert and tls.key",
    ),
    "another key": (
        'tls.cert = "server.pem"\ntls.key = "other.key"',
        "server.tls.key: {folder}/other.key is not the key of {folder}/server.pem",
    ),
    "no certificate": (
        'tls.cert = "text.pem"\ntls.key = "server.key"',
        "server.tls: {folder}/text.pem and {folder}/server.key are no certificate and key that can be used "
        "(not PEM, or the key wants a passphrase)",
    ),
    "a key with a passphrase": (
        'tls.cert = "server.pem"\ntls.key = "locked.key"',
        "server.tls: {folder}/server.pem and {folder}/locked.key are no certificate and key that can be used "
        "(not PEM, or the key wants a passphrase)",
    ),
    "nothing there": (
        'tls.cert = "none.pem"\ntls.key = "server.key"',
        "server.tls.cert: {folder}/none.pem cannot be read: No such file or directory",
    ),
    "a version that is too old": (
        'tls.cert = "server.pem"\ntls.key = "server.key"\ntls.minimum_version = "1.1"',
        'server.tls.minimum_version: expected "1.2" or "1.3", got "1.1"',
    ),
    "nobody to be trusted": (
        "proxy_protocol = true",
        "server.proxy_protocol: true, but nobody is trusted to say who a client is: name the proxies in trusted_proxies",
    ),
    "a network with host bits": (
        'trusted_proxies = ["10.0.0.1/8"]',
        'server.trusted_proxies[0]: expected an address or a network, such as "10.0.0.0/8" '
        "(10.0.0.1/8 has host bits set)",
    ),
}


@pytest.mark.parametrize(("lines", "problem"), FILES.values(), ids=FILES.keys())
def test_a_listener_has_a_certificate_and_key_that_fit_or_does_not_start(
    tmp_path: Path, lines: str, problem: str
) -> None:
    trustme = pytest.importorskip("trustme")
    from cryptography.hazmat.primitives import serialization as how

    ca = trustme.CA()
    made = ca.issue_cert("localhost")
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    made.cert_chain_pems[0].write_to_path(tmp_path / "server.pem")
    made.private_key_pem.write_to_path(tmp_path / "server.key")
    ca.issue_cert("localhost").private_key_pem.write_to_path(tmp_path / "other.key")
    key = how.load_pem_private_key(made.private_key_pem.bytes(), None)
    locked = how.BestAvailableEncryption(b"open")
    (tmp_path / "locked.key").write_bytes(
        key.private_bytes(how.Encoding.PEM, how.PrivateFormat.PKCS8, locked)
    )
    (tmp_path / "text.pem").write_text("hello")
    text = f'[server]\n{lines}\n[models.m]\n[[backends]]\nname = "a"\nurl = "http://h"\n'
    assert problems(text, folder=tmp_path) == [f"config: {problem.format(folder=tmp_path)}"]


# -- whatever is written, the answer is a Config or a ConfigError ----------------------------------------------

NAMES = sorted({part.strip("[]") for path in key_names(Config) for part in path.split(".")})
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(NAMES)
)
TABLES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from([*Config.model_fields]) | st.text(max_size=3), TABLES, max_size=5))
def test_any_table_is_read_or_refused_line_by_line(table: dict[str, object]) -> None:
    lines = []
    try:
        Config.model_validate(table)
    except ValidationError as error:
        lines = [worded(dict(problem), Config) for problem in error.errors()]
    assert all(re.fullmatch(r"(?s).+: .+", problem) for problem in lines)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from([*Config.model_fields]), TABLES, max_size=5))
def test_any_text_is_read_or_refused_line_by_line(table: dict[str, object]) -> None:
    text = "\n".join(toml_lines(table))
    found: tuple[str, ...] | None = None
    try:
        loads(text, {})
    except ConfigError as error:
        found = error.problems
    assert found is None or found
    assert all(problem.startswith("config: ") for problem in found or ())


# -- config.toml and docs/configuration.md ---------------------------------------------------------------------


def leaves() -> Iterator[str]:
    """Keys that hold a value rather than a table of further keys."""
    names = list(key_names(Config))
    for name in names:
        if name in ("server.keys", "admin.keys") or not any(
            other.startswith((f"{name}.", f"{name}[].")) for other in names
        ):
            yield name


REQUIRED = {"backends[].name", "backends[].url", "server.keys[].name", "admin.keys[].name"}


def default_of(path: str) -> str:
    """A key's default as TOML, or "none", or "required"."""
    if path in REQUIRED:
        return "required"
    here: object = Config()
    for head, table in {
        "backends[].": Backend.model_construct(),
        "server.keys[].": ApiKey.model_construct(),
        "admin.keys[].": AdminKey.model_construct(),
        "models.NAME.": Model(),
        "tenants.NAME.": Tenant(),
        "tiers.NAME.": Config().tiers["fast"],
    }.items():
        if path.startswith(head):
            here, path = table, path.removeprefix(head)
    for part in path.split("."):
        here = getattr(here, part)
    return "none" if here is None else json.dumps(list(here) if isinstance(here, tuple) else here)


def test_every_key_is_documented_with_its_default() -> None:
    rows = {}
    for line in (ROOT / "docs/configuration.md").read_text().splitlines():
        if found := re.match(r"\| `([^`]+)` \| [^|]+ \| (`[^`]*`|none|required) \| [^|]* \| [^|]+ \|$", line):
            rows[found[1]] = found[2].strip("`")
    assert rows == {path: default_of(path) for path in leaves()}


def test_config_toml_runs_as_it_stands() -> None:
    config = load(ROOT / "config.toml", {})
    assert [backend.name for backend in config.backends] == ["fp8", "bf16"]
    assert serving(config, config.routes["qwen-exact"].backends, "exact") == ("bf16",)


def test_config_toml_shows_the_model_cards_sampling_modes() -> None:
    routes = load(ROOT / "config.toml", {}).routes
    shown = {
        name: (*route.defaults.values(), route.overrides["chat_template_kwargs"])
        for name, route in routes.items()
        if route.overrides
    }
    assert shown == {
        "qwen-thinking": (1.0, 0.95, 20, 0.0, 0.0, 1.0, {"enable_thinking": True}),
        "qwen-thinking-coding": (0.6, 0.95, 20, 0.0, 0.0, 1.0, {"enable_thinking": True}),
        "qwen-instruct": (0.7, 0.8, 20, 0.0, 1.5, 1.0, {"enable_thinking": False}),
        "qwen-instruct-reasoning": (1.0, 0.95, 20, 0.0, 1.5, 1.0, {"enable_thinking": False}),
    }


def uncommented() -> str:
    return re.sub(r"(?m)^#(?=[a-z_.\d]+ = |\[)", "", (ROOT / "config.toml").read_text())


def test_what_config_toml_has_commented_out_is_valid_when_uncommented(tmp_path: Path) -> None:
    trustme = pytest.importorskip("trustme")
    ca = trustme.CA()
    for name in ("backends-ca", "clients-ca", "admins-ca"):
        ca.cert_pem.write_to_path(tmp_path / f"{name}.pem")
    for name in ("server", "admin", "gateway"):
        made = ca.issue_cert("localhost")
        made.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
        made.private_key_pem.write_to_path(tmp_path / f"{name}.key")
    (tmp_path / "my_policy.py").write_text(
        "def score(facts, backend):\n    return {'load': backend.in_flight}\n"
    )
    passed = '{"format": 1, "at": 1.0, "passed": true, "tests": [{"name": "arithmetic", "passed": true}]}'
    (tmp_path / "gate.json").write_text(passed)
    env = {
        "TIERLINE_KEY_NOTEBOOKS": "sk-a",
        "TIERLINE_ADMIN_KEY": "sk-b",
        "TIERLINE_ADMIN_ANNA": "sk-d",
        "VLLM_KEY_FP8": "sk-c",
        "VALKEY_PASSWORD": "p",
    }
    text = uncommented().replace("http://127.0.0.1:8001", "https://127.0.0.1:8001")
    assert 'server_name = "vllm.example.org"' in text
    config = loads(text, env, folder=tmp_path)
    assert [key.name for key in config.server.keys] == ["notebooks", "batch"]
    assert config.backends[0].model == "Qwen3.6-27B"


def test_config_toml_names_every_key_with_its_default() -> None:
    shown: dict[str, str] = {}
    section = ""
    for line in uncommented().splitlines():
        if header := re.match(r"\[+([^\]]+)\]", line):
            section = re.sub(r"^(models|tiers|tenants)\..*", r"\1.NAME", header[1])
            section += "[]" if line.startswith("[[") else ""
        elif setting := re.match(
            r"([a-z_.0-9]+) = .*#.*?\b(?:default (none|\S.*?)|(required))(?:: .*)?$", line
        ):
            path = f"{section}.{setting[1]}".replace(".chat_template_kwargs.enable_thinking", "")
            shown.setdefault(path, setting[2] or setting[3])
    keys = {path for path in leaves() if path not in ("server.keys", "admin.keys")}
    assert {path: shown.get(path) for path in keys} == {path: default_of(path) for path in keys}


def test_the_effective_configuration_is_whole_and_valid_toml() -> None:
    config = load(ROOT / "config.toml", {})
    plain = effective(config)
    assert set(plain) == set(Config.model_fields)
    assert tomllib.loads("\n".join(toml_lines(plain)))["backends"][0]["quality"] == {
        "reference": False,
        "kl_bits": 0.0055,
    }
    again = loads("\n".join(toml_lines(plain)), {})
    assert again == config
