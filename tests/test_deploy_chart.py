"""The Helm chart, linted and rendered by Helm itself; what it makes is checked against Kubernetes' schemas."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qbe.server.keys import new_key
from qbe.server.settings import Limits
from test_deploy import AFTER_DRAIN_S, ROOT, check_serve

helm: Any = pytest.importorskip("helm_python", reason="needs helm-python-sdk: Helm as a library")
yaml: Any = pytest.importorskip("yaml")

CHART = ROOT / "deploy/helm/qbe"
KEYS = new_key("alice")[1]
VALUES: dict[str, dict[str, Any]] = {
    "least": {"keys": KEYS},
    "most": {
        "existingKeys": "keys-of-ours", "replicas": 3, "gpus": 2, "settings": '[prices]\ncurrency = "EUR"\n',
        "modelsClaim": "models", "model": "/models/llama", "options": ["--compile", "--most-bits=6"],
        "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
        "state": {"size": "1Gi", "storageClass": "fast"}, "resources": {"requests": {"memory": "8Gi"}},
        "nodeSelector": {"gpu": "yes"}, "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}}, "imagePullSecrets": [{"name": "pull"}],
        "image": {"repository": "registry.example/qbe", "tag": "1"},
        "service": {"type": "LoadBalancer", "port": 443}, "drainSeconds": 300, "preStopSeconds": 20,
        "monitoring": {"enabled": True, "interval": "5s", "labels": {"release": "prometheus"}},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def chart() -> Iterator[Any]:
    with helm.Chart.load(CHART) as found:
        yield found


def objects(chart: Any, values: dict[str, Any]) -> dict[tuple[str, str], Any]:
    """What Helm would send to Kubernetes, by kind and name."""
    texts = [t for name, t in chart.render(values, name="prod", namespace="llm").items() if name.endswith(".yaml")]
    found = [one for one in itertools.chain.from_iterable(map(yaml.safe_load_all, texts)) if one is not None]
    named = {(one["kind"], one["metadata"]["name"]): one for one in found}
    assert len(named) == len(found)
    return named


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_helm_lints_it(values: dict[str, Any]) -> None:
    report = helm.lint(CHART, values, strict=True, kube_version="v1.30.0")
    assert report["errors"] == []
    assert [m for m in report["messages"] if m["severity"] > 1] == []


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_kubernetes_takes_what_it_makes(chart: Any, values: dict[str, Any]) -> None:
    kubernetes: Any = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    for one in objects(chart, values).values():
        if not one["apiVersion"].startswith("monitoring.coreos.com/"):
            kubernetes.validate(one, "1.37", strict=True)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_a_pod_serves_and_is_given_time_to_drain(chart: Any, values: dict[str, Any]) -> None:
    found = objects(chart, values)
    pod = found["StatefulSet", "prod-qbe"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = check_serve(container["args"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": options["port"], "metrics": options["metrics_port"]}
    assert {name: container[f"{name}Probe"]["httpGet"] for name in ("readiness", "liveness")} == {
        "readiness": {"path": "/ready", "port": "http"}, "liveness": {"path": "/health", "port": "http"},
    }  # fmt: skip
    delay = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = values.get("drainSeconds", Limits().drain_s)
    assert pod["terminationGracePeriodSeconds"] == delay + drain + AFTER_DRAIN_S
    # By then the readiness probe has failed, were it asked, and endpoints have been told.
    assert delay > container["readinessProbe"]["periodSeconds"]
    mounted = {m["mountPath"] for m in container["volumeMounts"]}
    assert {str(Path(options[o]).parent) for o in ("config", "keys")} <= mounted
    volumes = {v["name"] for v in pod["volumes"]} | {"state"}
    assert {m["name"] for m in container["volumeMounts"]} == volumes
    assert not any("subPath" in m for m in container["volumeMounts"]), "or it would not be renewed"
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]


def test_the_settings_and_keys_arrive_as_they_were_given(chart: Any) -> None:
    found = objects(chart, VALUES["least"] | {"settings": VALUES["most"]["settings"]})
    assert found["ConfigMap", "prod-qbe-settings"]["data"]["serve.toml"] == VALUES["most"]["settings"]
    assert tomllib.loads(found["Secret", "prod-qbe-keys"]["stringData"]["keys.toml"]) == tomllib.loads(KEYS)
    volumes = found["StatefulSet", "prod-qbe"]["spec"]["template"]["spec"]["volumes"]
    assert {"name": "keys", "secret": {"secretName": "prod-qbe-keys"}} in volumes
    most = objects(chart, VALUES["most"])
    assert not [kind for kind, _ in most if kind == "Secret"]
    assert "keys-of-ours" in str(most["StatefulSet", "prod-qbe"]["spec"]["template"]["spec"]["volumes"])


def test_gpus_are_optional(chart: Any) -> None:
    def container(values: dict[str, Any]) -> Any:
        made = objects(chart, VALUES["least"] | values)["StatefulSet", "prod-qbe"]
        return made["spec"]["template"]["spec"]["containers"][0]

    assert (container({})["image"], "resources" in container({})) == ("qbe:cpu", False)
    gpu = container({"gpus": 2, "resources": {"limits": {"memory": "8Gi"}}})
    assert gpu["image"] == "qbe:cuda"
    assert gpu["resources"] == {"limits": {"memory": "8Gi", "nvidia.com/gpu": 2}}


def test_selectors_find_what_they_are_for(chart: Any) -> None:
    found = objects(chart, VALUES["most"])
    pod = found["StatefulSet", "prod-qbe"]["spec"]["template"]["metadata"]["labels"]
    selectors = [
        found["StatefulSet", "prod-qbe"]["spec"]["selector"]["matchLabels"],
        found["Service", "prod-qbe"]["spec"]["selector"],
        found["Service", "prod-qbe-servers"]["spec"]["selector"],
        found["PodDisruptionBudget", "prod-qbe"]["spec"]["selector"]["matchLabels"],
    ]
    assert all(selector.items() <= pod.items() for selector in selectors)
    assert found["StatefulSet", "prod-qbe"]["spec"]["serviceName"] == "prod-qbe-servers"
    monitor = found["ServiceMonitor", "prod-qbe"]
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    labels = {name: one["metadata"]["labels"].items() for (kind, name), one in found.items() if kind == "Service"}
    services = [name for name in labels if wanted <= labels[name]]
    assert services == ["prod-qbe-servers"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    (port,) = found["Service", "prod-qbe-servers"]["spec"]["ports"]
    assert port["name"] == monitor["spec"]["endpoints"][0]["port"]


def test_alerts_and_dashboard_arrive_as_they_are(chart: Any) -> None:
    found = objects(chart, VALUES["most"])
    files = CHART / "files"
    assert found["PrometheusRule", "prod-qbe"]["spec"] == yaml.safe_load((files / "alerts.yml").read_text())
    dashboard = found["ConfigMap", "prod-qbe-dashboard"]["data"]["qbe.json"]
    assert dashboard.rstrip() == (files / "dashboard.json").read_text().rstrip()
    assert not [kind for kind, _ in objects(chart, VALUES["least"]) if kind in ("ServiceMonitor", "PrometheusRule")]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "needs keys"),
        ({"keys": KEYS, "existingKeys": "x"}, "not both"),
        ({"keys": KEYS, "replica": 2}, "replica"),
        ({"keys": KEYS, "gpus": "two"}, "gpus"),
        ({"keys": KEYS, "options": ["compile"]}, "options"),
    ],
)
def test_values_that_cannot_be_are_refused(chart: Any, values: dict[str, Any], said: str) -> None:
    with pytest.raises(helm.HelmError, match=said):
        chart.render(values)


def test_the_chart_is_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == project["version"]
