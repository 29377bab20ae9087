"""Compiled steps with prompts: what the eager ones give, whatever is in them."""

from __future__ import annotations

import random

import pytest
import torch

from conftest import byte_tokenizer, tiny_llama
from engine_models import request
from qbe import Engine
from qbe.blueprint import Blueprint
from qbe.engine.execution.prompt_step import PromptStep
from qbe.sites import SiteTable


def compiled(device: torch.device, dtype: torch.dtype, sequences: int = 4) -> Engine:
    if device.type != "cpu":
        pytest.skip("on a GPU steps with prompts are not compiled")
    return Engine(tiny_llama().to(dtype), tokenizer=byte_tokenizer(), device="cpu", policy="uniform", records=False,
                  max_sequences=sequences, max_batch_tokens=256, compile=True)  # fmt: skip


def blueprint(table: SiteTable, choose: random.Random) -> Blueprint:
    return Blueprint.of("random", table, tuple(choose.choice((4, 6, 8, 16)) for _ in table.nested))


def refuse(*_: object) -> None:
    raise RuntimeError("not compiled")


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-3), (torch.bfloat16, 0.05)], ids=str)
def test_it_equals_the_eager_one(
    device: torch.device, dtype: torch.dtype, near: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qbe.engine.execution.decode.compile_step", refuse)  # other steps are tested elsewhere
    core, choose = compiled(device, dtype).core, random.Random(0)
    prompts = core.runner.prompts
    assert prompts is not None
    torch._dynamo.utils.counters.clear()
    seen = set[tuple[int, ...]]()
    for i, length in enumerate((3, 150, 2, 70, 131, 90, 5)):
        s = request(str(i), [(7 * j + i) % 250 for j in range(length)], blueprint(core.table, choose), max_tokens=300)
        core.add(s)
        for _ in range(2):  # its first tokens beside those that write already, and what may be left
            work = core.scheduler.schedule()
            seen.add(tuple(w.count for w in work))
            core.runner.prompts = None
            eager = core.runner._forward(work)
            core.runner.prompts = prompts
            logits = core.runner._forward(work)
            torch.testing.assert_close(logits, eager, rtol=near, atol=near * float(eager.abs().max()))
            core.scheduler.complete(work)
            for w in work:
                w.sequence.computed = w.start + w.count
                if w.samples:
                    w.sequence.append(65)
        for running in list(core.scheduler.running)[:-3]:
            core.scheduler.finish(running, "stop")
    assert any(max(counts) > 1 and 1 in counts for counts in seen)  # prompts beside answers
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


def test_an_engine_uses_it(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qbe.engine.execution.decode.compile_step", refuse)
    core, tokens = compiled(device, torch.bfloat16).core, []
    run = PromptStep.run

    def counted(self: PromptStep, layout, given, *rest):  # type: ignore[no-untyped-def]
        tokens.append(len(given))
        return run(self, layout, given, *rest)

    monkeypatch.setattr(PromptStep, "run", counted)
    core.add(request("r", list(range(40)), blueprint(core.table, random.Random(1)), max_tokens=3))
    while core.scheduler.has_work():
        core.step()
    assert tokens == [40]


def test_every_engine_of_a_process_is_compiled(device: torch.device) -> None:
    """Dynamo counts what engines that are gone have compiled as recompilations, of which it allows a few; one, here."""
    with torch._dynamo.config.patch(recompile_limit=1, accumulated_recompile_limit=1):
        for _ in range(3):
            with compiled(device, torch.float32, sequences=1) as engine:
                assert engine.core.runner.prompts is not None
                assert engine.core.runner.decode is not None
                assert set(engine.core.runner.decode._compiled) == {1}
