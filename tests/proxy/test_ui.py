"""The live page's addresses: what opens without a key, what is in each answer, what is in none; and the replay behind it."""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from policies import profile as profiles
from proxy.config import load
from proxy.errors import Outcome
from proxy.recordstore import RecordStore
from proxy.replay import whatif
from proxy.ui import queries
from proxy.ui.heat import heat
from proxy.ui.live import name_of
from proxy.ui.page import STATIC
from proxy.ui.whatif import active
from tests.client import Response, ask
from tests.proxy.conftest import Gateway
from tests.proxy.test_recordstore import NOW, made, record

ADMIN = "sk-admin-secret"
KEY = {"Authorization": f"Bearer {ADMIN}"}
SCRIPT = "<script>alert(1)</script>"
ENV = {"ADMIN_KEY": ADMIN, "APP_KEY": "sk-app-secret", "BACKEND_KEY": "sk-backend-secret"}
CONFIG = """
[admin]
port = 0
key = "env:ADMIN_KEY"
[telemetry]
records = "off"
store = "records.db"
decisions = true
[server]
port = 0
keys = [{ name = "app", tenant = "t", key = "env:APP_KEY", limits.requests_per_minute = 60 }]
[models.tiny]
"""
DATA = ("fleet", "latency", "requests", "explain?request_id=x", "heat", "conversations", "limits", "policy")


class Page(Gateway):
    async def get(self, path: str, key: bool = True, **more: Any) -> Response:
        headers = {**(KEY if key else {}), **more.pop("headers", {})}
        return await ask(self.app.admin_port, path, method=more.pop("method", "GET"), headers=headers, **more)

    async def data(self, name: str) -> Any:
        response = await self.get(f"/ui/api/{name}")
        assert response.status == 200, response.body
        return response.json


@pytest.fixture
async def page(make_gateway: Any, backend: Any, tmp_path: Path) -> Page:
    """A gateway that wrote records of three requests: two answered, one refused. Before them lies an old one, odd."""
    odd = record("odd", time.time() - 2 * 86_400, model=SCRIPT, key=SCRIPT, tenant=SCRIPT, backend=SCRIPT)
    RecordStore(str(tmp_path / "records.db"), lambda: NOW)([made(odd)])
    text = 'key = "env:BACKEND_KEY"\nprofile = "fp8-mtp3-tp2-v17"'
    gateway = await make_gateway(backend, config=CONFIG, per_backend={"a": text}, env=ENV)
    app = gateway.app
    app.gateway.recorder = app.recorder
    app.config.__dict__["home"] = tmp_path
    for name, model in (("one", "tiny"), ("two", "tiny"), ("three", "unknown")):
        headers = {"Authorization": "Bearer sk-app-secret", "x-request-id": name}
        await gateway.chat(model=model, stream=True, headers=headers)
    await app.recorder.close()
    gateway.__class__ = Page
    return gateway


@pytest.mark.parametrize("name", DATA)
async def test_data_wants_the_admin_key_and_is_never_kept_by_a_browser(page: Page, name: str) -> None:
    denied = await page.get(f"/ui/api/{name}", key=False)
    assert (denied.status, denied.json["error"]["code"]) == (401, "invalid_api_key")
    other = await page.get(f"/ui/api/{name}", key=False, headers={"Authorization": "Bearer sk-app-secret"})
    assert other.status == 401
    response = await page.get(f"/ui/api/{name}")
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["content-type"].startswith("application/json")
    for secret in ENV.values():
        assert secret.encode() not in response.body


@pytest.mark.parametrize("path", sorted(p.relative_to(STATIC).as_posix() for p in STATIC.rglob("*.*")))
async def test_every_file_of_the_page_opens_without_a_key_and_forbids_what_does_not_come_from_here(
    page: Page, path: str
) -> None:
    response = await page.get(f"/ui/{path}", key=False)
    assert (response.status, response.body) == (200, (STATIC / path).read_bytes())
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    again = await page.get(f"/ui/{path}", headers={"If-None-Match": response.headers["etag"]})
    assert again.status == 304


async def test_the_page_is_at_ui_and_its_addresses_are_relative(page: Page) -> None:
    moved = await page.get("/ui", key=False)
    assert (moved.status, moved.headers["location"]) == (308, "ui/")
    assert (await page.get("/ui/", key=False)).body == (STATIC / "index.html").read_bytes()


