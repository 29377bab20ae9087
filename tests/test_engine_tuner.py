"""An engine under the tuner: graphs are renewed in idle moments only, one at a time, and count what they launch."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from conftest import byte_tokenizer, tiny_llama
from qbe import Budget, Engine, Request, SamplingParams
from qbe.engine.execution.captured import Captured, Forward, Kind, counted
from qbe.engine.execution.decode import DecodeStep, batch_sizes
from qbe.engine.execution.runner import Runner
from qbe.engine.execution.warmup import row_counts
from qbe.kernels.tuning.store import TunedStore
from qbe.kernels.tuning.tunable import Choice, Config, Tunable, choices
from qbe.kernels.tuning.tunable import _tunables as tunables

META = torch.device("meta")


@pytest.fixture
def choice(tmp_path) -> Iterator[Choice]:  # type: ignore[no-untyped-def]
    made = Tunable("made-up", lambda p, d: {"TILE": 1}, lambda p, c, d: [{"TILE": 2}], lambda p, c: True,
                   TunedStore(tmp_path / "tuned.sqlite"))  # fmt: skip
    made.config(META, 1, (8,), 64, (4,), 64, torch.bfloat16, False, False)
    (found,) = choices(META)
    found.misses = 0
    yield found
    made._choices.clear()


class Graph:
    """A captured graph as far as a CPU can have one."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def engine(choice: Choice, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine whose decode steps have graphs that launch the made-up kernel twice; their capture is no real one."""

    def capture(self: DecodeStep, kind: Kind, forward: Forward) -> Captured:
        launches = [(choice, choice.config), (choice, choice.config)]
        numbers = torch.zeros(kind.size, 320)
        measured = torch.zeros(3, kind.size, dtype=torch.float64)
        return Captured(Graph(), numbers, numbers.argmax(-1), measured, forward, counted(launches))  # type: ignore[arg-type]

    monkeypatch.setattr(DecodeStep, "_capture", capture)
    made = Engine(tiny_llama(), tokenizer=byte_tokenizer(), device="cpu", policy="uniform", records=False,
                  max_sequences=4)  # fmt: skip
    runner: Runner = made.core.runner
    if runner.decode is None:
        pytest.skip("no compiled CPU kernel")
    for size in batch_sizes(4):
        runner.decode._graphs[Kind(size)] = runner.decode._capture(Kind(size), runner.decode._run_model)
    return made


def decode_of(engine: Engine) -> DecodeStep:
    assert engine.core.runner.decode is not None
    return engine.core.runner.decode


def in_use(engine: Engine) -> dict[tuple[int, bool], Config]:
    """Size, and whether it is bounded -> the configuration in its graph."""
    return {kind: captured.launches[0][1] for kind, captured in decode_of(engine)._graphs.items()}


def test_replays_are_counted(engine: Engine, choice: Choice) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    engine.generate("text", params)  # the first token comes from the prompt's step
    assert (choice.hits, choice.misses) == (0, 5 * 2)
    choice.settle({"TILE": 2})
    engine.generate("text", params)  # the graph still has the generic one
    assert (choice.hits, choice.misses) == (0, 10 * 2)
    while engine._host.renew():
        pass
    engine.generate("text", params)
    assert (choice.hits, choice.misses) == (5 * 2, 10 * 2)


def test_bounded_steps_have_graphs_of_their_own_when_they_are_needed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, params = decode_of(engine), SamplingParams(max_tokens=5, ignore_eos=True)
    bounded = Budget(kv_bits=4, kv_error=0.1)
    engine.generate("text", params)
    engine.generate("text", params, budget=Budget(kv_error=0.1))  # at 16 bits there is nothing to bound
    assert decode.captures == 0
    for _ in range(2):
        engine.generate("text", params, budget=bounded)
        assert decode.captures == 1
    assert Kind(1, bounded=True) in decode._graphs

    def refuse(*_: object) -> None:
        raise RuntimeError("no memory\nmore lines")

    monkeypatch.setattr(decode, "_capture", refuse)
    results = engine.generate_batch([Request("text", params, bounded), Request("more", params)])
    assert [len(r.token_ids) for r in results] == [5, 5], "they run without a graph"
    assert decode.captures == 1


def test_graphs_are_renewed_one_at_a_time_and_only_when_idle(engine: Engine, choice: Choice) -> None:
    host, decode = engine._host, decode_of(engine)
    assert not host.renew()
    assert decode.renewals == 0
    choice.settle({"TILE": 2})
    request = engine.submit(Request("text", SamplingParams(max_tokens=5, ignore_eos=True)))
    engine.step()
    assert host.busy()
    assert host.renew()  # there is something to renew, but not now
    assert decode.renewals == 0
    engine.cancel(request)
    assert not host.busy()
    for done in (1, 2, 3):
        assert host.renew() is (done < 3)
        assert decode.renewals == done
        assert list(in_use(engine).values()).count({"TILE": 2}) == done
    assert not host.renew()
    assert decode.renewals == 3
    assert decode.captures == 0


def test_nothing_is_renewed_while_another_thread_has_the_engine(engine: Engine, choice: Choice) -> None:
    choice.settle({"TILE": 2})
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with engine._lock:
            held.set()
            release.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(30)
    assert engine._host.renew()
    assert decode_of(engine).renewals == 0
    release.set()
    thread.join(30)
    engine._host.renew()
    assert decode_of(engine).renewals == 1


def test_a_graph_that_cannot_be_captured_again_stays(
    engine: Engine, choice: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no memory\nmore lines")

    decode = decode_of(engine)
    before = dict(decode._graphs)
    choice.settle({"TILE": 2})
    monkeypatch.setattr(decode, "_capture", refuse)
    while engine._host.renew():
        pass
    assert decode._graphs == before
    assert decode.renewals == 0
    engine.generate("text", SamplingParams(max_tokens=3, ignore_eos=True))
    assert choice.hits == 0


def test_a_step_after_a_renewal_writes_the_plan_anew(engine: Engine, choice: Choice) -> None:
    plan = engine.core.plan
    plan._written = ((0,), (0,))
    choice.settle({"TILE": 2})
    engine._host.renew()
    assert plan._written is None


def test_an_engine_on_a_cpu_has_nothing_to_tune(monkeypatch: pytest.MonkeyPatch) -> None:
    for tunable in list(tunables):  # what other tests have launched
        monkeypatch.setattr(tunable, "_choices", {})
    engine = Engine(tiny_llama(), tokenizer=byte_tokenizer(), device="cpu", policy="uniform", records=False, tune=True)
    assert engine._tuner is None
    numbers = engine.kernel_cache
    assert (numbers.tuned, numbers.queued) == (0, 0)
    assert numbers.describe()["hit_rate"] is None
    engine.close()


@pytest.mark.parametrize("most", [1, 5, 8, 9, 64, 100, 255, 256, 300, 2048])
def test_the_rows_that_kernels_are_compiled_for_stand_for_all(most: int) -> None:
    """Those between two of them have the same bucket, and lie on the same side of where another kernel begins."""
    counts = row_counts(most)
    assert counts == sorted(set(counts))
    assert counts[-1] == most

    def kind(rows: int) -> tuple[int, bool]:
        return 1 << (rows - 1).bit_length(), rows >= 256

    assert {kind(rows) for rows in counts} == {kind(rows) for rows in range(1, most + 1)}
