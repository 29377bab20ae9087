"""The cascade in the engine: what is moved, what is kept of it, and that nothing else changes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_models import build, prompts, request, run
from qbe.blueprint import Blueprint, DynamicPrecision
from qbe.compile.backend import register
from qbe.engine.core import Core
from qbe.engine.execution.captured import Kind
from qbe.engine.scheduling.sequence import Sequence
from qbe.engine.scheduling.sequence_state import Move
from qbe.errors import QBEError
from qbe.kvcache.attention import step as step_of
from qbe.policies.cascade import POINTS, blocks_of, dynamic_precision, level_of, load, points_of
from qbe.policies.learned import path_of
from qbe.policies.per_token import LEVELS, TokenRouters
from qbe.sites import NESTABLE_ROLES, Role, Site, SiteTable
from qbe.store.nested_linears import nest
from qbe.store.nesting import with_store
from qbe.tagger import tag
from routing_samples import keep_cascade, random_cascade

TOKENS = 120


def core_of(device: torch.device | str = "cpu", seed: int | None = 0, **sizes: Any) -> Core:
    model = build("llama").to(device)
    sites = tag(model)
    nest(model, [s.name for s in sites if s.is_linear and s.role in NESTABLE_ROLES])
    table = with_store(sites, model)
    cascade = None if seed is None else random_cascade(table, seed)
    return Core(model, table, cascade=cascade,
                **{"max_sequences": 4, "kv_tokens": 2048, "speculate": True, **sizes})  # fmt: skip


def at(core: Core, bits: int = 6, kv: int = 16, cascaded: bool = True) -> Blueprint:
    plain = Blueprint.of("b", core.table, (bits,) * len(core.table.nested), kv_bits=(kv,) * core.table.layers)
    return replace(plain, dynamic_precision=DynamicPrecision("cascade", 128)) if cascaded else plain


def asked(core: Core, name: str, prompt: list[int], tokens: int = TOKENS, kv: int = 16, **params: Any) -> Sequence:
    return request(name, prompt, at(core, kv=kv), max_tokens=tokens, **params)


def test_rows_are_moved_within_the_pass_and_the_next_one_begins_anew(device: torch.device) -> None:
    """What the linear layers read in a step is what the sequence says of the token, layer by layer."""
    core = core_of(device)
    one, other = asked(core, "a", prompts(20)[0]), request("b", prompts(9)[0], at(core, 6, cascaded=False))
    for s in (one, other):
        core.add(s)
    seen: list[tuple[int, tuple[int, ...]]] = []
    while one.finish_reason is None:
        core.step()
        position = len(one.token_ids) - 2  # whose step has run
        if position >= 20 and other.finish_reason is None:
            precision_words = (core.plan.precision_words[:, :2] & 255).cpu()
            seen.append((position, tuple(precision_words[:, 0].tolist())))
            assert precision_words[:, 1].tolist() == [6] * len(core.table.nested)
    assert len(seen) > 50
    for position, bits in seen:
        assert one.blueprint_at(position).weight_bits == bits
        assert one.blueprint_at(position).dynamic_precision is None
    moved = {bits for _, bits in seen}
    assert {4, 6, 8} == {b for bits in moved for b in bits}  # up, down, and neither
    for bits in moved:
        for site, b in zip(core.table.nested, bits, strict=True):
            assert b == 6 or (site.layer is not None and site.layer > 0)
    assert one.blueprint_at(19) == at(core, cascaded=False)
    assert other.cascade.moves == []


def test_nobody_else_changes_what_is_moved(device: torch.device) -> None:
    """Company, preemption, speculation and pages of fewer bits leave an answer and its moves as they are."""

    def answers(core: Core, *which: int, **params: Any) -> list[tuple[list[int], list[Move]]]:
        every = [asked(core, str(i), p, kv=8, **params) for i, p in enumerate(prompts(30, 33, 7))]
        others = [request("plain", prompts(40)[0], at(core, 4, cascaded=False), max_tokens=TOKENS)] * (len(which) > 1)
        run(core, *(every[i] for i in which), *others)
        for i in which:
            assert len(every[i].cascade.moves) == TOKENS - 1 == every[i].computed - len(every[i].prompt_ids)
            assert (every[i].preemptions > 0) <= (core.scheduler.allocator.num_pages < 8)
        return [(every[i].output_ids, every[i].cascade.moves) for i in which]

    together = answers(core_of(device), 0, 1, 2)
    assert len({m for _, moves in together for m in moves}) > 4
    if device.type == "cuda":
        return  # its sums depend on how many rows there are, and a threshold may lie between two of them
    assert [answers(core_of(), i)[0] for i in range(3)] == together
    few = core_of(kv_tokens=64 * 6, max_batch_tokens=64)
    assert answers(few, 0, 1, 2) == together
    assert few.scheduler.preempted > 0
    assert answers(core_of(), 0, 1, 2, speculate=True, logit_bias=None) == together


def test_a_compiled_step_moves_as_one_that_is_not(device: torch.device) -> None:
    """On a GPU the steps of cascaded rows are compiled and captured beside those of others, before anyone asks."""

    def answer(compile: bool) -> Sequence:
        core = core_of(device, max_sequences=1, speculate=False)
        decode = core.runner.decode
        assert decode is not None
        if compile:
            core.runner.compile_steps(progress=False)
        ready = decode.captures
        s = asked(core, "s", prompts(20)[0], 60)
        run(core, s)
        assert decode.captures == ready + (device.type == "cuda" and not compile)
        if compile and device.type == "cuda":
            assert {k for k in decode._graphs if k.size == 1} == {Kind(1), Kind(1, cascaded=True)}
            assert decode._graphs[Kind(1, cascaded=True)].forward != decode._run_model
        return s

    plain, compiled = answer(False), answer(True)
    assert len({m.bits for m in compiled.cascade.moves}) > 4
    assert compiled.output_ids == plain.output_ids
    assert compiled.cascade.moves == plain.cascade.moves


def test_each_kind_of_step_is_compiled_for_itself() -> None:
    """As a GPU captures them, one after the other: none is refused, and the second is not the first one's code."""
    core = core_of(max_sequences=2, speculate=False)
    decode, s = core.runner.decode, asked(core, "s", prompts(20)[0], 60)
    assert decode is not None
    register()
    core.add(s)
    core.step()
    decode._stage(core.scheduler.schedule(), 1)
    for kind in (Kind(1), Kind(1, cascaded=True), Kind(1, several=True), Kind(1)):
        compiled = decode._compiled_forward()
        assert core.cascade is not None
        core.cascade._seen.fill_(-1)
        with torch.inference_mode(), step_of(decode._layout(kind)):
            compiled(1)
        assert (float(core.cascade._seen[0, 0]) != -1) is kind.cascaded


