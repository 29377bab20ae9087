"""Routers inside the forward pass: against a slow reference, in steps at fixed shapes, under preemption and sharing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import byte_tokenizer, tiny_llama
from engine_models import request, run
from qbe import Engine, QBEError
from qbe.blueprint import DynamicPrecision
from qbe.engine.adaptive.routing import Read, Routing
from qbe.engine.core import Core
from qbe.engine.execution.decode import DecodeStep
from qbe.engine.sampling.scoring import Scored, score
from qbe.kernels.cpu import native
from qbe.kvcache.pages import PAGE_SIZE
from qbe.policies.routers import blocks_of, gear_bits
from qbe.sites import SiteTable
from qbe.store.nested_linears import NestedWeightConfig
from qbe.store.nesting import nest_model
from qbe.store.placement import place
from qbe.store.plan import Plan
from routing_samples import Reference, random_routers, routed_blueprint

LEVELS = (70, 128, 190)
TOKENS = 12


def texts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 320, (n,), generator=generator).tolist() for n in lengths]


def core(device: torch.device, **sizes: object) -> Core:
    model = tiny_llama()
    table = nest_model(model, "tiny", NestedWeightConfig(), progress=False)
    place(model, device, "device")
    sizes = {"max_sequences": 5, "kv_tokens": 40 * PAGE_SIZE, **sizes}
    return Core(model, table, device=device, **sizes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def reference() -> Reference:
    model = tiny_llama()
    return Reference(random_routers(nest_model(model, "tiny", NestedWeightConfig(), progress=False)))


def fixed(made: Core) -> Core:
    """With decode steps at fixed shapes; on a CPU there are none by themselves."""
    runner = made.runner
    if runner.decode is None:
        pages = made.pool.num_pages
        runner.decode = DecodeStep(made.model, runner.cache, made.plan, 5, pages, runner._cache_name)
    return made


def test_logits_and_bits_are_those_of_the_reference(device: torch.device, reference: Reference) -> None:
    made = core(device, routers=reference.routers, max_batch_tokens=64)
    (ids,) = texts(90)  # in two steps
    for level in (*LEVELS, None):
        blueprint, found = routed_blueprint(made.table, level), torch.zeros(90, 320)

        def take(position: int, rows: torch.Tensor, found: torch.Tensor = found) -> None:
            found[position : position + len(rows)] = rows.cpu()

        (read,) = score(made, [Scored(ids, blueprint, 0, take)])
        expected = reference.logits(ids, blueprint)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
        if level is None:
            assert read is None
        else:
            assert read is not None
            assert read.average(made.table) == pytest.approx(reference.average())
            assert len({g for gears in reference.gears[:3] for g in gears}) == 3, "the test tells widths apart"


def test_answers_of_a_mixed_batch_at_fixed_shapes(device: torch.device, reference: Reference) -> None:
    made = fixed(core(device, routers=reference.routers))
    asked = list(zip(texts(5, 40, 70, 20, 33), (*LEVELS, None, 128), strict=True))
    requests = [request(str(i), ids, routed_blueprint(made.table, level), max_tokens=TOKENS)
                for i, (ids, level) in enumerate(asked)]  # fmt: skip
    found = run(made, *requests)
    for r, written, (ids, level) in zip(requests, found, asked, strict=True):
        blueprint = routed_blueprint(made.table, level)
        assert written == reference.greedy(ids, blueprint, TOKENS)
        if level is None:
            assert r.routed is None
            continue
        reference.logits(ids + written[:-1], blueprint)
        assert r.routed is not None
        read = Read.of(r.routed, blueprint, made.table)
        assert read is not None
        assert read.average(made.table) == pytest.approx(reference.average(len(ids) - 1))
        assert sum(read.weights.values()) == pytest.approx(made.table.nested_parameters)
        lowest, highest = (routed_blueprint(made.table, None, g).bytes_per_token(made.table) for g in (4, 8))
        assert lowest < read.bytes < highest


def test_a_compiled_step_routes_and_is_compiled_anew_for_other_routers(device: torch.device) -> None:
    engine = Engine(tiny_llama(), tokenizer=byte_tokenizer(), device=device.type, policy="uniform", records=False,
                    max_sequences=2)  # fmt: skip
    made, decode = engine.core, engine.core.runner.decode
    assert decode is not None
    made.runner.compile_steps(progress=False)
    if device.type == "cpu":
        assert set(decode._compiled) == {1}
    captures, routers = decode.captures, random_routers(made.table, seed=1)
    made.add_routers(routers)
    made.runner.route(routers)
    assert (decode.captures > captures) == (device.type == "cuda")
    captures = decode.captures
    made.runner.route(routers)  # the same ones
    assert decode.captures == captures
    level = 150
    sequence = request("compiled", texts(20)[0], routed_blueprint(made.table, level, seed=1), max_tokens=60)
    made.add(sequence)
    made.step()
    torch._dynamo.utils.counters.clear()
    totals = []
    for _ in range(20):
        work = made.scheduler.schedule()
        logits = decode.run(work)[0].clone()
        totals.append(made.runner.routing.spent[:, :, 0].sum(0).tolist())  # type: ignore[union-attr]
        precision_words = made.plan.precision_words[:, 0].tolist()
        made.plan.forget()
        eager = made.runner._forward(work)
        torch.testing.assert_close(logits, eager, rtol=1e-3, atol=1e-3 * float(eager.abs().max()))
        assert precision_words == made.plan.precision_words[:, 0].tolist()
        sequence.token_ids.append(int(logits.argmax()))
        sequence.computed += 1
    routed = sum(made.table.nested[s].parameters for b in blocks_of(made.table, head=True) for s in b.sites)
    assert all(sum(t) == routed for t in totals)
    assert len({tuple(t) for t in totals}) > 5, "tokens differ"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
    assert decode.captures == captures


def test_another_blueprint_brings_its_own_level(reference: Reference) -> None:
    """A refresh of a routed answer, whose bits are its level's."""
    made = core(torch.device("cpu"), routers=reference.routers)
    sequence = request("r", texts(20)[0], routed_blueprint(made.table, 40), max_tokens=4)
    made.add(sequence)
    assert made.refresh(sequence, routed_blueprint(made.table, 200))
    assert sequence.blueprint.dynamic_precision == DynamicPrecision("routers", 200, "random 0")