@pytest.mark.parametrize(
    "path",
    [
        "/ui/../admin/config",
        "/ui/%2e%2e/admin/config",
        "/ui/..%2f..%2fpage.py",
        "/ui/static/app.js",
        "/ui//etc/passwd",
    ]
    + ["/ui/app.js/../../page.py", "/ui/app.js%00", "/ui/vendor/", "/ui/api/../app.js", "/ui/api/nothing"],
)
async def test_no_path_leads_out_of_the_list_of_files(page: Page, path: str) -> None:
    response = await page.get(path, key=False)
    assert response.status in (400, 401, 404)
    assert b"import" not in response.body


def test_nothing_in_the_page_is_inline_or_comes_from_elsewhere_or_parses_markup() -> None:
    for path in STATIC.rglob("*.*"):
        text = path.read_text("utf-8")
        if path.suffix == ".html":
            assert " style=" not in text
            assert " on" not in [part[:3] for part in text.split("<")[1:] if "=" in part[:3]]
            assert "<script>" not in text
        if path.suffix in (".html", ".js") and path.parent == STATIC:
            assert "http" not in text
            for way in (
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
                "eval(",
                'setTimeout("',
            ):
                assert way not in text, f"{path.name}: {way}"


async def test_the_fleet_is_the_admin_apis_snapshot_with_what_was_measured(page: Page) -> None:
    found = await page.data("fleet")
    backends = (await page.get("/admin/backends")).json["backends"]
    (mine,) = found["backends"]
    assert {key: mine[key] for key in backends[0] if key != "polled_age_seconds"} == {
        key: value for key, value in backends[0].items() if key != "polled_age_seconds"
    }
    assert mine["measured"]["requests"] == 2
    assert mine["measured"]["failed"] == 0
    assert mine["measured"]["ttft"] > 0
    assert mine["measured"]["predicted_ttft"] > 0
    assert found["records"] is None


async def test_requests_come_newest_first_and_by_filter_and_names_are_plain_text(page: Page) -> None:
    found = await page.data("requests")
    assert [one["request_id"] for one in found["requests"]] == ["three", "two", "one", "odd"]
    assert found["requests"][3]["model"] == SCRIPT  # JSON; the page makes text nodes of it
    assert sorted(found["choices"]["backend"]) == [SCRIPT, "a"]
    assert [one["request_id"] for one in (await page.data("requests?model=tiny"))["requests"]] == [
        "two",
        "one",
    ]
    assert [one["request_id"] for one in (await page.data("requests?backend=a&limit=1"))["requests"]] == [
        "two"
    ]
    older = await page.data(f"requests?before={found['requests'][1]['row']}")
    assert [one["request_id"] for one in older["requests"]] == ["one", "odd"]
    outcome = found["requests"][0]["outcome"]
    assert outcome == "bad_request"
    assert [one["request_id"] for one in (await page.data("requests?outcome=failed"))["requests"]] == ["odd"]


async def test_a_request_is_explained_with_its_record_also_when_only_its_record_is_left(page: Page) -> None:
    row = (await page.data("requests?model=tiny"))["requests"][1]["row"]
    found = await page.data(f"explain?request_id=one&row={row}")
    assert found["record"]["backend"] == "a"
    assert "decisions" not in found["record"]
    (attempt,) = found["story"]["attempts"]
    assert attempt["backends"][0]["terms"]
    page.app.gateway.memory._stories.clear()
    again = await page.data("explain?request_id=one")
    assert again["story"] == found["story"] | {"queue_wait_seconds": again["story"]["queue_wait_seconds"]}
    unknown = await page.get("/ui/api/explain?request_id=nobody")
    assert (unknown.status, unknown.json["error"]["param"]) == (404, "request_id")


async def test_latencies_and_the_heat_map_hold_the_requests(page: Page) -> None:
    by = await page.data("latency?window=10m&by=backend")
    assert by["names"] == ["a", "–"]
    assert by["requests"]["a"]["count"] == [2]
    assert len(by["ttft"]["a"]["p95"]) == 1
    found = await page.data("heat")
    assert sum(cell["requests"] for cell in found["cells"]) == 2
    assert found["cells"][0]["profile_rate"] > 0


