"""Manifests that shift a fleet's traffic from the stable release to the candidate: for Argo Rollouts and for KServe.

Both are made from the table `[rollout]` of the settings, as a server's own canary is: the same steps and limits. What a
server compares between its arms, Argo's analysis compares between the pods of both releases, by their Prometheus
metrics. KServe has no steps and no analysis: its manifest has the first weight.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from qbe.errors import QBEError
from qbe.releases.folder import Release, State
from qbe.server.rollout.evidence import RARE
from qbe.server.rollout.settings import MetricName, Rollout

_NAME, _IMAGE, _CLAIM, _STATE = "qbe", "qbe:cpu", "qbe-models", "20Gi"
_PROMETHEUS = "http://prometheus-operated.monitoring.svc:9090"
_PERIOD, _PATIENCE = "5m", 10  # that numbers are of; measurements without one, before a person has to look
_TIMEOUT_S, _DRAIN_S, _LEAVE_S, _END_S = 600, 60, 10, 40  # as the chart and the settings have them


def manifests(kind: str, rollout: Rollout | None, state: State) -> list[dict[str, Any]]:
    """The objects to apply.

    Args:
        rollout: of the settings.
        state: which releases there are.

    Raises:
        QBEError: another kind, no `[rollout]`, no candidate, or no stable release that it could be compared with.
    """
    makers: dict[str, Callable[[Rollout, str], list[dict[str, Any]]]] = {"argo": _argo, "kserve": _kserve}
    if kind not in makers:
        raise QBEError(f"--manifest '{kind}' is not known: choose {' or '.join(makers)}")
    if rollout is None:
        raise QBEError("there is no [rollout] in the settings: give its steps, and limits where others are wanted")
    if rollout.candidate is not None:
        raise QBEError(
            "rollout.candidate is tried within each server, which needs no manifest: leave it out to shift traffic "
            "between two releases"
        )
    if state.candidate is None or state.stable is None:
        raise QBEError("there are not both a stable and a candidate release: 'qbe promote --alias candidate' makes one")
    return makers[kind](rollout, _mounted(state.candidate))


def later_steps(rollout: Rollout) -> list[str]:
    """For KServe: what to run after the first step's minutes, after the next one's, and to give up."""
    weights = [*(_percent(step.weight) for step in rollout.steps[1:]), 100]
    lines = [
        f"after {step.minutes:g} min: {_patch(weight)}" for weight, step in zip(weights, rollout.steps, strict=True)
    ]
    return [*lines, f"to abort: {_patch(0)}"]


def _patch(weight: int) -> str:
    patch = json.dumps({"spec": {"predictor": {"canaryTrafficPercent": weight}}}, separators=(",", ":"))
    return f"kubectl patch inferenceservice {_NAME} --type merge -p '{patch}'"


def _mounted(release: Release) -> str:
    """Where a pod finds it: what is beside the folder of releases is mounted at /models."""
    if release.path.startswith("/"):
        raise QBEError(
            f"the candidate, {release.path}, is not beside the folder of releases, so that no volume has both: move it "
            "there and promote it again"
        )
    return f"/models/{release.path}"


def _labels() -> dict[str, str]:
    return {"app.kubernetes.io/name": _NAME}


def _probe(path: str, every: int, failures: int, wait: int = 0) -> dict[str, Any]:
    wanted = {"httpGet": {"path": path, "port": 8000}, "periodSeconds": every, "failureThreshold": failures}
    return wanted if not wait else {**wanted, "initialDelaySeconds": wait}


def _container(name: str, model: str) -> dict[str, Any]:
    mounts = [("models", "/models"), ("settings", "/etc/qbe/settings"), ("keys", "/etc/qbe/keys")]
    return {
        "name": name,
        "image": _IMAGE,
        "args": [
            "serve", f"--model={model}", "--host=0.0.0.0", "--port=8000",
            "--config=/etc/qbe/settings/serve.toml", "--keys=/etc/qbe/keys/keys.toml",
        ],
        "ports": [{"containerPort": 8000, "protocol": "TCP"}],
        "livenessProbe": _probe("/health", 10, 6, wait=60),
        "readinessProbe": _probe("/ready", 3, 2),
        "volumeMounts": [
            *({"name": volume, "mountPath": path, "readOnly": True} for volume, path in mounts),
            {"name": "state", "mountPath": "/var/lib/qbe"},
        ],
    }  # fmt: skip


def _volumes(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"name": "models", "persistentVolumeClaim": {"claimName": _CLAIM, "readOnly": True}},
        {"name": "settings", "configMap": {"name": f"{_NAME}-settings"}},
        {"name": "keys", "secret": {"secretName": f"{_NAME}-keys"}},
        {"name": "state", **state},
    ]


def _kserve(rollout: Rollout, model: str) -> list[dict[str, Any]]:
    # Knative, which KServe's canaries are made of, takes no lifecycle, no startup probe and no grace period: it drains
    # by itself, within the time limit of requests.
    predictor = {
        "canaryTrafficPercent": _percent(rollout.steps[0].weight),
        "timeout": _TIMEOUT_S,
        "containers": [_container("kserve-container", model)],
        "volumes": _volumes({"emptyDir": {}}),
    }
    meta = {"name": _NAME, "labels": _labels()}
    return [{"apiVersion": "serving.kserve.io/v1beta1", "kind": "InferenceService", "metadata": meta,
             "spec": {"predictor": predictor}}]  # fmt: skip


def _percent(weight: float) -> int:
    return min(99, max(1, round(weight)))


def _argo(rollout: Rollout, model: str) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    for step in rollout.steps:
        steps += [{"setWeight": _percent(step.weight)}, {"pause": {"duration": f"{round(60 * step.minutes)}s"}}]
    arms = [("candidate", "Latest"), ("stable", "Stable")]
    analysis = {
        "templates": [{"templateName": f"{_NAME}-canary"}],
        "startingStep": 1,
        "args": [{"name": arm, "valueFrom": {"podTemplateHashValue": which}} for arm, which in arms],
    }
    container = _container(_NAME, model)
    # On SIGTERM a server takes nobody new, so first everyone has to know that the pod is leaving.
    container["lifecycle"] = {"preStop": {"sleep": {"seconds": _LEAVE_S}}}
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": _STATE}}}
    template = {
        "metadata": {"labels": _labels()},
        "spec": {
            "terminationGracePeriodSeconds": _LEAVE_S + _DRAIN_S + _END_S,
            "containers": [container],
            "volumes": _volumes({"ephemeral": {"volumeClaimTemplate": {"spec": claim}}}),
        },
    }
    spec = {
        "replicas": 4,
        "selector": {"matchLabels": _labels()},
        "strategy": {"canary": {"maxUnavailable": 0, "maxSurge": 1, "steps": steps, "analysis": analysis}},
        "template": template,
    }
    group = "argoproj.io/v1alpha1"
    metrics = [_metric(name, rollout) for name in _QUERIES if name not in rollout.off]
    return [
        {"apiVersion": group, "kind": "AnalysisTemplate", "metadata": {"name": f"{_NAME}-canary"},
         "spec": {"args": [{"name": arm} for arm, _ in arms], "metrics": metrics}},
        {"apiVersion": group, "kind": "Rollout", "metadata": {"name": _NAME, "labels": _labels()}, "spec": spec},
    ]  # fmt: skip


@dataclass(frozen=True)
class _Query:
    """A metric in Prometheus' language.

    Attributes:
        of: the pods of one release, for whose choice $PODS stands.
        compared: `over` and `times` the stable release's, or `alone`.
        below: whether less is worse.
    """

    of: str
    compared: Literal["over", "times", "alone"] = "alone"
    below: bool = False


def _share(bad: str, all: str) -> str:
    return f"(sum(rate({bad}[{_PERIOD}])) or vector(0)) / sum(rate({all}[{_PERIOD}]))"  # none yet are no series


def _late(name: str) -> str:
    return f"histogram_quantile(0.95, sum by (le) (rate({name}_bucket{{$PODS}}[{_PERIOD}])))"


_TOKENS, _AGREED = "qbe:scored_tokens_total{$PODS}", "qbe:scored_tokens_agreed_total{$PODS}"
_QUERIES: dict[MetricName, _Query] = {
    "errors": _Query(
        _share('vllm:request_success_total{finished_reason="error",$PODS}', "vllm:request_success_total{$PODS}"), "over"
    ),
    "malformed": _Query('max(qbe:detector{detector="grammar",$PODS})', "over"),
    "loops": _Query('max(qbe:detector{detector="loops",$PODS})', "over"),
    "failures": _Query(
        _share('qbe:feedback_total{outcome="failure",$PODS}', 'qbe:feedback_total{outcome!="unrated",$PODS}'), "over"
    ),
    "ttft": _Query(_late("vllm:time_to_first_token_seconds"), "times"),
    "itl": _Query(_late("vllm:inter_token_latency_seconds"), "times"),
    "live_kl": _Query(_share("qbe:scored_kl_nats_total{$PODS}", _TOKENS)),
    "top1_agreement": _Query(_share(_AGREED, _TOKENS), below=True),
    "flip_margin": _Query(
        f"sum(rate(qbe:scored_flip_margin_nats_total{{$PODS}}[{_PERIOD}])) / "
        f"(sum(rate({_TOKENS}[{_PERIOD}])) - sum(rate({_AGREED}[{_PERIOD}])))"
    ),
}


def _metric(name: MetricName, rollout: Rollout) -> dict[str, Any]:
    """As Argo has it: failed beyond the limit, successful within it, else inconclusive, which pauses the rollout. A
    number that nobody may ever ask for is successful where there is none."""
    query, limit = _QUERIES[name], getattr(rollout.limits, name)
    mine, others = (
        query.of.replace("$PODS", f'pod=~"{_NAME}-{{{{args.{arm}}}}}-.*"') for arm in ("candidate", "stable")
    )
    sign = {"over": "-", "times": "/"}.get(query.compared)
    worse, well = ("<", ">=") if query.below else (">", "<=")
    compared = mine if sign is None else f"({mine}) {sign} ({others})"
    none, some = "len(result) == 0 || isNaN(result[0])", "len(result) > 0 && !isNaN(result[0])"
    return {
        "name": name.replace("_", "-"),
        "interval": "1m",
        "initialDelay": _PERIOD,
        "failureCondition": f"{some} && result[0] {worse} {limit:g}",
        "successCondition": f"{none} || result[0] {well} {limit:g}" if name in RARE
        else f"{some} && result[0] {well} {limit:g}",
        "failureLimit": 1,
        "inconclusiveLimit": _PATIENCE,
        "provider": {"prometheus": {"address": _PROMETHEUS, "query": compared}},
    }  # fmt: skip