def test_preempted_requests_resume_with_the_same_answer(reference: Reference) -> None:
    asked, cpu = texts(100, 90, 110), torch.device("cpu")
    roomy = core(cpu, routers=reference.routers)
    alone = [run(roomy, request("a", ids, routed_blueprint(roomy.table, 128), max_tokens=60))[0] for ids in asked]
    tight = core(cpu, routers=reference.routers, kv_tokens=6 * PAGE_SIZE)
    requests = [request(str(i), ids, routed_blueprint(tight.table, 128), max_tokens=60) for i, ids in enumerate(asked)]
    assert run(tight, *requests) == alone
    assert sum(r.preemptions for r in requests) > 0


def test_pages_are_shared_by_what_routers_go_by(reference: Reference) -> None:
    made, (ids,) = core(torch.device("cpu"), routers=reference.routers), texts(150)
    cached = []
    for name, level in enumerate((128, 128, 129, None)):
        r = request(str(name), ids, routed_blueprint(made.table, level), max_tokens=TOKENS)
        assert run(made, r) == [reference.greedy(ids, r.blueprint, TOKENS)]
        cached.append(r.paging.cached)
    assert cached == [0, 128, 0, 0]


def test_draft_tokens_are_checked_by_routed_rows(reference: Reference) -> None:
    """Drafts read fewer bits and are nobody's choice; what is written is what routers give."""
    made, (ids,) = core(torch.device("cpu"), routers=reference.routers, speculate=True), texts(30)
    assert made.speculator is not None
    blueprint = routed_blueprint(made.table, 150, gear=8)
    r = request("a", ids, blueprint, max_tokens=TOKENS, speculate=True)
    assert run(made, r) == [reference.greedy(ids, blueprint, TOKENS)]
    assert r.speculation is not None


