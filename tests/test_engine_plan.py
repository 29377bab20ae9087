"""The plan: what a write changes and what it leaves alone, with a fake model and with a real nested one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from engine_models import DEVICE, build, prompts, request
from qbe.blueprint import Blueprint, DynamicPrecision
from qbe.engine.core import Core
from qbe.errors import QBEError
from qbe.sites import NESTABLE_ROLES, Role, Site, SiteTable
from qbe.store import plan as plan_module
from qbe.store.nested_linears import nest
from qbe.store.nested_tensor import NestedTensor
from qbe.store.plan import Plan
from qbe.tagger import tag

GEARS = (4, 6, 8, 16)
CPU = torch.device("cpu")
TABLE = SiteTable(
    (
        Site("a", Role.FFN_UP, 0, (4, 4), True, GEARS),
        Site("norm", Role.NORM, 0, (4,)),
        Site("b", Role.FFN_DOWN, 0, (4, 4), True, GEARS),
        Site("head", Role.OUTPUT_HEAD, None, (4, 4), True, GEARS),
    ),
    layers=1,
)


def blueprint(*bits: int, activations: int = 16) -> Blueprint:
    return Blueprint.of("test", TABLE, bits, TABLE.activations(activations))


def test_rows_get_their_blueprints_and_the_head_those_of_the_kept_rows() -> None:
    plan = Plan(TABLE, 8, CPU)
    assert plan.precision_words.tolist() == [[4] * 8] * 3
    low, high = blueprint(4, 6, 8), blueprint(8, 16, 16)
    plan.write([(low, 1), (high, 3), (low, 2)], [low, high])
    assert plan.precision_words[0, :6].tolist() == [4, 8, 8, 8, 4, 4]
    assert plan.precision_words[1, :6].tolist() == [6, 16, 16, 16, 6, 6]
    assert plan.precision_words[2, :2].tolist() == [8, 16]
    by_token = Plan(TABLE, 8, CPU, head_sees_kept=False)
    by_token.write([(low, 1), (high, 2)], [low, high])
    assert by_token.precision_words[2, :3].tolist() == [8, 16, 16]


def test_a_cell_holds_both_precisions_of_its_row() -> None:
    plan = Plan(TABLE, 4, CPU)
    high, low = blueprint(4, 6, 8), blueprint(4, 6, 8, activations=8)
    assert high.key != low.key
    plan.write([(low, 1), (high, 1), (low, 1)], [low, high])
    assert plan.precision_words[0, :3].tolist() == [4 | 8 << 8, 4, 4 | 8 << 8]
    assert plan.precision_words[1, :3].tolist() == [6 | 8 << 8, 6, 6 | 8 << 8]
    assert plan.precision_words[2, :2].tolist() == [8, 8]  # the head keeps 16-bit activations
    plan.gather(torch.tensor(plan.columns([high, low])))
    assert plan.precision_words[:, :2].tolist() == [[4, 4 | 8 << 8], [6, 6 | 8 << 8], [8, 8]]


def test_a_write_moves_nothing_but_its_own_few_bytes() -> None:
    plan = Plan(TABLE, 4, CPU)
    model = nn.ModuleDict({s.name: nn.Linear(4, 4, bias=False) for s in TABLE.nested})
    for layer in model.values():
        layer.weight.multiplies_natively = False  # as a nested weight on a CPU says
    plan.bind(model)
    weights = [(m.weight.data_ptr(), m.weight._version) for m in model.values()]
    rows = [m.weight.bits.data_ptr() for m in model.values()]
    for bits in ((4, 4, 4), (16, 8, 6)):
        plan.write([(blueprint(*bits), 4)], [blueprint(*bits)] * 4)
        assert [m.weight.bits.tolist() for m in model.values()] == [[b] * 4 for b in bits]
    assert [m.weight.bits.data_ptr() for m in model.values()] == rows
    assert [(m.weight.data_ptr(), m.weight._version) for m in model.values()] == weights


def test_the_same_rows_again_are_not_written() -> None:
    plan = Plan(TABLE, 4, CPU)
    plan.write([(blueprint(4, 4, 4), 2)], [blueprint(4, 4, 4)])
    before = plan.precision_words._version
    plan.write([(blueprint(4, 4, 4), 2)], [blueprint(4, 4, 4)])
    assert plan.precision_words._version == before
    plan.write([(blueprint(4, 6, 4), 2)], [blueprint(4, 6, 4)])
    assert plan.precision_words._version > before


def test_dynamic_precision_is_a_row_of_the_plan_and_what_it_moved_is_undone() -> None:
    plan = Plan(TABLE, 4, CPU)
    fixed, moved = blueprint(4, 6, 8), replace(blueprint(4, 6, 8), dynamic_precision=DynamicPrecision("routers", 7))
    assert len({fixed.key, moved.key}) == len({fixed.linear_key, moved.linear_key}) == 2
    assert fixed.computed_key != moved.computed_key
    for write in (
        lambda: plan.write([(fixed, 1), (moved, 2)], [fixed, moved]),
        lambda: plan.gather(torch.tensor(plan.columns([fixed, moved, moved]))),
    ):
        write()
        assert plan.dynamic_precision[:3].tolist() == [0, 2 << 8 | 7, 2 << 8 | 7]
        plan.precision_words[:2, 1] = 8  # as an op of the step would
        write()
        assert plan.precision_words[:2, 1].tolist() == [4, 6]


@pytest.mark.parametrize("wrong", [("nobody", 0), ("cascade", 256), ("cascade", -1)])
def test_an_unknown_controller_is_refused(wrong: tuple[str, int]) -> None:
    with pytest.raises(QBEError, match=f"{wrong[0]}.*{wrong[1]}.*one of cascade"):
        DynamicPrecision(*wrong)


def test_more_blueprints_than_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "_CACHED_BLUEPRINTS", 3)
    plan = Plan(TABLE, 3, CPU)
    every = [blueprint(a, b, c) for a in GEARS for b in GEARS for c in GEARS]
    for i in (*range(len(every)), *range(0, len(every), 5), *range(3)):
        chosen = [every[i], every[(i * 7) % 64], every[i]]
        plan.write([(b, 1) for b in chosen], chosen)
        assert plan.precision_words.T.tolist() == [list(b.weight_bits) for b in chosen]


def test_a_plan_of_one_row_serves_one_blueprint() -> None:
    plan = Plan(TABLE, 1, CPU)
    plan.write([(blueprint(4, 6, 8), 100)], [blueprint(4, 6, 8)])
    assert plan.precision_words.flatten().tolist() == [4, 6, 8]
    with pytest.raises(ValueError, match="two blueprints"):
        plan.write([(blueprint(4, 6, 8), 1), (blueprint(4, 4, 4), 1)], [])
    with pytest.raises(ValueError, match="5 rows do not fit a plan of 4"):
        Plan(TABLE, 4, CPU).write([(blueprint(4, 6, 8), 5)], [])


def _nested(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, SiteTable]:
    """A tiny model with every linear layer that can be nested in the store, and its table."""
    model = build(name).to(dtype)
    table = tag(model)
    names = [s.name for s in table if s.is_linear and s.role in NESTABLE_ROLES]
    nest(model, names)
    sites = tuple(
        Site(s.name, s.role, s.layer, s.shape, s.is_linear, model.get_submodule(s.name).weight.gears)
        if s.name in names
        else s
        for s in table
    )
    return model, SiteTable(sites, layers=table.layers)


@pytest.mark.parametrize("name", ["llama", "granite-moe-hybrid"])
def test_rows_of_a_mixed_batch_get_the_logits_they_get_alone(name: str) -> None:
    model, table = _nested(name)
    assert len(table.nested) > 4
    assert {s.role for s in table.nested} & {Role.OUTPUT_HEAD, Role.SSM_IN}
    pointers = [model.get_submodule(s.name).weight.packed.data_ptr() for s in table.nested]
    core = Core(model, table, max_batch_tokens=32)
    blueprints = [Blueprint.of("uniform", table, (b,) * len(table.nested)) for b in GEARS]
    mixed = tuple(GEARS[i % 4] for i in range(len(table.nested)))
    blueprints.append(Blueprint.of("mixed", table, mixed))
    texts = prompts(7, 12, 3, 9, 5)

    def logits(which: list[int]) -> list[torch.Tensor]:
        """Of each request after its prompt and two more tokens."""
        requests = [request(str(i), texts[i], blueprints[i], max_tokens=5) for i in which]
        for r in requests:
            core.add(r)
        found: dict[str, list[torch.Tensor]] = {r.request_id: [] for r in requests}
        while any(len(f) < 3 for f in found.values()):
            work = core.scheduler.schedule()
            rows = iter(core.runner.step(work)[0])
            for w in work:
                if w.samples:
                    found[w.sequence.request_id].append(next(rows).cpu())
                    w.sequence.token_ids.append(11)
        for r in requests:
            core.cancel(r.request_id)
        return [torch.stack(f[:3]) for f in found.values()]

    together = logits([0, 1, 2, 3, 4])
    for i in range(5):
        torch.testing.assert_close(together[i], logits([i])[0], rtol=2e-3, atol=2e-3 * together[i].abs().max().item())
    assert [model.get_submodule(s.name).weight.packed.data_ptr() for s in table.nested] == pointers


def test_sixteen_bits_are_the_plain_model_and_four_are_not() -> None:
    plain = build("llama")
    prompt = prompts(12)[0]
    with torch.inference_mode():
        expected = plain(torch.tensor([prompt], device=DEVICE)).logits[0, -1]
    model, table = _nested("llama")
    core = Core(model, table)
    for bits, same in ((16, True), (4, False)):
        r = request("r", prompt, Blueprint.of("uniform", table, (bits,) * len(table.nested)))
        core.add(r)
        logits = core.runner.step(core.scheduler.schedule())[0][0]
        core.cancel("r")
        assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-3) == same


def test_every_nested_weight_is_bound() -> None:
    model, table = _nested("llama")
    core = Core(model, table, max_batch_tokens=32)
    for i, site in enumerate(table.nested):
        weight = model.get_submodule(site.name).weight
        assert isinstance(weight, NestedTensor)
        assert weight.bits.data_ptr() == core.plan.precision_words[i].data_ptr()
        assert weight.bits.shape == (32,)
        assert weight.float32_output == (site.role is Role.OUTPUT_HEAD)


def test_logits_are_the_heads_sums_in_float32() -> None:
    model, table = _nested("llama", torch.bfloat16)
    core, head = Core(model, table), model.get_output_embeddings()
    seen: list[torch.Tensor] = []
    head.register_forward_pre_hook(lambda _, given: seen.append(given[0].clone()))
    core.add(request("r", prompts(12)[0], Blueprint.of("uniform", table, (16,) * len(table.nested))))
    logits = core.runner.step(core.scheduler.schedule())[0][0]
    expected = seen[-1][0, -1].float() @ head.weight.dequantise().float().T
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("compile", [False, True])
def test_nor_are_they_rounded_in_steps_at_fixed_shapes(compile: bool) -> None:
    model, table = _nested("llama", torch.bfloat16)
    core = Core(model, table, max_sequences=1)
    if compile:
        core.runner.compile_steps(progress=False)
    r = request("r", prompts(12)[0], Blueprint.of("uniform", table, (16,) * len(table.nested)), max_tokens=5)
    core.add(r)
    for _ in range(3):
        work = core.scheduler.schedule()
        logits = core.runner.step(work)[0][0]
        core.scheduler.complete(work)
        r.token_ids.append(11)
        assert logits.dtype == torch.float32
        assert not torch.equal(logits, logits.bfloat16().float())
