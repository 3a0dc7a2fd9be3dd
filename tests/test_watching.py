"""What watches Tierline: rules, alerts, dashboard, scrape configs. Each query is parsed, and asks for what exists.

promtool judges the rules and plays them against series of `alerts.test.yml`; where it is not installed, those two tests
are skipped, unless TIERLINE_REQUIRE_TOOLS is set (`make test-all`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from functools import cache
from typing import Any

import pytest
import yaml

from policies.calibrate import ContentKind
from policies.limits import SCOPES, LimitKind
from policies.retry import Failure
from policies.types import ChooseReason, DropReason, ShedReason
from proxy.errors import Ending, Hedged, Outcome
from proxy.metrics import Metrics
from proxy.recorder import Recorder
from proxy.series import BACKEND_STATES, DIALECTS, TOOL_KINDS, CancelPhase
from tests import promql
from tests.deploy_facts import DEPLOY, ROOT, config_of
from tests.fake_clock import FakeClock
from tests.promql import Known, Wrong

RULES = DEPLOY / "prometheus"
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text("utf-8")
VALUES: dict[tuple[str, str], Any] = {
    ("tierline_requests_total", "outcome"): Outcome,
    ("tierline_hedges_total", "outcome"): Hedged,
    ("tierline_continuations_total", "ending"): Ending,
    ("tierline_cancelled_requests_total", "phase"): CancelPhase,
    ("tierline_tokens_total", "kind"): ("prompt", "completion", "cached"),
    ("tierline_tool_calls_total", "dialect"): DIALECTS,
    ("tierline_tool_repairs_total", "kind"): TOOL_KINDS,
    ("tierline_backend_state", "state"): BACKEND_STATES,
    ("tierline_decisions_total", "reason"): ChooseReason,
    ("tierline_drops_total", "reason"): DropReason,
    ("tierline_shed_total", "reason"): ShedReason,
    ("tierline_failed_attempts_total", "failure"): Failure,
    ("tierline_prompt_estimate_error_ratio", "content"): ContentKind,
    ("tierline_limit_refusals_total", "scope"): SCOPES,
    ("tierline_limit_refusals_total", "limit"): LimitKind,
    ("tierline_limit_charged_tokens_total", "charged_by"): ("usage", "estimate"),
}
FREE = {"model", "tier", "backend", "priority", "name", "digest", "version", "python"}
"""Labels whose values a configuration or a build gives."""


@cache
def exposed() -> dict[str, Known]:
    """The metrics that are a contract, what the process tells of itself, and what Prometheus says of a scrape."""
    golden = (ROOT / "tests" / "proxy" / "golden" / "metrics.txt").read_text("utf-8")
    found = {"up": Known("gauge", frozenset())}
    for name, kind, labels in (line.split() for line in golden.splitlines() if line):
        own = frozenset(labels.split(",")) - {"-"}
        enums = {label: values(name, label) for label in own - FREE}
        found[name] = Known(kind, own, {label: allowed for label, allowed in enums.items() if allowed})
    text = Metrics(config_of("fleet"), list, Recorder(FakeClock(), None)).render()[0].decode()
    for name, kind in re.findall(r"^# TYPE (process_\w+) (\w+)$", text, re.MULTILINE):
        found[name] = Known(kind, frozenset())
    return found


def values(name: str, label: str) -> frozenset[str]:
    return frozenset(str(getattr(member, "value", member)) for member in VALUES.get((name, label), ()))


def rules(file: str) -> list[dict[str, Any]]:
    whole = yaml.safe_load((RULES / file).read_text("utf-8"))
    return [rule for group in whole["groups"] for rule in group["rules"]]


@cache
def catalogue() -> dict[str, Known]:
    """And what the recording rules make."""
    found = dict(exposed())
    for rule in rules("recording.yml"):
        labels = promql.labels(rule["expr"], found)
        assert labels is not None
        found[rule["record"]] = Known("gauge", labels, scraped=False)
    return found


# -- rules ---------------------------------------------------------------------------------------------------

ALERTS = rules("alerts.yml")


def test_what_rules_record_is_named_after_what_it_has() -> None:
    for name, known in catalogue().items():
        if ":" in name:
            level, metric, _ = name.split(":")
            assert frozenset(level.split("_")) == known.labels, name
            assert metric.startswith("tierline_"), name


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_asks_for_what_exists_and_says_what_to_do(alert: dict[str, Any]) -> None:
    labels = promql.labels(alert["expr"], catalogue())
    assert labels is not None
    annotations = alert["annotations"]
    assert list(annotations) == ["summary", "description", "runbook"]
    used = set(re.findall(r"\$labels\.(\w+)", annotations["summary"] + annotations["description"]))
    assert used <= labels, "its text names a label that it does not have"
    assert alert["labels"]["severity"] in ("page", "ticket")
    assert annotations["runbook"] == f"docs/runbook.md#{alert['alert'].lower()}"
    section = re.search(rf"^## {alert['alert']}\n(.*?)(?=^## |\Z)", RUNBOOK, re.MULTILINE | re.DOTALL)
    assert section, "it is not in the runbook"
    for part in ("**Means.**", "**Look.**", "**Do.**"):
        assert section[1].count(part) == 1, part


def test_the_runbook_has_no_section_of_an_alert_that_is_gone() -> None:
    assert re.findall(r"^## (\w+)$", RUNBOOK, re.MULTILINE) == [alert["alert"] for alert in ALERTS]


def test_the_runbook_names_metrics_that_exist() -> None:
    for name in re.findall(r"`(tierline_\w+)", RUNBOOK):
        assert name in exposed(), name


def test_every_alert_is_played() -> None:
    tests = yaml.safe_load((RULES / "alerts.test.yml").read_text("utf-8"))["tests"]
    assert [test["name"].split(",")[0].split()[0] for test in tests[1:]] == [
        name
        for alert in ALERTS
        for name in [alert["alert"]] * (1 + (alert["alert"] == "TierlineErrorBurnFast"))
    ]


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("promtool") is None:
        assert not os.environ.get("TIERLINE_REQUIRE_TOOLS"), "promtool is not installed (Debian: prometheus)"
        pytest.skip("promtool is not installed")
    return subprocess.run(
        ["promtool", *arguments], cwd=RULES, capture_output=True, text=True, timeout=300, check=False
    )


def test_promtool_reads_the_rules() -> None:
    done = promtool("check", "rules", "recording.yml", "alerts.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_promtool_sees_each_alert_raised_when_it_should_be_and_only_then() -> None:
    done = promtool("test", "rules", "alerts.test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


# -- dashboard -----------------------------------------------------------------------------------------------


def dashboard() -> dict[str, Any]:
    return dict(json.loads((DEPLOY / "dashboard.json").read_text("utf-8")))


def queries() -> list[tuple[str, str]]:
    """(panel, PromQL) of every panel."""
    return [(panel["title"], t["expr"]) for panel in dashboard()["panels"] for t in panel.get("targets", [])]


@pytest.mark.parametrize(("panel", "query"), queries())
def test_a_panel_asks_for_metrics_labels_and_values_that_exist(panel: str, query: str) -> None:
    for label, variable in re.findall(r'(\w+)=~"\$(\w+)"', query):
        assert label == variable
    text = re.sub(r'=~"\$\w+"', '=~".*"', query).replace("$__rate_interval", "5m")
    assert "$" not in text
    promql.labels(text, catalogue())


@pytest.mark.parametrize(
    "panel", [p for p in dashboard()["panels"] if "targets" in p], ids=lambda p: p["title"]
)
def test_a_legend_names_labels_that_its_query_leaves(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        text = re.sub(r'=~"\$\w+"', '=~".*"', target["expr"]).replace("$__rate_interval", "5m")
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= (
            promql.labels(text, catalogue()) or set()
        )


def test_the_variables_are_labels_of_metrics() -> None:
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            assert variable["definition"] == variable["query"]["query"]
            found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"])
            assert found
            assert found[2] in exposed()[found[1]].labels


def test_the_dashboard_shows_every_metric_or_a_rule_made_of_it() -> None:
    shown = {name for _, query in queries() for name in names_in(query)}
    recorded = {rule["record"]: names_in(rule["expr"]) for rule in rules("recording.yml")}
    shown |= {name for record in shown & set(recorded) for name in recorded[record]}
    missing = {
        name
        for name, known in exposed().items()
        if name.startswith("tierline_")
        and not shown
        & {name, *(f"{name}_{part}" for part in ("bucket", "count") if known.kind == "histogram")}
    }
    assert missing == {"tierline_backend_window_tokens"}, (
        "no panel shows it (that one does not change while it runs)"
    )


def names_in(query: str) -> set[str]:
    return promql.names(re.sub(r'=~"\$\w+"', '=~".*"', query).replace("$__rate_interval", "5m"))


def test_the_dashboard_shows_what_an_operator_asks_first() -> None:
    shown = {
        (name, quantile)
        for _, query in queries()
        for name in names_in(query)
        for quantile in [*re.findall(r"histogram_quantile\(([\d.]+)", query), ""]
    }
    for name in (
        "time_to_first_token",
        "inter_token_latency",
        "time_per_output_token",
        "overhead",
        "queue_wait",
    ):
        for quantile in ("0.5", "0.95", "0.99"):
            assert (f"tierline_{name}_seconds_bucket", quantile) in shown


def test_the_dashboard_can_be_imported_anywhere_and_nothing_overlaps() -> None:
    board = dashboard()
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(board))) - {"__rate_interval", "__all"} == variables
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"]
            assert panel["datasource"]["uid"] == "${datasource}"


# -- scrape configs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("prometheus*.yml")), ids=lambda path: path.name)
def test_a_scrape_config_has_the_jobs_and_rules_that_queries_need(path: Any) -> None:
    whole = yaml.safe_load(path.read_text("utf-8"))
    jobs = [job["job_name"] for job in whole["scrape_configs"]]
    texts = [query for _, query in queries()] + [alert["expr"] for alert in ALERTS]
    asked = {job for text in texts for job in re.findall(r'job="(\w+)"', text)}
    assert asked <= set(jobs)
    mount = "/etc/prometheus/rules/"
    assert [name.removeprefix(mount) for name in whole["rule_files"]] == ["recording.yml", "alerts.yml"]
    assert all(name.startswith(mount) for name in whole["rule_files"])
    assert "evaluation_interval" in whole["global"]


# -- the judge -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "query",
    [
        "tierline_made_up",
        'tierline_requests_total{colour="red"}',
        'tierline_requests_total{outcome="fine"}',
        'tierline_requests_total{outcome=~"ok|upstream_bad"}',
        "sum by (digest) (tierline_requests_total)",
        "sum by (tier) (sum by (backend) (tierline_requests_total))",
        "histogram_quantile(0.5, sum by (tier) (rate(tierline_e2e_request_latency_seconds_bucket[5m])))",
        "rate(tierline_queued_requests[5m])",
        "deriv(tierline_requests_total[5m])",
        "tierline_e2e_request_latency_seconds",
        "tierline_queued_requests_bucket",
        "sum by (tier) (tierline_requests_total) / sum by (backend) (tierline_requests_total)",
        "tierline_queued_requests and on (backend) tierline_in_flight_requests",
    ],
)
def test_a_query_for_what_does_not_exist_is_found(query: str) -> None:
    with pytest.raises(Wrong):
        promql.labels(query, exposed())


@pytest.mark.parametrize(
    ("query", "labels"),
    [
        ('sum by (tier) (rate(tierline_requests_total{outcome=~"upstream_.*"}[5m]))', {"tier"}),
        ("sum without (instance, job) (tierline_queued_requests)", {"tier", "priority"}),
        ("count(up) > 1", set()),
        ("tierline_retries_denied_total * 2", {"job", "instance"}),
    ],
)
def test_a_query_is_known_by_what_it_leaves(query: str, labels: set[str]) -> None:
    assert promql.labels(query, exposed()) == labels