async def test_conversations_are_hashes_and_limits_say_what_is_used(page: Page) -> None:
    talks = await page.data("conversations")
    assert talks["backends"][0]["backend"] == "a"
    assert all(len(talk["conversation"]) == 12 for talk in talks["talks"])
    (limit,) = (await page.data("limits"))["limits"]
    assert (limit["scope"], limit["name"], limit["limit"], limit["of"]) == (
        "key",
        "app",
        "requests_per_minute",
        60,
    )
    assert 0 < limit["used"] <= 3


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("latency?window=1y", "window"),
        ("latency?by=key", "by"),
        ("requests?limit=x", "limit"),
        ("requests?before=-1", "before"),
        ("heat?backend=nobody", "backend"),
        ("explain", "request_id"),
    ],
)
async def test_a_question_that_makes_no_sense_is_a_400_that_names_its_parameter(
    page: Page, path: str, param: str
) -> None:
    response = await page.get(f"/ui/api/{path}")
    assert (response.status, response.json["error"]["param"]) == (400, param)


async def test_without_a_store_the_page_says_how_to_switch_it_on(make_gateway: Any, backend: Any) -> None:
    config = '[admin]\nport = 0\n[telemetry]\nrecords = "off"\nstore = "off"\n'
    gateway = await make_gateway(backend, config=config)
    here = {"host": "localhost"}  # without a key nobody else may ask
    for name in ("latency", "requests", "heat"):
        response = await ask(gateway.app.admin_port, f"/ui/api/{name}", method="GET", headers=here)
        assert response.status == 409
        assert "telemetry.store" in response.json["error"]["message"]
    fleet = (await ask(gateway.app.admin_port, "/ui/api/fleet", method="GET", headers=here)).json
    assert "telemetry.store" in fleet["records"]
    assert fleet["backends"][0]["measured"] is None


async def test_a_damaged_store_is_a_503_and_the_fleet_is_shown_all_the_same(
    page: Page, tmp_path: Path
) -> None:
    for more in ("-wal", "-shm"):
        (tmp_path / f"records.db{more}").unlink(missing_ok=True)
    (tmp_path / "records.db").write_bytes(b"no database at all" * 100)
    response = await page.get("/ui/api/requests")
    assert (response.status, response.json["error"]["code"]) == (503, "busy")
    assert (await page.data("fleet"))["backends"]


def test_a_conversation_that_is_no_hash_yet_becomes_one() -> None:
    assert name_of("0123456789ab") == "0123456789ab"
    assert name_of("a secret session") != "a secret session"
    assert len(name_of("a secret session")) == 12


# -- the questions


def store(path: Path, *records: Any) -> sqlite3.Connection:
    RecordStore(str(path), lambda: NOW)([made(one) for one in records])
    return sqlite3.connect(path)


def test_percentiles_of_a_step_are_exact(tmp_path: Path) -> None:
    def one(number: int) -> Any:
        return record(
            str(number), NOW - 5, backend="a", stream=True, first_delta_at=10.0 + number, admitted_at=10.0
        )

    with closing(store(tmp_path / "r.db", *map(one, range(1, 101)))) as db:
        found = queries.latencies(db, NOW, "10m", "none")
    assert [found["ttft"][""][share] for share in ("p50", "p95", "p99")] == [[50.0], [95.0], [99.0]]
    assert (found["requests"][""]["count"], found["every"]) == ([100], 1)


def test_many_records_are_counted_all_and_sorted_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "MOST_SORTED", 10)
    rows = [record(str(n), NOW - 5, stream=True, first_delta_at=10.0 + n) for n in range(1, 96)]
    with closing(store(tmp_path / "r.db", *rows)) as db:
        found = queries.latencies(db, NOW, "10m", "none")
    assert (found["requests"][""]["count"], found["every"]) == ([95], 10)
    assert found["ttft"][""]["p99"] == [90.0]


@pytest.mark.parametrize("ago", [0, 1, 49, 50, 99, 100, 1000])
def test_a_window_begins_with_the_first_record_that_ended_in_it(tmp_path: Path, ago: int) -> None:
    """Whatever ended late in between: a stream of an hour lies among those that were short."""
    rows = [record(str(age), NOW - 4 - age) for age in range(100, 0, -1)]
    for place in range(0, 100, 3):
        rows[place].time -= 3600
        rows[place].accepted_at -= 3600
    with closing(store(tmp_path / "r.db", *rows)) as db:
        first, cut = queries.begin(db, NOW - ago)
        found = db.execute("SELECT count(*) FROM requests WHERE id >= ?", (first,)).fetchone()[0]
    assert (found, cut) == (min(ago, 100), False)


