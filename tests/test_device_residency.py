"""Residency on a device whose kernels find slices by a table: played on a CPU, and on a GPU where there is one.

Played, only the copies to the device are others (`Played`); kernels read the same table, by their reference.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_models import tiny_moe_folder
from qbe import Budget, Engine, SamplingParams
from qbe.engine.result import Result
from qbe.errors import QBEError
from qbe.residency import host_memory, residency
from qbe.residency.device_slices import DeviceSlices
from qbe.residency.size import parse_size
from qbe.residency.transfer import CudaTransfer, Pieces
from qbe.store.nested_linears import NestedWeightConfig
from qbe.store.quantise import quantise_to

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
PARAMS = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
PROMPT = "The house stood at the end of the lane"
LIMIT_S = 60.0


class Played:
    """A transfer to a device that is the CPU. It raises where a page that kernels may still read is written."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.locked: list[int] = []
        self.table: torch.Tensor | None = None

    def lock(self, memory: torch.Tensor) -> bool:
        self.locked.append(memory.data_ptr())
        return True

    def unlock(self, memory: torch.Tensor) -> None:
        self.locked.remove(memory.data_ptr())

    def copy(self, pieces: Pieces) -> None:
        for to, source in pieces:
            assert self.table is None or not (self.table == to.data_ptr()).any(), "kernels may be reading this page"
            to.copy_(source)

    def write(self, to: torch.Tensor, numbers: torch.Tensor) -> None:
        self.table = to.copy_(numbers)

    def given_up(self) -> None:
        pass


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("device")
    source = tiny_moe_folder(home / "source", "qwen3_moe")
    return quantise_to(
        str(source), home / "store", NestedWeightConfig(), torch.device("cpu"), measure=False, progress=False
    )


@pytest.fixture(autouse=True)
def transfers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Played]]:
    """Those of this test's engines, in order."""
    made: list[Played] = []

    def slices_on(_: Any, model: Any, folder: Path, table: Any, waits: bool, progress: bool) -> DeviceSlices:
        made.append(Played())
        return DeviceSlices(model, folder, table, made[-1], progress)

    if not CUDA:
        monkeypatch.setattr(residency, "slices_on", slices_on)
    yield made
    assert not any(one.locked for one in made)


def engine(store: Path, **options: Any) -> Engine:
    given = {"policy": "uniform", "records": False, "blueprint_cache": False, "kv_tokens": 256, "device": DEVICE}
    return Engine(str(store), **given | options)


def least(store: Path, **options: Any) -> int:
    """Bytes of the bound that the engine itself says is the least."""
    with pytest.raises(QBEError, match="what always stays on the device takes") as refused:
        engine(store, device_memory=1, **options)
    assert "\n" not in str(refused.value)
    return parse_size("least", re.search(r"takes (\S+):", str(refused.value))[1])  # type: ignore[index]


def above(store: Path) -> int:
    """Bytes of the slices that may leave the device."""
    with engine(store, device_memory="1GB" if not CUDA else "8GB") as whole:
        return whole.core.residency.above_floors  # type: ignore[union-attr]


def answer(of: Engine, bits: float = 8) -> Result:
    return of.generate(PROMPT, PARAMS, budget=Budget(bits=bits))


def until(condition: Callable[[], bool], what: str) -> None:
    ends = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < ends, f"never: {what}"


def heat(of: Engine, sites: Any) -> Any:
    """Ask for all slices of these experts; the planner."""
    planner = of.core.residency._planner  # type: ignore[union-attr]
    planner.count(sites, np.full(len(sites), 3), 1e6)
    return planner


def movable(of: Engine) -> Any:
    return np.flatnonzero(of.core.residency._slices.floors < 3)  # type: ignore[union-attr]


def test_what_fits_and_what_is_waited_for_is_the_store_itself(store: Path) -> None:
    with engine(store, originals="none") as plain:
        expected = [answer(plain, bits).token_ids for bits in (8, 4)]
    with engine(store, device_memory="8GB") as whole:
        assert [answer(whole, bits).token_ids for bits in (8, 4)] == expected
        assert answer(whole).misses == 0
        numbers = whole.residency
        assert numbers is not None
        assert numbers.resident_bytes == numbers.stored_bytes
    with engine(store, device_memory=least(store, miss="wait"), miss="wait") as waiting:
        found = answer(waiting)
        assert found.token_ids == expected[0]
        assert found.misses > 0
        assert found.missed_bits == 0


