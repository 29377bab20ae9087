"""Shared reading: what the rows of a step read, in any mix, and that nobody reads less than was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cli_process import qbe
from conftest import tiny_llama
from engine_models import build, prompts, request, run
from qbe import Budget, Engine, QBEError, Request, SamplingParams
from qbe.blueprint import Blueprint, DynamicPrecision
from qbe.engine.core import Core
from qbe.engine.scheduling.scheduler import ScheduledTokens
from qbe.engine.scheduling.sequence import Sequence
from qbe.kernels.cuda.dispatch import UNIFORM_ROWS
from qbe.kernels.reference.activations import precision_word
from qbe.records import RecordStore
from qbe.sites import NESTABLE_ROLES, Role, Site, SiteTable
from qbe.store.nested_linears import NestedWeightConfig, nest
from qbe.store.nesting import nest_model, with_store
from qbe.store.plan import Plan
from qbe.store.shared_rows import SharedRows
from qbe.tagger import tag
from routing_samples import random_cascade, random_routers, routed_blueprint
from server_running import Running, running, tiny_engine

GEARS = (4, 6, 8, 16)
CPU = torch.device("cpu")
COST = {g: g * 2 + 3 for g in GEARS}
TABLE = SiteTable(
    (
        Site("a", Role.FFN_UP, 0, (4, 4), True, GEARS, COST),
        Site("norm", Role.NORM, 0, (4,)),
        Site("b", Role.FFN_DOWN, 0, (8, 4), True, GEARS, COST),
        Site("head", Role.OUTPUT_HEAD, None, (4, 4), True, GEARS, COST),
    ),
    layers=1,
)


def blueprints() -> st.SearchStrategy[Blueprint]:
    """Any of the table, some of them of dynamic precision."""
    bits = st.tuples(*[st.sampled_from(GEARS)] * 3)
    who = st.sampled_from([None, None, DynamicPrecision("routers", 7), DynamicPrecision("cascade", 9)])
    return st.builds(
        lambda b, a, d: replace(Blueprint.of("any", TABLE, b, TABLE.activations(a)), dynamic_precision=d),
        bits, st.sampled_from([8, 16]), who,
    )  # fmt: skip


def highest(rows: list[Blueprint], site: int) -> int:
    return max(b.weight_bits[site] for b in rows if b.dynamic_precision is None)


def expected_words(rows: list[Blueprint], row: Blueprint) -> list[int]:
    """Of one row beside these, site by site."""
    if row.dynamic_precision is not None:
        return [precision_word(w, a) for w, a in zip(row.weight_bits, row.activation_bits, strict=True)]
    return [precision_word(highest(rows, i), a) for i, a in enumerate(row.activation_bits)]


MIXES = st.lists(blueprints(), min_size=1, max_size=6)


@settings(deadline=None, max_examples=100)
@given(st.lists(MIXES, min_size=1, max_size=4), st.data())
def test_words_of_any_mix(steps: list[list[Blueprint]], data: st.DataObject) -> None:
    """Of steps with prompts, whose kept rows are some of the tokens, and of decode steps, one after the other."""
    plan = Plan(TABLE, 24, CPU, shared=True)
    for step in steps:
        counts = [data.draw(st.integers(1, 4)) for _ in step]
        kept = data.draw(st.lists(st.sampled_from(step), max_size=4))
        plan.write(list(zip(step, counts, strict=True)), kept)
        tokens = [b for b, n in zip(step, counts, strict=True) for _ in range(n)]
        for i, row in enumerate(tokens):
            assert plan.precision_words[:2, i].tolist() == expected_words(step, row)[:2]
            assert plan.dynamic_precision[i] == (0 if row.dynamic_precision is None else row.dynamic_precision.code)
        for i, row in enumerate(kept):
            assert plan.precision_words[2, i] == expected_words(step, row)[2]
        columns = plan.columns(step)
        plan.gather(torch.tensor(columns + columns[-1:] * 2))  # two rows pad a graph
        for i, row in enumerate([*step, step[-1], step[-1]]):
            assert plan.precision_words[:, i].tolist() == expected_words(step, row)
        plan.forget()


@settings(deadline=None, max_examples=50)
@given(MIXES)
def test_what_it_costs_is_what_is_read(rows: list[Blueprint]) -> None:
    read = SharedRows(TABLE).of(rows)
    for row in rows:
        found = read[row.linear_key]
        assert found.bits == pytest.approx(
            found.blueprint.average_weight_bits(TABLE) - row.average_weight_bits(TABLE), abs=1e-12
        )
        assert found.nbytes == found.blueprint.bytes_per_token(TABLE) - row.bytes_per_token(TABLE) >= 0
        assert found.bits >= 0


def test_more_mixes_than_are_remembered() -> None:
    shared = SharedRows(TABLE)
    every = [Blueprint.of("x", TABLE, (a, b, c)) for a in GEARS for b in GEARS for c in GEARS]
    for one in every:
        for other in every[:8]:
            raised = shared.of([one, other])[one.linear_key].blueprint.weight_bits
            assert raised == tuple(map(max, zip(one.weight_bits, other.weight_bits, strict=True)))
    assert len(shared._known) <= 256


@pytest.mark.parametrize("shared", [False, True])
def test_long_steps_of_a_mix_are_uniform(shared: bool) -> None:
    """Prompts of several requests then take the kernel of one precision, unless somebody's precision is dynamic."""
    plan = Plan(TABLE, UNIFORM_ROWS * 2, CPU, shared=shared)
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    plan._weights = weights  # type: ignore[assignment]
    low, high = (Blueprint.of("x", TABLE, bits, TABLE.activations(a)) for bits, a in (((4, 8, 4), 8), ((6, 4, 4), 16)))
    plan.write([(low, UNIFORM_ROWS), (high, 3)], [low, high])
    assert [w.uniform for w in weights] == ([6, 8, 4] if shared else [None, None, 4])  # type: ignore[attr-defined]
    plan.write([(low, UNIFORM_ROWS)], [low])
    assert [w.uniform for w in weights] == [precision_word(4, 8), precision_word(8, 8), 4]  # type: ignore[attr-defined]
    plan.write([(low, UNIFORM_ROWS), (replace(high, dynamic_precision=DynamicPrecision("routers")), 1)], [low])
    assert [w.uniform for w in weights] == [None] * 3  # type: ignore[attr-defined]


