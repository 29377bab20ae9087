"""A store that is larger than the memory it may take: through Python, for dense sites and experts of several families.

Tiny random models; what an unbounded engine answers is the oracle.
"""

from __future__ import annotations

import logging
import mmap
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from conftest import byte_tokenizer, tiny_llama
from models_tiny import write_folder
from moe_models import tiny_moe_folder
from qbe import Budget, Engine, SamplingParams
from qbe.blueprint import Blueprint
from qbe.engine.result import Result
from qbe.errors import QBEError
from qbe.records import RecordStore
from qbe.residency.arena import Arena
from qbe.residency.planner import Moves
from qbe.residency.residency import Residency
from qbe.residency.size import parse_size
from qbe.residency.slices import StoredSlices
from qbe.store.expert_use import counting
from qbe.store.nested_linears import NestedWeightConfig
from qbe.store.quantise import quantise_to
from qbe.store.read_limits import ReadLimits

PARAMS = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
PROMPT = "The house stood at the end of the lane"
FAMILIES = ("llama", "qwen3_moe", "granitemoehybrid")  # no experts; some; some, and a forward for each sequence
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The nested store of a tiny model of a family, without sensitivities; made once."""
    home, made = tmp_path_factory.mktemp("residency"), dict[str, Path]()

    def store(family: str) -> Path:
        if family not in made:
            source = home / family
            if family == "llama":
                write_folder(source, tiny_llama())
                byte_tokenizer().save_pretrained(source)
            else:
                tiny_moe_folder(source, family)
            made[family] = quantise_to(
                str(source), home / f"{family}-qbe", NestedWeightConfig(), torch.device("cpu"), measure=False,
                progress=False,
            )  # fmt: skip
        return made[family]

    return store


def engine(store: Path, **options: Any) -> Engine:
    given = {"policy": "uniform", "records": False, "blueprint_cache": False, "kv_tokens": 256, "device": "cpu"}
    return Engine(str(store), **given | options)


def least(store: Path, **options: Any) -> int:
    """Bytes of the bound that the engine itself says is the least."""
    with pytest.raises(QBEError, match="what always stays on the device takes") as refused:
        engine(store, device_memory=1, **options)
    assert "\n" not in str(refused.value)
    return parse_size("least", re.search(r"takes (\S+):", str(refused.value))[1])  # type: ignore[index]


def above(store: Path) -> int:
    """Bytes of the slices above the lowest ones."""
    with engine(store, device_memory="1GB") as whole:
        return whole.core.residency.above_floors  # type: ignore[union-attr]


def answer(of: Engine, bits: float = 8, prompt: str = PROMPT) -> Result:
    return of.generate(prompt, PARAMS, budget=Budget(bits=bits))


@contextmanager
def frozen(of: Engine) -> Iterator[None]:
    """Inside, nothing is exchanged."""
    planner = of.core.residency._planner  # type: ignore[union-attr]
    planner.moves = lambda: Moves([], [])  # type: ignore[method-assign]
    yield
    del planner.moves


def until(condition: Callable[[], bool], what: str) -> None:
    ends = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < ends, f"never: {what}"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_least_bound_answers_at_the_lowest_bits_and_waiting_at_those_asked(
    stores: Callable[[str], Path], family: str
) -> None:
    store = stores(family)
    with engine(store, originals="none") as whole:
        low, high = (answer(whole, bits) for bits in (4, 8))
        assert high.misses == high.missed_bits == 0
        dense = sum(s.expert is None for s in whole.table.nested)
        used = sum(s.use for s in whole.table.nested if s.expert is not None)
        assert whole.residency is None
    with engine(store, device_memory=least(store)) as bounded:
        found = answer(bounded)
        assert found.token_ids == low.token_ids
        assert found.average_weight_bits == pytest.approx(high.average_weight_bits)
        assert found.read_weight_bits == pytest.approx(low.average_weight_bits)
        assert found.priced_weight_bits == pytest.approx(low.average_weight_bits)
        # Every site that a token reads is missed once for each token.
        assert found.misses == found.computed_tokens * round(dense + used)
        assert bounded.residency is not None
        assert (bounded.residency.fetched_bytes, bounded.residency.misses) == (0, found.misses)
    with engine(store, device_memory=least(store, miss="wait"), miss="wait") as waiting:
        found = answer(waiting)
        assert found.token_ids == high.token_ids
        assert found.read_weight_bits == found.average_weight_bits
        assert waiting.residency is not None
        if used:  # the experts of one layer fit at a time
            assert found.misses > 0
            assert waiting.residency.fetched_bytes > 0


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_half_of_the_bytes_serve_and_use_brings_what_is_read(stores: Callable[[str], Path], family: str) -> None:
    store = stores(family)
    bound = least(store) + above(store) // 2
    with engine(store, device_memory=bound) as half:
        assert half.memory.describe()["total"] <= bound
        with frozen(half):
            first = answer(half)
        assert first.misses > 0
        assert 4 <= first.read_weight_bits < first.average_weight_bits
        assert half.memory.describe()["total"] <= bound

        # Every other site is hot now: their slices are brought in the place of others', and the bound holds.
        planner = half.core.residency._planner  # type: ignore[union-attr]
        hot = np.arange(0, len(planner.levels), 2)
        before, most = planner.levels[hot].sum(), []
        planner.count(hot, np.full(len(hot), 3), 1e6)

        def fetched() -> bool:
            answer(half)
            most.append(half.memory.describe()["total"])
            return half.residency.fetched_bytes > 0 and planner.in_flight == 0  # type: ignore[union-attr]

        until(fetched, "the hot sites' slices come")
        assert max(most) <= bound
        assert planner.levels[hot].sum() > before
        assert half.residency.dropped_bytes > 0  # type: ignore[union-attr]


def test_misses_are_those_of_the_experts_that_tokens_chose(stores: Callable[[str], Path]) -> None:
    """Counted by themselves: from what the model's routers say, and what was resident."""
    store = stores("qwen3_moe")
    with engine(store, device_memory=least(store) + above(store) // 2) as half, frozen(half):
        levels = half.core.residency._planner.levels  # type: ignore[union-attr]
        with counting(half.model) as use:  # type: ignore[arg-type]
            found = answer(half)
        bits = np.array([4, 6, 8])[levels - 1]
        misses, lacking = 0.0, 0.0
        for site, level, read in zip(half.table.nested, levels, bits, strict=True):
            layer = site.name.rsplit(".", 2)[0]
            times = found.computed_tokens if site.expert is None else use.chosen[layer][site.expert]
            misses += times * (level < 3)
            lacking += times * (8 - read) * site.parameters
    assert found.misses == misses > 0
    assert found.missed_bits == pytest.approx(lacking / found.computed_tokens / half.table.reads.weights)


@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoehybrid"])
def test_rows_of_one_step_are_told_apart(stores: Callable[[str], Path], family: str) -> None:
    """One that asks for no more than is there misses nothing beside another that does."""
    store = stores(family)
    with engine(store, device_memory=least(store)) as bounded:
        ids = [
            bounded.submit(_request(bits)) for bits in (8, 4)
        ]  # fmt: skip
        while not all(map(bounded.finished, ids)):
            bounded.step()
        high, low = map(bounded.take_result, ids)
    assert high.misses > 0 == low.misses
    assert low.missed_bits == 0
    assert high.read_weight_bits == pytest.approx(low.read_weight_bits)


def _request(bits: float) -> Any:
    from qbe import Request

    return Request(PROMPT, PARAMS, Budget(bits=bits))


def test_shared_rows_cost_what_was_asked_where_more_is_there(stores: Callable[[str], Path]) -> None:
    store = stores("llama")
    with engine(store, device_memory=least(store) + above(store) // 2, rows="shared") as half, frozen(half):
        ids = [half.submit(_request(bits)) for bits in (8, 4)]
        while not all(map(half.finished, ids)):
            half.step()
        high, low = map(half.take_result, ids)
    assert low.misses == 0
    assert low.read_weight_bits > low.average_weight_bits == low.priced_weight_bits
    assert high.priced_weight_bits == high.read_weight_bits < high.average_weight_bits


def test_records_say_what_was_missed(stores: Callable[[str], Path], tmp_path: Path) -> None:
    store = stores("llama")
    with engine(store, device_memory=least(store), records=tmp_path / "records.sqlite") as bounded:
        found = answer(bounded)
    (record,) = RecordStore(tmp_path / "records.sqlite")
    assert record.precision_misses == found.misses > 0
    assert record.read_weight_bits == pytest.approx(found.read_weight_bits)
    assert 0 < record.bytes_moved < found.bytes_per_token * PARAMS.max_tokens


def test_all_that_fits_is_the_store_itself(stores: Callable[[str], Path]) -> None:
    store = stores("qwen3_moe")
    with engine(store, device_memory="1 GB") as whole:
        modules = dict(whole.model.named_modules())
        numbers = whole.residency
        assert numbers is not None
        assert numbers.resident_bytes == numbers.stored_bytes
        with safe_open(next(store.glob("nested-*.safetensors")), framework="pt") as stored:
            packed = [n for n in stored.keys() if n.endswith(".packed")]  # noqa: SIM118
            for name in packed:
                module: Any = modules[name.removesuffix(".packed")]
                codes = module.packed if hasattr(module, "packed") else module.weight.packed
                assert torch.equal(codes, stored.get_tensor(name))
        assert answer(whole).misses == 0


@pytest.fixture
def doomed(stores: Callable[[str], Path], tmp_path: Path) -> Path:
    """A store that a test may destroy."""
    copy = tmp_path / "store"
    copy.mkdir()
    for file in stores("qwen3_moe").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def heat_everything(of: Engine) -> None:
    """Ask for all slices that are not there."""
    planner = of.core.residency._planner  # type: ignore[union-attr]
    missing = np.flatnonzero(planner.levels == 1)
    planner.count(missing, np.full(len(missing), 3), 1e6)


def test_a_file_that_vanishes_is_still_read(doomed: Path) -> None:
    with engine(doomed, device_memory=least(doomed) + above(doomed) // 2) as half:
        next(doomed.glob("nested-*")).unlink()
        heat_everything(half)
        until(lambda: bool(answer(half)) and half.residency.fetched_bytes > 0, "slices come")  # type: ignore[union-attr]
        assert half.residency.failure is None  # type: ignore[union-attr]


@pytest.mark.parametrize("fault", ["cut short", "no memory"])
def test_where_fetching_fails_one_line_says_so_and_what_is_resident_serves(
    doomed: Path, fault: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    upper = above(doomed)
    with engine(doomed, device_memory=least(doomed) + upper // 2) as half:
        if fault == "cut short":
            next(doomed.glob("nested-*")).open("r+b").truncate(64)
        else:

            def refuse(*_: Any) -> None:
                raise MemoryError

            monkeypatch.setattr(half.core.residency._fetcher, "_load", refuse)
        heat_everything(half)
        with caplog.at_level(logging.WARNING):
            until(lambda: bool(answer(half)) and half.residency.failure is not None, "a failure")  # type: ignore[union-attr]
            resident = half.residency.resident_bytes  # type: ignore[union-attr]
            again = [answer(half) for _ in range(3)]
        (line,) = [r.getMessage() for r in caplog.records if r.name.startswith("qbe.residency")]
        assert "could not be fetched" in line
        assert "what is on the device goes on serving" in line
        assert ("ends too early" if fault == "cut short" else "MemoryError") in line
        assert "\n" not in line
        assert all(r.error is None and len(r.token_ids) == PARAMS.max_tokens for r in again)
        assert half.residency.resident_bytes >= resident - upper // 2  # type: ignore[union-attr]
        assert [r.token_ids for r in again[1:]] == [again[0].token_ids] * 2  # nothing moves any more


def test_waiting_for_what_cannot_be_read_is_refused(doomed: Path) -> None:
    with engine(doomed, device_memory=least(doomed, miss="wait"), miss="wait") as waiting:
        whole = answer(waiting)
        next(doomed.glob("nested-*")).open("r+b").truncate(64)
        with pytest.raises(QBEError, match=r"ends too early.*exact bits cannot be had any more") as refused:
            answer(waiting)
        assert "\n" not in str(refused.value)
        with pytest.raises(QBEError, match="exact bits cannot be had any more"):
            answer(waiting)
    assert whole.error is None


def test_no_address_space_is_one_line(stores: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    store = stores("llama")
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(QBEError, match=r"address space.*Cannot allocate memory.*leave device_memory out"):
        engine(store, device_memory="1GB")


def test_a_damaged_store_is_refused_as_it_starts(doomed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qbe.residency.store_files.os.preadv", lambda *_: 0)
    with pytest.raises(QBEError, match=r"cannot be read .*ends too early.*"):
        engine(doomed, device_memory="1GB")


def test_an_arena_gives_dropped_memory_back() -> None:
    pages = 64 * mmap.PAGESIZE
    arena = Arena((2, pages))
    arena.part(0, 2 * pages)[:] = b"\x07" * (2 * pages)
    arena.drop(100, pages)
    assert arena.codes.flatten()[:100].eq(7).all()
    assert arena.codes.flatten()[mmap.PAGESIZE : pages].eq(0).all()  # new pages: the old ones are the system's
    assert arena.codes[1, 100:].eq(7).all()


def test_limits_lower_and_never_raise() -> None:
    limits = ReadLimits(np.array([4, 6, 8]))
    asked = Blueprint("test", (8, 4, 8), (16, 8, 16), (16,))
    read = limits.of(asked)
    assert (read.weight_bits, read.activation_bits) == ((4, 4, 8), asked.activation_bits)
    assert limits.of(asked) is read
    limits.set(np.array([8, 8, 8]))
    assert limits.of(asked) is asked


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"miss": "wait"}, "give that, too"),
        ({"device_memory": "1GB", "miss": "never"}, "miss is 'never', but must be lower or wait"),
        ({"device_memory": "much"}, "must be a size such as 12GiB"),
        ({"device_memory": "1GB", "compile": True}, "does not go with compile"),
        ({"device_memory": "1GB", "most_bits": 6}, "does not go with most_bits"),
        ({"device_memory": "1GB", "originals": "host"}, "does not go with originals"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], why: str) -> None:
    with pytest.raises(QBEError, match=re.escape(why)):
        Engine("no-such-model", device="cpu", **options)


def test_a_model_in_memory_is_there_already() -> None:
    with pytest.raises(QBEError, match="does not go with a model given in memory"):
        Engine(tiny_llama(), tokenizer=byte_tokenizer(), device="cpu", device_memory="1GB")


def test_bits_that_move_within_a_pass_are_refused(stores: Callable[[str], Path]) -> None:
    with engine(stores("llama"), device_memory="1GB") as bounded:
        with pytest.raises(QBEError, match="cascade does nothing here, because device_memory bounds"):
            bounded.generate(PROMPT, PARAMS, budget=Budget(bits=6, cascade=True))
        result = bounded.generate(PROMPT, PARAMS, budget=Budget(bits=6, cascade=True, best_effort=True))
        assert "cascade" in result.ignored


def test_closing_ends_the_thread_and_the_files(stores: Callable[[str], Path]) -> None:
    bounded = engine(stores("llama"), device_memory="1GB")
    residency: Residency = bounded.core.residency  # type: ignore[assignment]
    slices: StoredSlices = residency._slices
    thread = residency._fetcher._thread  # type: ignore[union-attr]
    assert slices._files.open
    bounded.close()
    assert not slices._files.open
    assert not thread.is_alive()
