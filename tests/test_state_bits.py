"""The bits of recurrent states, through the doors: Python, the command line and HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import qbe
from engine_models import NO_SITES, build, prompts, request, run
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.engine.core import Core
from qbe.errors import QBEError
from qbe.records.store import RecordStore
from server_running import running
from test_recurrent_batch import PARAMS, TEXTS, engine_of, free_slots


@pytest.fixture(scope="module", params=["granite-moe-hybrid", "qwen3-next", "mamba"])
def engine(request: pytest.FixtureRequest) -> Iterator[qbe.Engine]:
    """A model whose new tokens take the fused op, and two whose states are read and written by the reference."""
    with engine_of(request.param, max_batch_tokens=48) as found:
        yield found


def ask(text: str, bits: int | None, **more: Any) -> qbe.Request:
    return qbe.Request(text, PARAMS, Budget(bits=8, state_bits=bits, **more))


def test_requests_of_every_precision_share_steps_and_say_what_each_says_alone(engine: qbe.Engine) -> None:
    asked = [ask(t, b) for t, b in zip(TEXTS, (None, 8, 10, 16), strict=True)]
    alone = [engine.generate_batch([r])[0].token_ids for r in asked]
    together = engine.generate_batch(asked)
    # Which tokens of a prompt share a step differs, and with it where a state is rounded: short prompts have one.
    assert [r.token_ids for r in together[:3]] == alone[:3]
    assert [r.blueprint.least_state_bits for r in together] == [32, 8, 10, 16]
    assert [r.describe()["usage"]["state_bits"] for r in together] == [32, 8, 10, 16]
    assert free_slots(engine) == 4


def test_thirty_two_bits_are_what_nobody_asks_for(engine: qbe.Engine) -> None:
    plain, asked = (engine.generate_batch([ask(TEXTS[0], bits)])[0] for bits in (None, 32))
    assert plain.token_ids == asked.token_ids
    assert plain.blueprint.key == asked.blueprint.key
    assert asked.blueprint.state_bits is None


def test_fewer_bits_are_fewer_bytes_in_the_pool_and_change_the_states(engine: qbe.Engine) -> None:
    core = engine.core
    assert core.states is not None
    sizes, states = [], []
    for bits in (32, 16, 10, 8):
        key = engine.submit(ask(TEXTS[0], bits))
        sequence = engine.sequence(key)
        while len(sequence.output_ids) < 4:
            engine.step()
        assert sequence.state_slot is not None
        sizes.append(sequence.state_slot.nbytes)
        last = next(i for i, s in enumerate(core.states.shapes) if s.recurrent)
        states.append(core.states.read(last, [sequence.state_slot]).clone())
        engine.cancel(key)
        engine.take_result(key)
    assert sizes[3] < sizes[2] <= sizes[1]  # rows of 8 and 16 numbers, which are padded to 16
    assert sizes[3] < sizes[0]
    off = [float((s - states[0]).norm() / states[0].norm()) for s in states[1:]]
    assert 0 < off[0] < off[1] < off[2] < 0.1


def test_more_requests_of_fewer_bits_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory holds the states of two at 32 bits."""
    monkeypatch.setattr("qbe.engine.setup.state_slots", lambda *_: 2)
    core = Core(build("mamba2"), NO_SITES, max_sequences=8)
    assert core.states is not None
    eight = (8,) * 3
    fits = core.states.nbytes // core.states.slot_bytes(eight)
    assert fits > 2
    requests = [request(str(i), p, max_tokens=6) for i, p in enumerate(prompts(*[9] * 8))]
    for r in requests:
        r.blueprint_history.last = Blueprint("x", (), (), (), state_bits=eight)
        core.add(r)
    core.step()
    assert sum(r.state_slot is not None for r in requests) == min(fits, 8)
    run(core)
    assert all(len(r.output_ids) == 6 for r in requests)


def test_preempted_or_refreshed_it_keeps_its_bits() -> None:
    with engine_of("granite-moe-hybrid") as engine:
        key = engine.submit(ask(TEXTS[0], 8))
        sequence = engine.sequence(key)
        while len(sequence.output_ids) < 5:
            engine.step()
        high = engine.explain(TEXTS[0], budget=Budget(bits=16)).blueprint
        assert engine.core.refresh(sequence, high)
        assert sequence.blueprint.least_state_bits == 8
        engine.core.scheduler.restart(sequence)
        while not engine.finished(key):
            engine.step()
        result = engine.take_result(key)
        assert (result.error, len(result.token_ids), result.blueprint.least_state_bits) == (None, 24, 8)


@pytest.mark.parametrize("bits", [0, 9, 12, 64, 8.5, "8", True])
def test_bits_that_there_are_not_are_refused(bits: Any) -> None:
    with pytest.raises(QBEError, match=r"state_bits is .*, but must be 8, 10, 16 or 32"):
        Budget(state_bits=bits)


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_a_model_without_recurrent_states_says_so(name: str) -> None:
    with engine_of(name) as engine:
        result = engine.generate_batch([ask("x", 8)])[0]
        assert "keep no recurrent state" in result.ignored["state_bits"]
        assert result.blueprint.state_bits is None


def test_over_http(tmp_path: Path) -> None:
    records = tmp_path / "records.sqlite"
    with running(lambda: engine_of("granite-moe-hybrid", records=records)) as server:
        body = {"prompt": TEXTS[0], "max_tokens": 8, "temperature": 0}
        found = server.post("completions", {**body, "qbe": {"bits": 8, "state_bits": 10}}).json()
        assert found["usage"]["qbe"]["state_bits"] == 10
        assert server.post("completions", body).json()["usage"]["qbe"]["state_bits"] == 32
        wrong = server.post("completions", {**body, "qbe": {"state_bits": 9}})
        assert wrong.status_code == 400
        assert wrong.json()["error"]["param"] == "qbe.state_bits"
    store = RecordStore(records)
    assert {r.state_bits and set(r.state_bits) == {10} for r in store.list()} == {None, True}
    store.close()


def test_blueprints_of_other_state_bits_are_others() -> None:
    plain = Blueprint("x", (8,), (16,), (16, 16))
    eight, ten = (Blueprint("x", (8,), (16,), (16, 16), state_bits=(b, b)) for b in (8, 10))
    assert len({plain.key, eight.key, ten.key}) == len({b.computed_key for b in (plain, eight, ten)}) == 3
    assert not eight.covers(plain)
    assert not plain.covers(eight)
    assert Blueprint("x", (8,), (16,), (16, 16), state_bits=(32, 32)) == plain