def core_of(shared: bool, **options: Any) -> Core:
    model = build("llama")
    sites = tag(model)
    nest(model, [s.name for s in sites if s.is_linear and s.role in NESTABLE_ROLES])
    table = with_store(sites, model)
    if options.pop("cascade", False):
        options["cascade"] = random_cascade(table)
    return Core(model, table, shared_rows=shared, **{"max_sequences": 5, "kv_tokens": 4096, **options})


def at(core: Core, *bits: int, by: str | None = None) -> Blueprint:
    """Sites with these bits in turn."""
    every = [bits[i % len(bits)] for i in range(len(core.table.nested))]
    made = Blueprint.of("b", core.table, every)
    return made if by is None else replace(made, dynamic_precision=DynamicPrecision(by, 128))


def watched(core: Core) -> list[int]:
    """Checks the words of every step after it has run; counts the steps that mixed, drafted and had dynamic rows."""
    seen, plain = [0, 0, 0], core.runner.step

    def step(work: list[ScheduledTokens]) -> Any:
        rows = [
            b for w in work for b, n in ([(w.draft, 1)] if w.draft else w.sequence.rows(w.start, w.count))
            for _ in range(n)
        ]  # fmt: skip
        found = plain(work)
        words = core.plan.precision_words[:, : len(rows)].T.tolist()
        heads = [i for i, s in enumerate(core.table.nested) if s.role is Role.OUTPUT_HEAD]
        kept_alone = not all(w.count == 1 for w in work)
        for row, word in zip(rows, words, strict=True):
            if row.dynamic_precision is not None:
                continue  # what moved it is looked at elsewhere
            for i, owed in enumerate(row.weight_bits):
                if not (kept_alone and i in heads):  # a head's rows are others then
                    assert owed <= word[i] & 255 == highest(rows, i)
        seen[0] += len({b.weight_bits for b in rows}) > 1
        seen[1] += any(w.draft for w in work)
        seen[2] += any(b.dynamic_precision for b in rows)
        return found

    core.runner.step = step  # type: ignore[method-assign]
    return seen


