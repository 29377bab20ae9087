"""Manifests for fleets: made from `[rollout]` and the releases, of the fields that Argo Rollouts and KServe publish.

`crd_fields.json` has, of the custom resource definitions that it names, the fields and required fields of each level
that the manifests reach; null where anything goes.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli_process import qbe, refused
from qbe.releases.folder import ReleaseFolder
from qbe.releases.promote import promote
from qbe.releases.verdict import read
from release_samples import model, verdict

FIELDS: dict[str, Any] = json.loads((Path(__file__).parent / "crd_fields.json").read_text())
SETTINGS = """[rollout]
steps = [{weight = 5, minutes = 10}, {weight = 25, minutes = 0.5}]
off = ["loops"]
[rollout.limits]
errors = 0.01
"""


def unknown(item: dict[str, Any]) -> Iterator[str]:
    """What an API server would refuse."""
    levels = FIELDS[f"{item['apiVersion']} {item['kind']}"]

    def look(value: Any, path: str) -> Iterator[str]:
        if isinstance(value, list):
            for one in value:
                yield from look(one, f"{path}[]")
        elif isinstance(value, dict):
            if (level := levels[path]) is None:
                return
            yield from (f"{path}.{name}" for name in value if name not in level["fields"])
            yield from (f"{path}.{name} is missing" for name in level["required"] if name not in value)
            for name, below in value.items():
                if name in level["fields"]:
                    yield from look(below, f"{path}.{name}" if path else name)

    return look(item, "")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fleet")
    for name, alias in (("a", "stable"), ("b", "candidate")):
        model(folder / name, name)
        promote(
            folder / name, read(verdict(folder / f"v{name}", folder / name)), ReleaseFolder(folder / "releases"), alias
        )
    (folder / "serve.toml").write_text(SETTINGS)
    return folder


def printed(place: Path, kind: str, *more: str) -> str:
    found = qbe("releases", "--manifest", kind, "--config", "serve.toml", *more, cwd=place)
    assert found.returncode == 0, found.stderr
    return found.stdout.decode()


@pytest.mark.parametrize("kind", ["argo", "kserve"])
def test_fields_are_those_of_the_definitions(place: Path, kind: str) -> None:
    items = list(yaml.safe_load_all(printed(place, kind)))
    assert items == json.loads(printed(place, kind, "--json"))["items"]
    for item in items:
        assert list(unknown(item)) == []
        wrong = copy.deepcopy(item)
        wrong["spec"]["canaryWeight"] = 5
        assert list(unknown(wrong)) == ["spec.canaryWeight"]


def test_argo_has_the_steps_and_limits(place: Path) -> None:
    promql = pytest.importorskip("promql_parser", reason="needs promql-parser")
    template, rollout = json.loads(printed(place, "argo", "--json"))["items"]
    canary = rollout["spec"]["strategy"]["canary"]
    assert canary["steps"] == [
        {"setWeight": 5}, {"pause": {"duration": "600s"}}, {"setWeight": 25}, {"pause": {"duration": "30s"}},
    ]  # fmt: skip
    assert canary["analysis"]["templates"] == [{"templateName": template["metadata"]["name"]}]
    assert {a["name"] for a in canary["analysis"]["args"]} == {a["name"] for a in template["spec"]["args"]}
    assert "--model=/models/b" in rollout["spec"]["template"]["spec"]["containers"][0]["args"]
    metrics = {metric["name"]: metric for metric in template["spec"]["metrics"]}
    assert "loops" not in metrics
    assert metrics["errors"]["failureCondition"].endswith("result[0] > 0.01")
    assert metrics["top1-agreement"]["failureCondition"].endswith("result[0] < 0.6")
    for name, metric in metrics.items():
        query = metric["provider"]["prometheus"]["query"]
        promql.parse(query.replace("{{args.candidate}}", "5d8f").replace("{{args.stable}}", "77ab"))
        assert "{{args.candidate}}" in query
        assert ("{{args.stable}}" in query) is (name not in ("live-kl", "top1-agreement", "flip-margin"))


def test_queries_ask_for_metrics_that_servers_have(place: Path) -> None:
    import re

    from qbe.server.observe.metrics import Metrics

    known = {s for family in Metrics("m").registry.collect() for s in (family.name, f"{family.name}_total",
                                                                       f"{family.name}_bucket")}  # fmt: skip
    template, _ = json.loads(printed(place, "argo", "--json"))["items"]
    for metric in template["spec"]["metrics"]:
        for name in re.findall(r"(?:vllm|qbe):\w+", metric["provider"]["prometheus"]["query"]):
            assert name in known, name


def test_kserve_has_the_first_weight_and_says_the_rest(place: Path) -> None:
    found = qbe("releases", "--manifest", "kserve", "--config", "serve.toml", cwd=place)
    assert yaml.safe_load(found.stdout)["spec"]["predictor"]["canaryTrafficPercent"] == 5
    for weight in (25, 100, 0):
        assert f'{{"spec":{{"predictor":{{"canaryTrafficPercent":{weight}}}}}}}' in found.stderr.decode().replace(
            "\n", ""
        )


@pytest.mark.parametrize(
    ("args", "settings", "said"),
    [
        (["--manifest", "helm"], SETTINGS, "--manifest 'helm' is not known: choose argo or kserve"),
        (["--manifest", "argo"], "", "there is no [rollout] in the settings"),
        (["--manifest", "argo"], SETTINGS + "[rollout.candidate]\nkv_bits = 8\n", "leave it out to shift traffic"),
    ],
)
def test_what_cannot_be_made_is_one_line(place: Path, args: list[str], settings: str, said: str) -> None:
    (place / "other.toml").write_text(settings)
    assert said in refused("releases", *args, "--config", "other.toml", cwd=place)


def test_it_wants_both_releases_and_settings(place: Path, tmp_path: Path) -> None:
    assert "--manifest needs --config FILE" in refused("releases", "--manifest", "argo", cwd=place)
    assert "give that, too" in refused("releases", "--config", "serve.toml", cwd=place)
    (tmp_path / "serve.toml").write_text(SETTINGS)
    said = refused("releases", "--manifest", "argo", "--config", "serve.toml", cwd=tmp_path)
    assert "not both a stable and a candidate release" in said
