"""Teacher-forced logits through the engine: those of the model itself, whatever chunks, pages and neighbours."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conftest import byte_tokenizer, tiny_llama
from qbe import Engine, QBEError
from qbe.blueprint import Blueprint
from qbe.engine.core import Core
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.engine.sampling.scoring import Scored, score
from qbe.kernels.reference.activations import precision_word
from qbe.store.prepare import prepare_in_memory


class Kept:
    """Takes logits [n, vocabulary] and counts how often they came."""

    def __init__(self) -> None:
        self.rows: dict[int, torch.Tensor] = {}
        self.came = 0

    def __call__(self, position: int, logits: torch.Tensor) -> None:
        self.rows.update({position + i: row.clone() for i, row in enumerate(logits)})
        self.came += len(logits)


def prepared(device: torch.device) -> tuple[Any, Any]:
    model = tiny_llama().to(device)
    found = prepare_in_memory(model, byte_tokenizer(), device=device, need_sensitivity=False, progress=False)
    return found.model, found.table


def blueprints(table: Any) -> list[Blueprint]:
    gears = [[4, 6, 8, 16][i % 4] for i in range(len(table.nested))]
    return [Blueprint.of("a", table, gears), Blueprint.of("b", table, [16] * len(gears)),
            Blueprint.of("c", table, [4] * len(gears), table.activations(8))]  # fmt: skip


@torch.inference_mode()
def direct(model: Any, table: Any, ids: list[int], blueprint: Blueprint, device: torch.device) -> torch.Tensor:
    for site, w, a in zip(table.nested, blueprint.weight_bits, blueprint.activation_bits, strict=True):
        weight = model.get_submodule(site.name).weight
        weight.bits = torch.tensor([precision_word(w, a)], dtype=torch.int32, device=device)
    return model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0].float()


def test_logits_are_the_models_own(device: torch.device) -> None:
    model, table = prepared(device)
    texts = [[(i * 7 + k) % 320 for i in range(n)] for k, n in ((0, 150), (1, 70), (2, 1))]
    pairs = [(ids, b) for ids in texts for b in blueprints(table)]
    expected = [direct(model, table, ids, b, device) for ids, b in pairs]
    core = Core(model, table, max_batch_tokens=48, max_sequences=3, kv_tokens=512, device=device)  # chunks, waits
    takes = [Kept() for _ in pairs]
    score(core, [Scored(ids, b, len(ids) // 2, take) for (ids, b), take in zip(pairs, takes, strict=True)])
    for (ids, _), rows, take in zip(pairs, expected, takes, strict=True):
        assert sorted(take.rows) == list(range(len(ids) // 2, len(ids)))
        ours = torch.stack([take.rows[i] for i in sorted(take.rows)])
        torch.testing.assert_close(ours, rows[len(ids) // 2 :], rtol=2e-3, atol=2e-2)
    assert not core.has_work()


def test_known_pages_serve_what_is_not_wanted(device: torch.device) -> None:
    model, table = prepared(device)
    core = Core(model, table, kv_tokens=1024, device=device)
    ids, (blueprint, *_) = [i % 300 for i in range(200)], blueprints(table)
    whole, again, tail = Kept(), Kept(), Kept()
    score(core, [Scored(ids, blueprint, 0, whole)])
    score(core, [Scored(ids, blueprint, 0, again)])
    score(core, [Scored(ids, blueprint, 150, tail)])
    assert (whole.came, again.came, tail.came) == (200, 200, 50)
    for i in range(200):
        torch.testing.assert_close(again.rows[i], whole.rows[i])
    for i in range(150, 200):
        torch.testing.assert_close(tail.rows[i], whole.rows[i], rtol=2e-3, atol=2e-2)


def test_a_preempted_text_gives_its_logits_again() -> None:
    cpu = torch.device("cpu")
    model, table = prepared(cpu)
    bits = blueprints(table)
    texts = [[(i * 3 + k) % 320 for i in range(190)] for k in range(3)]
    expected = [direct(model, table, ids, bits[0], cpu) for ids in texts]
    core = Core(model, table, max_batch_tokens=64, kv_tokens=320)  # five pages for texts of three each
    takes = [Kept() for _ in texts]
    score(core, [Scored(ids, bits[0], 0, take) for ids, take in zip(texts, takes, strict=True)])
    for rows, take in zip(expected, takes, strict=True):
        ours = torch.stack([take.rows[i] for i in range(190)])
        torch.testing.assert_close(ours, rows, rtol=2e-3, atol=2e-2)


def test_answers_beside_it_stay_the_same_and_errors_leave_nothing() -> None:
    with Engine(tiny_llama(), tokenizer=byte_tokenizer(), device="cpu", records=False, policy="uniform") as engine:
        params = SamplingParams(max_tokens=8)
        before = engine.generate("Once upon a time", params).token_ids
        table = engine.table
        take = Kept()
        score(engine.core, [Scored([5, 6, 7], blueprints(table)[0], 0, take)])
        assert engine.generate("Once upon a time", params).token_ids == before
        for ids, says in (([], "empty"), ([9999], "token 9999"), ([1] * 600, "context is 512")):
            with pytest.raises(QBEError, match=says):
                score(engine.core, [Scored([1, 2], blueprints(table)[0], 0, take),
                                    Scored(ids, blueprints(table)[0], 0, take)])  # fmt: skip
            assert not engine.core.has_work()