def test_draft_tokens_are_checked_at_what_their_own_steps_would_have_had() -> None:
    """Text of few different tokens, in which prompt lookup drafts well."""
    from test_speculation import READ

    def answer(speculate: bool) -> Sequence:
        core = core_of()
        assert core.speculator is not None
        core.speculator.costs = READ
        s = asked(core, "s", prompts(20)[0], 200, speculate=speculate, logit_bias=dict.fromkeys((5, 9, 11), 40.0))
        run(core, s)
        return s

    plain, drafted = answer(False), answer(True)
    assert drafted.speculation is not None
    assert drafted.speculation.accepted > 20
    assert drafted.output_ids == plain.output_ids
    assert drafted.cascade.moves == plain.cascade.moves
    assert drafted.blueprint_history == plain.blueprint_history


def test_a_refresh_and_a_bound_keep_the_dynamic_precision() -> None:
    core = core_of()
    s = asked(core, "s", prompts(20)[0], kv=8)
    bits = tuple(4 + 4 * (i % 2) for i in range(len(core.table.nested)))
    other = replace(at(core, 6, 8, cascaded=False), weight_bits=bits)
    s.blueprint = replace(s.blueprint, kv_error=0.05)
    core.add(s)
    while s.finish_reason is None:
        core.step()
        if len(s.output_ids) == 50:
            assert core.refresh(s, other)
            assert not core.refresh(s, other)
    assert s.error is None
    assert len(s.cascade.moves) == TOKENS - 1
    assert s.bounded.pages_read > 0
    assert s.blueprint.dynamic_precision is not None
    assert s.blueprint.kv_error == 0.05
    spans = s.spans(s.paging.cached, s.computed)
    assert sum(n for _, n in spans) == s.computed
    assert all(b.dynamic_precision is None for b, _ in spans)
    average = other.average_weight_bits(core.table)
    own = [average if p >= 69 else 6 for p in range(20, 20 + len(s.cascade.moves))]
    had = [s.blueprint_at(p).average_weight_bits(core.table) for p in range(20, 20 + len(s.cascade.moves))]
    assert s.cascade.excess == pytest.approx(sum(had) - sum(own))


def test_a_refresh_beyond_what_routers_can_give_is_not_moved_until_the_next_one() -> None:
    core = core_of()
    s = asked(core, "s", prompts(20)[0])
    core.add(s)
    while s.finish_reason is None:
        core.step()
        for tokens, bits in ((30, 16), (80, 6)):
            if len(s.output_ids) == tokens:
                assert core.refresh(s, at(core, bits, cascaded=False))
                assert (s.blueprint.dynamic_precision is None) == (bits == 16)
    assert len(s.cascade.moves) == TOKENS - 1
    assert all(set(m.bits) == {16} and m.shift == 0 for m in s.cascade.moves[30:78])
    assert len({m.bits for m in s.cascade.moves[80:]}) > 2