def answers(core: Core, *which: int, tokens: int = 24, **params: Any) -> list[Sequence]:
    """Of requests that come one after the other, long prompts among them."""
    every = [at(core, 4), at(core, 6, 4), at(core, 8), at(core, 4, 16, 6), at(core, 6, by="cascade")]
    texts = prompts(20, 61, 7, 90, 33)
    asked = [request(str(i), texts[i], every[i], max_tokens=tokens + 5 * i, **params) for i in which]
    for r in asked:
        core.add(r)
        core.step()
        core.step()
    run(core)
    return asked


@pytest.mark.parametrize("options", [{}, {"speculate": True}, {"cascade": True}])
def test_nobody_reads_less_than_was_asked_for(options: dict[str, Any]) -> None:
    core = core_of(True, max_batch_tokens=64, **options)
    seen = watched(core)
    which = range(5 if "cascade" in options else 4)
    found = answers(core, *which, **({"speculate": True} if "speculate" in options else {}))
    assert all(s.finish_reason == "length" for s in found)
    assert seen[0] > 10
    assert bool(seen[1]) == ("speculate" in options)
    assert bool(seen[2]) == ("cascade" in options)
    assert found[0].shared_reads.average_bits > 0
    assert found[0].shared_reads.nbytes > 0
    if "cascade" in options:  # what is kept of a cascaded answer is what was chosen for it, not what others read
        assert {b for m in found[4].cascade.moves for b in m.bits} == {4, 6, 8}


def test_nor_in_compiled_steps() -> None:
    model = tiny_llama()
    table = nest_model(model, "tiny", NestedWeightConfig(), progress=False)
    core = Core(model, table, max_sequences=2, kv_tokens=1024, shared_rows=True)
    assert core.runner.decode is not None
    assert core.runner.decode.compile(2)
    seen = watched(core)
    low, high = (request(str(b), prompts(20)[0], at(core, b), max_tokens=8) for b in (4, 8))
    run(core, low, high)
    assert seen[0] > 5
    assert low.output_ids == high.output_ids


def test_routed_rows_are_raised_by_nobody() -> None:
    model = tiny_llama()
    table = nest_model(model, "tiny", NestedWeightConfig(), progress=False)
    core = Core(model, table, routers=random_routers(table), max_sequences=3, kv_tokens=2048, shared_rows=True)
    every = {"r": routed_blueprint(table, 128), "low": at(core, 4), "high": at(core, 8)}
    routed, low, high = (request(name, prompts(12)[0], b, max_tokens=8) for name, b in every.items())
    seen: set[int] = set()
    for r in (routed, low, high):
        core.add(r)
    while core.has_work():
        core.step()
        if min(len(s.output_ids) for s in (routed, low, high)) > 1 and core.scheduler.running:
            words = core.plan.precision_words[:, :3] & 255
            seen |= set(words[:, 0].tolist())
            assert set(words[:, 1:].flatten().tolist()) == {8}
    assert seen == {4, 6, 8}
    assert routed.shared_reads.bits == high.shared_reads.bits == 0 < low.shared_reads.average_bits <= 4


@pytest.mark.parametrize("options", [{}, {"speculate": True}, {"cascade": True, "speculate": True}])
def test_somebody_alone_has_the_answers_of_exact(options: dict[str, Any]) -> None:
    (exact,), (shared,) = (
        answers(core_of(s, **options), 4 if "cascade" in options else 3, **({"speculate": True} if options else {}))
        for s in (False, True)
    )
    assert shared.output_ids == exact.output_ids
    assert shared.cascade.moves == exact.cascade.moves
    assert shared.shared_reads.bits == 0 < shared.shared_reads.tokens


def test_a_mix_is_answered_as_all_at_the_highest() -> None:
    """From the first token to the last the rows are together, so each reads what all do."""

    def found(shared: bool, *bits: int) -> list[list[int]]:
        core = core_of(shared)
        texts = prompts(20, 61, 7)
        return run(core, *(request(str(b), t, at(core, b), max_tokens=20) for b, t in zip(bits, texts, strict=True)))

    mixed = found(True, 4, 6, 8)
    core = core_of(False)
    at_eight = run(core, *(request(str(i), t, at(core, 8), max_tokens=20) for i, t in enumerate(prompts(20, 61, 7))))
    assert mixed == at_eight
    assert mixed != found(False, 4, 6, 8)