def test_two_policies_share_an_engine_and_its_routers_take_turns(device: torch.device, reference: Reference) -> None:
    """In a memory too small for all, so that some wait again, with a request that no router moves among them."""
    made, other = core(device, routers=reference.routers, kv_tokens=5 * PAGE_SIZE), random_routers(reference.table, 1)
    made.add_routers(other)
    references = [reference, Reference(other)]
    asked = [(ids, at % 2) for at, ids in enumerate(texts(40, 70, 30, 20, 60, 50))]
    requests = [request(str(at), ids, routed_blueprint(made.table, None if at == 4 else 128, seed=kind), max_tokens=40)
                for at, (ids, kind) in enumerate(asked)]  # fmt: skip
    exchanges, route = [], made.runner.route
    made.runner.route = lambda routers: exchanges.append(routers.digest) or route(routers)  # type: ignore[method-assign]
    for (ids, kind), r, written in zip(asked, requests, run(made, *requests), strict=True):
        assert written == references[kind].greedy(ids, r.blueprint, 40)
    assert exchanges == sorted(exchanges), "once"
    assert set(exchanges) == {"random 0", "random 1"}
    assert sum(r.preemptions for r in requests) > 0


def test_no_routed_request_without_routers() -> None:
    made = core(torch.device("cpu"))
    with pytest.raises(QBEError, match="has no such routers: start it with the policy"):
        made.add(request("a", [1], routed_blueprint(made.table, 1)))


def test_models_whose_tokens_share_a_column_are_refused() -> None:
    model = tiny_llama()
    table = nest_model(model, "tiny", NestedWeightConfig(), progress=False)
    with pytest.raises(QBEError, match="tokens cannot have bits of their own"):
        Routing(model, Plan(table, 1, torch.device("cpu")), random_routers(table))


def test_blocks_follow_the_layers() -> None:
    table = nest_model(tiny_llama(), "tiny", NestedWeightConfig(), progress=False)
    blocks = blocks_of(table)
    assert [b.name.rpartition("layers.")[2] for b in blocks] == ["0.self_attn", "0.mlp", "1.self_attn", "1.mlp"]
    assert [s for b in blocks for s in b.sites] == list(range(14))
    assert [b.head for b in blocks_of(table, head=True)] == [False] * 4 + [True]
    assert blocks_of(table, head=True)[-1].sites == (14,)
    assert gear_bits(table) == (4, 6, 8)
    with pytest.raises(QBEError, match="no nested layers that a router could"):
        blocks_of(SiteTable(()))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 20), inputs=st.integers(1, 70), hidden=st.sampled_from([8, 32, 12]), sites=st.integers(1, 5),
    slices=st.integers(1, 4), dtype=st.sampled_from([torch.float32, torch.bfloat16]), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_the_compiled_op_is_the_one_in_torch(
    rows: int, inputs: int, hidden: int, sites: int, slices: int, dtype: torch.dtype, seed: int
) -> None:
    native.load()  # where there is a compiler; else both are the same
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shapes = ((inputs, hidden), (hidden,), (hidden, sites * slices), (sites * slices,))
    network = [drawn(*shape).float() for shape in shapes]
    thresholds = drawn(256).float() * 30
    gears = torch.arange(3, 4 + slices, dtype=torch.int32)
    sizes = torch.randint(1, 100, (sites,), generator=generator)
    dynamic_precision = torch.randint(0, 4 << 8, (24,), generator=generator, dtype=torch.int32)
    precision_words = torch.randint(0, 1 << 12, (sites, 24), generator=generator, dtype=torch.int32)
    spent = torch.randint(0, 9, (slices + 1, 24), generator=generator)
    x, first = drawn(1, rows, inputs).to(dtype), precision_words.clone()
    found = []
    for op in (torch.ops.qbe.route, torch.ops.qbe.route_python):
        w, s = precision_words.clone(), spent.clone()
        found.append((op(x, *network, thresholds, gears, sizes, dynamic_precision, w, s, 3), w, s[:, :rows]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    out, w, s = found[0]
    assert torch.equal(out, x)
    others = (dynamic_precision >> 8) != 3
    others[rows:] = True
    assert torch.equal(w[:, others], first[:, others])
    assert torch.equal(w >> 8, first >> 8), "the activations' bits stay"
    assert s.sum(0).tolist() == [0 if o else int(sizes.sum()) for o in others[:rows].tolist()]