def test_the_average_stays_where_it_was() -> None:
    """Levels follow what a page had too much: an answer whose tokens all look hard comes back to its average."""
    core = core_of()
    assert core.cascade is not None
    for *_, outer_bias in core.cascade._networks:
        outer_bias[::2] += 6.0  # what the second slice of each site is worth
    s = asked(core, "s", prompts(12)[0], 230)
    run(core, s)
    shifts = [0.0] * 12 + [m.shift for m in s.cascade.moves]
    page = [sum(shifts[i : min(i + 64, 241)]) / 64 for i in range(0, 241, 64)]
    assert page[0] > 0.3
    assert page == sorted(page, reverse=True)
    assert abs(page[-1]) < page[0] / 4
    levels = [
        b.dynamic_precision.level
        for b in (*(b for _, b in s.blueprint_history.earlier), s.blueprint)
        if b.dynamic_precision is not None
    ]
    assert levels[0] > min(levels)
    assert s.cascade.excess == pytest.approx(sum(m.shift for m in s.cascade.moves))


def test_points_and_the_sites_behind_them() -> None:
    core = core_of()
    table, cascade = core.table, core.cascade
    assert cascade is not None
    assert points_of(table) == (0, 1, 2)
    for point, block in zip(points_of(table), blocks_of(table), strict=True):
        assert [table.nested[s].layer for s in block.sites] == [point + 1] * 7
        assert block.name == f"model.layers.{point + 1}.self_attn"
    head = next(i for i, s in enumerate(table.nested) if s.role is Role.OUTPUT_HEAD)
    assert all(head not in b.sites for b in blocks_of(table))
    deep = SiteTable(tuple(
        Site(f"layers.{i}.{name}.{role.value}", role, i, (8, 8), True, (4, 6, 8, 16))
        for i in range(35) for name, role in (("attn", Role.ATTENTION_QKV), ("mlp", Role.FFN_DOWN))
    ), layers=35)  # fmt: skip
    assert points_of(deep) == tuple(range(0, 34, 4))
    assert len(points_of(deep)) <= POINTS
    assert [len(b.sites) for b in blocks_of(deep)] == [8] * 8 + [4]
    assert points_of(SiteTable(())) == ()
    assert blocks_of(SiteTable(())) == ()


def test_a_level_is_an_average() -> None:
    """Of all sites: those without a router have what the blueprint says."""
    core = core_of()
    sites, routers = core.table, random_cascade(core.table)
    routed = {s for b in routers.blocks for s in b.sites}
    for bits in (4, 6, 8, 16):
        found = dynamic_precision(routers, sites, (bits,) * len(sites.nested))
        assert (found is None) == (bits != 6)
    mixed = tuple(6 if i in routed else 8 for i in range(len(sites.nested)))
    average = Blueprint.of("b", sites, mixed).average_weight_bits(sites)
    assert level_of(routers, sites, mixed, average) == pytest.approx((LEVELS - 1) / 2)
    found = [dynamic_precision(routers, sites, mixed, excess, 64) for excess in (-999.0, -9.0, 0.0, 9.0, 999.0)]
    levels = [f.level for f in found if f is not None]
    assert levels == sorted(levels, reverse=True)
    assert len(set(levels)) == 5
    assert (levels[0], levels[-1]) == (LEVELS - 1, 0)


def test_models_that_run_one_sequence_a_pass_do_without() -> None:
    model = build("jamba")
    sites = tag(model)
    nest(model, [s.name for s in sites if s.is_linear and s.role in NESTABLE_ROLES])
    table = with_store(sites, model)
    core = Core(model, table, cascade=random_cascade(table))
    s = asked(core, "s", prompts(9)[0], 5)
    run(core, s)
    assert core.cascade is None
    assert s.blueprint.dynamic_precision is None
    assert s.cascade.moves == []


def test_routers_are_kept_for_the_store_that_they_were_learned_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QBE_CACHE", str(tmp_path))
    sites = replace(core_of(seed=None).table, model_name="org/tiny")
    with pytest.raises(QBEError, match=r"not been trained for org/tiny.*qbe train cascade"):
        load(sites)
    made, path = random_cascade(sites), keep_cascade(sites)
    assert path == path_of("cascade", sites)
    found = load(sites)
    assert isinstance(found, TokenRouters)
    assert (found.blocks, found.widths) == (made.blocks, made.widths)
    with pytest.raises(QBEError, match=r"another store.*qbe train cascade"):
        load(sites.with_sensitivity({sites.nested[0].name: {4: 0.5}}))
    path.write_text("{")
    with pytest.raises(QBEError, match=r"damaged.*qbe train cascade"):
        load(sites)