def test_pages_belong_to_what_was_asked_for() -> None:
    """A prompt that was read higher is found by whoever asks for as much, and by nobody with another blueprint."""
    core = core_of(True)
    (text,) = prompts(130)
    run(core, request("low", text, at(core, 4), max_tokens=2), request("high", text[::-1], at(core, 8), max_tokens=2))
    again = request("again", text, at(core, 4), max_tokens=2)
    higher = request("higher", text, at(core, 8), max_tokens=2)
    run(core, again, higher)
    assert again.paging.cached == 128
    assert higher.paging.cached == 0


def test_where_there_is_nothing_to_share_it_says_so() -> None:
    model = build("phi3-longrope")
    with pytest.warns(RuntimeWarning, match="^rows does nothing here, .*: each reads its own bits$"):
        core = Core(model, tag(model), shared_rows=True)
    assert core.plan.shared is None


def test_results_and_records_say_what_was_asked_and_read(tmp_path: Path) -> None:
    file = tmp_path / "records.sqlite"
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with tiny_engine(rows="shared", records=file) as engine:
        low, high = engine.generate_batch([Request("ab", params, Budget(bits=b)) for b in (4, 8)])
    assert (low.average_weight_bits, low.read_weight_bits) == (4, 8) == (4, high.read_weight_bits)
    assert low.describe()["usage"]["read_weight_bits"] == 8
    of = {r.id: r for r in RecordStore(file).list()}
    assert (of[low.id].average_weight_bits, of[low.id].read_weight_bits) == (4, 8)
    assert of[low.id].bytes_moved == of[high.id].bytes_moved == 8 * high.bytes_per_token
    with tiny_engine(records=tmp_path / "exact.sqlite") as engine:
        exact, _ = engine.generate_batch([Request("ab", params, Budget(bits=b)) for b in (4, 8)])
    assert exact.read_weight_bits == exact.average_weight_bits == 4
    (record,) = [r for r in RecordStore(tmp_path / "exact.sqlite").list() if r.id == exact.id]
    assert record.bytes_moved == 8 * exact.bytes_per_token


def test_another_word_is_refused() -> None:
    with pytest.raises(QBEError, match="rows is 'both', but must be exact or shared"):
        Engine("no-such-model", rows="both")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    config = tmp_path_factory.mktemp("config") / "serve.toml"
    config.write_text("[prices]\noutput = 1.0\n")
    with running(lambda: tiny_engine(rows="shared"), config) as found:
        yield found


def test_usage_shows_both_and_charges_for_what_was_asked(server: Running) -> None:
    def ask(bits: float, **more: Any) -> dict[str, Any]:
        body = {"prompt": "ab", "max_tokens": 8, "ignore_eos": True, "qbe": {"bits": bits}} | more
        answer = server.post("completions", body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["usage"])

    alone = ask(4)
    assert alone["qbe"]["average_weight_bits"] == alone["qbe"]["read_weight_bits"] == 4
    before = server.metric("qbe:read_weight_bits_sum")
    long = server.http.stream(
        "POST", "/v1/completions",
        json={"prompt": "cd", "max_tokens": 2000, "ignore_eos": True, "stream": True, "qbe": {"bits": 8}},
    )  # fmt: skip
    with long as stream:
        lines = stream.iter_lines()
        next(lines)  # it is in the batch
        beside = ask(4)
    assert beside["qbe"]["average_weight_bits"] == 4
    assert beside["qbe"]["read_weight_bits"] == 8
    assert beside["cost"] == alone["cost"]
    assert server.metric("qbe:read_weight_bits_sum") - before >= 8


def test_the_command_refuses_another_word(home: Path, tmp_path: Path) -> None:
    done = qbe("serve", "--rows", "both", "--port", "0", home=home)
    assert done.returncode == 2
    assert b"rows is 'both', but must be exact or shared" in done.stderr
    settings_file = tmp_path / "serve.toml"
    settings_file.write_text('[weights]\nrows = "both"\n')
    done = qbe("serve", "--config", str(settings_file), home=home)
    assert done.returncode == 2
    assert b"weights.rows" in done.stderr
    assert b"'exact' or 'shared'" in done.stderr
