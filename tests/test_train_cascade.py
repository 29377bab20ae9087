"""`qbe train cascade`: that it learns from what the engine's attention really shows, and what a request finds of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qbe
from cli_process import qbe as command
from conftest import byte_tokenizer, tiny_llama
from engine_models import build
from qbe.budget import Budget
from qbe.datasets.items import Form, Item
from qbe.engine.result import Request
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.kernels.ops.routing import worths_of
from qbe.kernels.reference.cascade import cascade as reference
from qbe.learning import cascade as learning
from qbe.learning import distil
from qbe.learning.cascade import attention_of, drawn, entropies, of_answers, train
from qbe.learning.distil import sliced
from qbe.learning.gates import Gates, begin
from qbe.policies import learned
from qbe.policies.cascade import blocks_of, load, points_of
from qbe.store.prepare import PreparedModel, prepare, prepare_in_memory

CPU = torch.device("cpu")


def items(n: int) -> list[Item]:
    return [Item("text", str(i), Form(f"prompt number {i}", f"and what follows {i * i}")) for i in range(n)]


def loaded(folder: Path) -> PreparedModel:
    return prepare(folder, dtype="float32", device=CPU, progress=False)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("QBE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_training_sees_what_the_engine_shows(home: Path) -> None:
    """The entropies of every step of an answer, as the cascade's op hears of them, and those of the text at once."""
    heard: dict[tuple[int, int], torch.Tensor] = {}
    model = tiny_llama(num_hidden_layers=4)
    with qbe.Engine(tiny_llama(num_hidden_layers=4), tokenizer=byte_tokenizer(), policy="uniform", device="cpu",
                    records=False) as engine:  # fmt: skip
        points, modules = points_of(engine.table), attention_of(engine.table, points_of(engine.table))
        assert modules == [f"model.layers.{p}.self_attn" for p in points]

        def observe(layer: int, attended: Any, entropy: Any, lengths: Any, _rows: Any) -> Any:
            for of_heads, length in zip(entropy.clone(), lengths.tolist(), strict=True):
                heard[layer, length] = of_heads
            return attended

        engine.core.runner.observe, engine.core.runner.decode = observe, None
        key = engine.submit(Request("a b c d e", SamplingParams(max_tokens=40, ignore_eos=True), Budget(bits=16)))
        text = engine.sequence(key)
        while not engine.finished(key):
            engine.step()
        ids = text.token_ids
    with entropies(model, modules) as seen, torch.no_grad():
        model(input_ids=torch.tensor([ids]))
        for number, layer in enumerate(points):
            for length in (len(text.prompt_ids) + 1, 30, len(ids) - 1):
                share = seen[number][0, length - 1]
                assert torch.allclose(share * np.log(length), heard[layer, length], atol=2e-3)
    assert model.config._attn_implementation != "eager"
    assert not any(m._forward_hooks for m in model.modules())


def test_only_an_answers_tokens_are_routed(tiny_folder: Path, home: Path) -> None:
    """A prompt's have what routers begin with, whatever they have learned since."""
    prepared = loaded(tiny_folder)
    table, blocks = prepared.table, blocks_of(prepared.table)
    texts = [([1, 2, 3, 4], [5, 6, 7]), ([1, 2], [3, 4, 5, 6, 7, 8])]
    batch = of_answers(distil.batched(texts, CPU)[0])
    assert batch.routed.sum(1).tolist() == [3, 6] == batch.predicted.sum(1).tolist()
    with sliced(prepared, blocks) as student:
        routers = distil.RouterNetworks([4] * len(blocks), [begin(table, b.sites) for b in blocks], 8, seed=0)
        gates = Gates(table, student, routers, lambda _block, x: x[..., :4])
        for name, parameter in routers.named_parameters():
            if name.startswith("outer"):
                parameter.data.normal_(std=5)
        gates.hard = True
        still = torch.cat([worths_of(torch.tensor(begin(table, [s]))[None])[0] for b in blocks for s in b.sites])
        gates.threshold = still.median().float() + 1e-3
        gates.divergence(batch, student.teacher(batch.tokens, batch.predicted))
        over = (still > gates.threshold).float().view(-1, len(prepared.table.gears()) - 2)
        moved = 0
        for site, expected in zip((s for b in blocks for s in b.sites), over, strict=True):
            found = student.gates[site]
            assert found is not None
            assert bool((found[~batch.routed] == expected).all())
            moved += int((found[batch.routed] != expected).sum())
        assert moved > 50
        assert gates.seen().shape == (9, still.numel())