def test_cells_compare_with_the_profile_at_the_mean_of_their_requests() -> None:
    profile = profiles.get("fp8-mtp3-tp2-v17")
    rate = profile.stream_rate(6.0, 2000.0)
    rows = [(5, 1500, 1 / rate, 0.2, 0), (7, 2500, 1 / rate, 0.2, 0)]
    (cell,) = heat(rows, profile)
    assert cell["rate"] == pytest.approx(cell["profile_rate"])
    assert (cell["concurrency"], cell["context"]) == (3, 1)
    (blind,) = heat(rows, None)
    assert blind["profile_rate"] is None


# -- the replay


FLEET = """
[server]
port = 0
[telemetry]
store = "records.db"
[[backends]]
name = "fp8"
url = "http://127.0.0.1:9"
profile = "fp8-mtp3-tp2-v17"
[[backends]]
name = "bf16"
url = "http://127.0.0.1:10"
quality.reference = true
profile = "bf16-dflash8-tp2-v17"
[models.tiny]
"""


def job(folder: Path, candidate: str) -> dict[str, Any]:
    path = folder / "config.toml"
    path.write_text(FLEET)
    config = load(path)
    rows = [
        record(
            f"r{number}",
            NOW + number,
            tier="balanced",
            backend="fp8",
            model="tiny",
            stream=True,
            prompt_tokens=500,
            completion_tokens=100,
            prompt_tokens_estimate=500,
        )
        for number in range(20)
    ]
    for row in rows:
        row.outcome = Outcome.OK
    store(folder / "records.db", *rows).close()
    return {
        "config": str(path),
        "store": str(folder / "records.db"),
        "since": NOW - 3600,
        "active": active(config)["toml"],
        "candidate": candidate,
    }


def test_the_last_hour_is_modelled_under_both_policies(tmp_path: Path) -> None:
    found = whatif.outcome(job(tmp_path, '[policy]\nname = "round_robin"\n'))
    assert found["records"] == 20
    assert found["decisions"] is None
    before, after = (
        {b["backend"]: b["requests"] for b in found["model"][side]["backends"]}
        for side in ("before", "after")
    )
    assert before != after == {"fp8": 10, "bf16": 10}
    json.dumps(found, allow_nan=False)


def test_the_policy_in_force_is_shown_as_text_that_reads_back_as_itself(tmp_path: Path) -> None:
    given = job(tmp_path, "")
    assert (
        whatif._config(given["config"], given["active"]).policy_digest == load(given["config"]).policy_digest
    )


@pytest.mark.parametrize(
    ("candidate", "said"),
    [
        ("[policy", "candidate"),
        ('[policy]\nname = "nonsense"', "policy.name"),
        ("[policy]\nfile = '/etc/passwd'", "policy.file"),
        ("", "neither"),
    ],
)
def test_a_candidate_that_is_no_policy_is_told_what_is_wrong(
    tmp_path: Path, candidate: str, said: str
) -> None:
    (problem,) = whatif.outcome(job(tmp_path, candidate))["problems"]
    assert said in problem
    assert "/tmp" not in problem or "passwd" in problem


async def test_a_replay_runs_in_a_process_of_its_own(page: Page, tmp_path: Path) -> None:
    refused = await page.get("/ui/api/whatif", method="POST", body=b"[]")
    assert (refused.status, refused.json["error"]["param"]) == (400, "policy")
    nowhere = await page.get("/ui/api/whatif", method="POST", body=b'{"policy": ""}')
    assert nowhere.status == 503  # the test's configuration did not come from a file
    (tmp_path / "other").mkdir()
    given = job(tmp_path / "other", "")
    page.app.reloader.config.__dict__["source"] = Path(given["config"])
    text = json.dumps({"policy": '[policy]\nname = "nonsense"'}).encode()
    told = await page.get("/ui/api/whatif", method="POST", body=text)
    assert told.status == 200
    assert "policy.name" in told.json["problems"][0]
