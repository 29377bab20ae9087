"""Files of learned policies: what was written is read, and nothing else is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qbe import QBEError, policies
from qbe.analysis.profile import QueryProfile
from qbe.budget import Budget
from qbe.policies import learned
from qbe.policies.learned import Learned
from test_policies import TABLE, smollm2_like

FOUND = Learned({"a": np.arange(6, dtype=np.float32).reshape(2, 3)}, {"n": 3})


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QBE_CACHE", str(tmp_path))


def test_what_was_learned_comes_back() -> None:
    path = learned.write("paq", TABLE, FOUND)
    found = learned.read("paq", smollm2_like())  # another table that says the same
    assert found.about == {"n": 3}
    assert np.array_equal(found.tensors["a"], FOUND.tensors["a"])
    wider = tuple(replace(s, bytes_at={**s.bytes_at, 16: 4 * s.parameters}) for s in TABLE)
    assert learned.read("paq", replace(TABLE, sites=wider)).about == {"n": 3}, "loaded in another dtype"
    assert learned.path_of("paq", replace(TABLE, model_name="other/like")) != path


def test_a_folder_is_known_by_all_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models/one").mkdir(parents=True)
    (tmp_path / "link").symlink_to("models/one")
    monkeypatch.chdir(tmp_path / "models")
    names = [str(tmp_path / "models/one"), f"{tmp_path}/models/one/", "one", "./one", str(tmp_path / "link")]
    paths = {learned.path_of("paq", replace(TABLE, model_name=name)) for name in names}
    assert len(paths) == 1
    assert learned.path_of("paq", replace(TABLE, model_name=str(tmp_path / "models"))) not in paths


def test_nothing_stale_is_read() -> None:
    path = learned.write("paq", TABLE, FOUND)
    other_store = replace(TABLE, sites=(replace(TABLE.sites[0], bytes_at={4: 7}), *TABLE.sites[1:]))
    other_measurement = smollm2_like(seed=1)
    for table in (other_store, other_measurement):
        with pytest.raises(QBEError, match="trained for another store or version") as error:
            learned.read("paq", table)
        assert "run 'qbe train paq --model like' again" in str(error.value)
    assert learned.read("paq", TABLE).about == {"n": 3}
    path.rename(learned.path_of("predicted", TABLE))
    with pytest.raises(QBEError, match="trained for another store or version"):
        learned.read("predicted", TABLE)


def test_a_file_of_an_earlier_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(learned, "FORMAT", {})
        learned.write("tokenwise", TABLE, FOUND)
        learned.write("paq", TABLE, FOUND)
    with pytest.raises(QBEError, match="trained for another store or version of qbe than like has now: run 'qbe train"):
        learned.read("tokenwise", TABLE)
    assert learned.read("paq", TABLE).about == {"n": 3}, "whose format is still the first"


@pytest.mark.parametrize("at", [0, 4, 40, 100, 150, -30, -1])
def test_no_damaged_file_is_read(at: int) -> None:
    path = learned.write("paq", TABLE, FOUND)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(QBEError, match=r"damaged|another store") as error:
        learned.read("paq", TABLE)
    assert "\n" not in str(error.value)
    assert path.name in str(error.value)
    assert str(path.parent) not in str(error.value)
    path.write_bytes(bytes(data[:50]))
    with pytest.raises(QBEError, match="damaged"):
        learned.read("paq", TABLE)


@pytest.mark.parametrize("name", ["paq", "predicted", "proxy"])
def test_a_policy_without_its_file_says_how_to_get_it(name: str) -> None:
    policy = policies.load(name)
    with pytest.raises(QBEError, match=f"'{name}' has not been trained for like: run 'qbe train {name} --model like'"):
        policy.prepare(TABLE)  # type: ignore[attr-defined]
    with pytest.raises(QBEError, match="has not been trained"):
        policy.blueprint(QueryProfile(0.5, "code", 2), Budget(), TABLE)