def test_answers_are_drawn_with_a_seed(tiny_folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = loaded(tiny_folder)
    before = torch.random.get_rng_state()
    one, again, other = (drawn(prepared, seed, items(5)) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one[0].tokens, again[0].tokens)
    assert not torch.equal(one[0].tokens[:, :40], other[0].tokens[:, :40])
    lengths = one[0].routed.sum(1)
    assert lengths.max() <= learning.ANSWER
    monkeypatch.setattr(learning, "ANSWER", 8)
    short = drawn(prepared, 0, items(5))
    assert short[0].routed.sum(1).max() <= 8
    assert not (short[0].routed & short[0].prompt).any()


@pytest.fixture(scope="module")
def trained(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Where what was learned lies, and the model."""
    where = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QBE_CACHE", str(where))
        patch.setattr(distil, "RATE", 0.1)
        prepared, ticks = loaded(tiny_folder), list[int]()
        found = train(prepared, items(16), 6, 0, lambda: ticks.append(1))
        assert len(ticks) == 6
        assert {"before", "after", "loss", "parameters"} <= found.about.keys()
        learned.write("cascade", prepared.table, found)
    return where, tiny_folder


def test_networks_read_entropies_as_they_are(trained: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is served of a text in the training's own arithmetic, and what the op makes of the same entropies."""
    monkeypatch.setenv("QBE_CACHE", str(trained[0]))
    prepared = loaded(trained[1])
    table, routers = prepared.table, load(prepared.table)
    points, ids = points_of(table), prepared.tokenizer("some other text")["input_ids"]
    with entropies(prepared.model, attention_of(table, points)) as seen, torch.no_grad():
        prepared.model(input_ids=torch.tensor([ids]))
    n, heads = len(ids), seen[0].shape[-1]
    assert [len(x.inner) for x in routers.networks] == [heads * (p + 1) for p in range(len(points))]
    precision_words, kept = torch.zeros(len(table.nested), n, dtype=torch.int32), torch.zeros(n, len(points) * heads)
    lengths = torch.arange(1, n + 1)
    dynamic_precision = torch.full((n,), 1 << 8 | 128, dtype=torch.int32)
    for point, (block, network) in enumerate(zip(routers.blocks, routers.networks, strict=True)):
        reference(
            torch.zeros(n, 1, 1), seen[point][0] * lengths.clamp(min=2).log()[:, None], lengths, None, kept,
            *map(torch.from_numpy, vars(network).values()), torch.from_numpy(routers.thresholds),
            torch.tensor(routers.widths, dtype=torch.int32), dynamic_precision,
            precision_words[block.sites[0] : block.sites[-1] + 1], point,
        )  # fmt: skip
        x = torch.cat([s[0] for s in seen[: point + 1]], -1)
        assert torch.allclose(kept[:, : (point + 1) * heads], x, atol=1e-5)
        scores = network.scores(x.numpy()).reshape(n, len(block.sites), -1)
        worth = np.concatenate([scores[..., :1], scores[..., :1] - np.logaddexp(0, scores[..., 1:]).cumsum(-1)], -1)
        bits = np.array(routers.widths)[(worth > routers.thresholds[128]).sum(-1)]
        assert (precision_words[list(block.sites)].numpy() == bits.T).mean() > 0.99


def test_an_engine_serves_it_and_the_average_is_kept(
    trained: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QBE_CACHE", str(trained[0]))
    with qbe.Engine(trained[1], policy="uniform", device="cpu", dtype="float32", records=False) as engine:
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        result = engine.generate("a b c", params, budget=Budget(bits=6, cascade=True))
        assert result.raised_tokens + result.lowered_tokens > 0
        assert result.average_weight_bits == pytest.approx(6, abs=0.5)
        assert engine.generate("a b c", params, budget=Budget(bits=6)).raised_tokens == 0
        for bits in (4, 16):
            with pytest.raises(qbe.QBEError, match=f"nothing to move at {bits} bits.*between 4 and 8"):
                engine.explain("a b c", budget=Budget(bits=bits, cascade=True))


def test_without_it_a_request_is_refused(home: Path) -> None:
    with qbe.Engine(tiny_llama(), tokenizer=byte_tokenizer(), policy="static", device="cpu", records=False) as engine:
        assert engine.generate("text", SamplingParams(max_tokens=2, ignore_eos=True)).finish_reason == "length"
        with pytest.raises(qbe.QBEError, match=r"has not been trained for.*qbe train cascade"):
            engine.generate("text", budget=Budget(cascade=True))


def test_only_those_who_ask_for_a_cascade_miss_a_damaged_file(
    trained: tuple[Path, Path], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned.ready()
    learned.path_of("cascade", loaded(trained[1]).table).write_text("{")
    with qbe.Engine(trained[1], policy="uniform", device="cpu", records=False) as other:
        assert other.generate("text", SamplingParams(max_tokens=2, ignore_eos=True)).finish_reason == "length"
        with pytest.raises(qbe.QBEError, match=r"is damaged.*qbe train cascade"):
            other.generate("text", budget=Budget(bits=6, cascade=True))


def test_models_that_can_have_none_are_told_before_the_work(home: Path) -> None:
    """In training, and to a request, which is not sent to train one."""
    engine = qbe.Engine(tiny_llama(num_hidden_layers=1), tokenizer=byte_tokenizer(), policy="uniform", device="cpu",
                        records=False)  # fmt: skip
    with engine, pytest.raises(qbe.QBEError, match=r"no attention with nested layers behind it.*leave it out"):
        engine.generate("text", budget=Budget(bits=6, cascade=True))
    shallow = prepare_in_memory(tiny_llama(num_hidden_layers=1), byte_tokenizer(), device=CPU, progress=False)
    stateful = replace(shallow, model=build("jamba"))
    for prepared, what in ((shallow, "no attention with nested layers"), (stateful, "its layers keep a state")):
        with pytest.raises(qbe.QBEError, match=what):
            train(prepared, items(16), 1)


def test_answers_stay_within_the_context(home: Path) -> None:
    short = tiny_llama(num_hidden_layers=2, max_position_embeddings=40)
    prepared = prepare_in_memory(short, byte_tokenizer(), device=CPU, progress=False)
    for batch in drawn(prepared, 0, items(9)):
        assert batch.tokens.shape[1] <= 40
        assert batch.prompt.sum(1).max() <= 20


def test_attention_that_does_not_show_its_weights_is_told(trained: tuple[Path, Path], home: Path) -> None:
    prepared = loaded(trained[1])
    attention = prepared.model.model.layers[0].self_attn
    forward = attention.forward
    attention.forward = lambda *a, **k: (forward(*a, **k)[0], None)
    with pytest.raises(qbe.QBEError, match="does not show its attention's weights"):
        train(prepared, items(16), 1)
    assert not any(m._forward_hooks for m in prepared.model.modules())


def test_the_command(tiny_folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    questions = [{"question": f"How much is {i} and {i}?", "answer": f"It is #### {2 * i}"} for i in range(40)]
    tasks = [{"id": f"s{i}", "instruction": f"Say {i}.", "instances": [{"input": "", "output": str(i)}]}
             for i in range(40)]  # fmt: skip
    (data / "gsm8k_train4000.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    (data / "alpaca_seed_tasks.jsonl").write_text("".join(json.dumps(t) + "\n" for t in tasks))
    texts = (f" = Title {i} = \n\n some words of it {i} . " * 9 for i in range(40))
    (data / "wikitext2_valid.txt").write_text("\n".join(texts))
    of = "--model", str(tiny_folder), "--device", "cpu", "--json"
    done = command("train", "cascade", *of, "--data", str(data), "--limit", "6", "--steps", "2", home=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    told = json.loads(done.stdout)
    assert Path(told["file"]).is_file()
    assert [e["asked"] for e in told["after"]] == list(distil.HELD_AT)
    asked = "--policy", "uniform", "--bits", "6", "--cascade", "--max-tokens", "20"
    again = command("generate", "a b", *of, *asked, home=tmp_path)
    assert again.returncode == 0, again.stderr.decode()
    assert "raised_tokens" in again.stdout.decode()


def test_constants() -> None:
    assert learning.HIDDEN % 8 == 0  # what the compiled op takes