def test_with_nothing_above_the_floors_rows_read_the_lowest_slices_from_the_host(store: Path) -> None:
    with engine(store, device_memory=least(store)) as low:
        before = low.residency
        planner = low.core.residency._planner  # type: ignore[union-attr]
        assert (planner.levels[movable(low)] == 0).all()
        found = answer(low)
        assert found.misses > 0
        assert found.read_weight_bits < found.average_weight_bits
        assert answer(low, 4).misses == 0
        assert low.residency == before or low.residency.resident_bytes == before.resident_bytes  # type: ignore[union-attr]


def test_hot_slices_come_within_the_bound(store: Path) -> None:
    bound = least(store) + above(store) // 2
    with engine(store, device_memory=bound) as half:
        sites = movable(half)
        assert half.memory.describe()["total"] <= bound
        planner = heat(half, sites[::2])
        before = planner.levels[sites[::2]].sum()

        def exchanged() -> bool:
            answer(half)
            assert half.memory.describe()["total"] <= bound
            return half.residency.fetched_bytes > 0 and planner.in_flight == 0  # type: ignore[union-attr]

        until(exchanged, "the hot experts' slices come")
        assert planner.levels[sites[::2]].sum() > before
        assert half.residency.dropped_bytes > 0  # type: ignore[union-attr]
        again = answer(half)
        assert again.error is None


def test_where_host_memory_ends_slices_come_from_the_file(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(store, originals="none") as plain:
        expected = answer(plain).token_ids
    monkeypatch.setattr(host_memory, "free_memory", lambda _: 0)
    with caplog.at_level(logging.WARNING), engine(store, device_memory="8GB") as whole:
        assert answer(whole).token_ids == expected
        (line,) = [r.getMessage() for r in caplog.records if r.name.startswith("qbe.residency")]
        assert "host memory has room for 0.00 of" in line
        assert "\n" not in line
    with engine(store, device_memory=least(store)) as low:
        planner = low.core.residency._planner  # type: ignore[union-attr]
        assert (planner.levels[movable(low)] == 1).all()  # the lowest slices have to be there
        assert answer(low).misses > 0


def test_where_fetching_fails_one_line_says_so_and_what_is_resident_serves(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def cut_short(*_: Any) -> None:
        raise OSError("the file ends too early")

    monkeypatch.setattr(host_memory, "free_memory", lambda _: 0)
    with engine(store, device_memory=least(store) + above(store) // 2) as half:
        monkeypatch.setattr(half.core.residency._slices._files, "read", cut_short)  # type: ignore[union-attr]
        sites = movable(half)
        planner = half.core.residency._planner  # type: ignore[union-attr]
        heat(half, sites[planner.levels[sites] == 1])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            until(lambda: bool(answer(half)) and half.residency.failure is not None, "a failure")  # type: ignore[union-attr]
            again = [answer(half) for _ in range(3)]
        (line,) = [r.getMessage() for r in caplog.records if r.name.startswith("qbe.residency")]
        assert "ends too early" in line
        assert "what is on the device goes on serving" in line
        assert all(r.error is None and len(r.token_ids) == PARAMS.max_tokens for r in again)


def test_a_damaged_store_is_refused_as_it_starts(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qbe.residency.store_files.os.preadv", lambda *_: 0)
    with pytest.raises(QBEError, match=r"cannot be read .*ends too early.*"):
        engine(store, device_memory="1GB")


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.cuda
def test_a_copy_waits_for_the_steps_that_were_launched_and_no_step_for_it() -> None:
    device = torch.device("cuda", 0)
    transfer = CudaTransfer(device)
    source = torch.arange(1 << 20, dtype=torch.uint8).contiguous()
    assert transfer.lock(source)
    page, seen = torch.zeros(1 << 20, dtype=torch.uint8, device=device), torch.empty(1 << 20, device=device)
    torch.cuda._sleep(200_000_000)  # about 0.1 s
    seen.copy_(page)
    transfer.given_up()
    begun = time.monotonic()
    transfer.copy([(page, source)])
    assert time.monotonic() - begun > 0.02
    assert torch.equal(page.cpu(), source)
    assert seen.eq(0).all()
    table = torch.zeros(8, dtype=torch.int64, device=device)
    for number in range(3):
        transfer.write(table, torch.full((8,), number))
    assert table.eq(2).all()
    transfer.unlock(source)
