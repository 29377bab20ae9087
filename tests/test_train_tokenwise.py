"""`qbe train tokenwise`: damages of tokens by gradients, and routers that come to expect them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from qbe.learning import distil
from qbe.learning.distil import RouterNetworks, sliced
from qbe.learning.gates import Gates
from qbe.learning.sensitivities import lowered
from qbe.learning.tokenwise import Expected, _loss
from qbe.policies.routers import blocks_of, gear_bits
from qbe.store.prepare import PreparedModel, prepare

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def prepared(tiny_folder: Path) -> PreparedModel:
    return prepare(tiny_folder, dtype="float32", device=CPU, progress=False)


def test_damages_of_single_tokens_are_what_measuring_gives(prepared: PreparedModel) -> None:
    """One token alone reads one weight at fewer bits."""
    table, generator = prepared.table, torch.Generator().manual_seed(0)
    ids = torch.randint(0, 256, (1, 6), generator=generator)
    counted = torch.ones(1, 6, dtype=torch.bool)
    sites, draws = (3, 9, 14), 1000  # a deviation of 4.5 %
    found = torch.zeros(len(table.nested), 6, 2, dtype=torch.float64)

    def note(at: int, x: torch.Tensor, product: torch.Tensor) -> None:
        assert x.shape[:2] == ids.shape
        found[at] += product[0].double().square() / 2 / draws

    with lowered(prepared.model, table, (4, 6), sites) as run:
        logits = run(ids, counted, draws, generator, note)
    assert [i for i, d in enumerate(found) if d.any()] == list(sites)
    with sliced(prepared) as student, torch.no_grad():
        teacher = student.teacher(ids, counted)
        torch.testing.assert_close(logits[0].log_softmax(-1), teacher)
    for site in sites:
        weight, module = table.nested[site], prepared.model.get_submodule(table.nested[site].name)
        original = module.weight.original
        for column, gear in enumerate((4, 6)):
            for token in (0, 4):
                wrong = module.weight.dequantise(gear) - original
                exact = _one_token(prepared, weight.name, original, wrong, ids, token, teacher)
                assert float(found[site, token, column]) == pytest.approx(exact, rel=0.25), (site, gear, token)


def _one_token(
    prepared: PreparedModel, name: str, original: torch.Tensor, wrong: torch.Tensor, ids: torch.Tensor, token: int,
    teacher: torch.Tensor,
) -> float:  # fmt: skip
    """Divergence summed over the text when one token alone reads that weight with an error, all else exact."""
    model, table = prepared.model, prepared.table
    changed = []
    only = torch.zeros(1, ids.shape[1], 1)
    only[0, token] = 1.0
    try:
        for site in table.nested:
            module = model.get_submodule(site.name)
            exact, bias, here = module.weight.original, module.bias, site.name == name

            def forward(x, exact=exact, bias=bias, here=here):  # type: ignore[no-untyped-def]
                y = torch.nn.functional.linear(x, exact, bias)
                return y + only * torch.nn.functional.linear(x, wrong) if here else y

            module.forward = forward
            changed.append(module)
        with torch.no_grad():
            rows = model(input_ids=ids, use_cache=False).logits[0].double().log_softmax(-1)
    finally:
        for module in changed:
            del module.forward
    before = teacher.double()
    return float((before.exp() * (before - rows)).sum())


def test_expected_damages_add_up_what_slices_are_worth(prepared: PreparedModel) -> None:
    table = prepared.table
    blocks, widths = blocks_of(table), gear_bits(table)
    generator = torch.Generator().manual_seed(1)
    begin = [torch.randn(len(b.sites) * (len(widths) - 1), generator=generator).double().numpy() for b in blocks]
    with sliced(prepared) as student:
        gates = Gates(table, student, RouterNetworks([8] * len(blocks), begin, 64, seed=0))
    expected = Expected(gates)
    for number, block in enumerate(blocks):
        got = expected(number, torch.randn(5, 8, generator=generator)).detach().exp()
        assert got.shape == (5, len(block.sites), len(widths) - 1)
        for i, site in enumerate(block.sites):
            scores = begin[number].reshape(len(block.sites), -1)[i]
            worth = [scores[0], *(scores[0] - np.cumsum(np.log1p(np.exp(scores[1:]))))]
            bits = table.nested[site].parameters * np.diff(widths)
            left = np.exp(worth[-1]) * bits[-1] / (4 ** (widths[-1] - widths[-2]) - 1)  # a step four times as fine
            for w in reversed(range(len(widths) - 1)):
                left += np.exp(worth[w]) * bits[w]
                assert float(got[0, i, w]) == pytest.approx(left, rel=1e-4)


def test_the_loss_is_least_at_the_mean_not_at_the_mean_of_logarithms() -> None:
    draws = torch.randn(200_000, generator=torch.Generator().manual_seed(2)).square() * 0.03
    candidates = torch.linspace(-6, -1, 501)
    best = float(candidates[torch.stack([_loss(draws, c.expand_as(draws)) for c in candidates]).argmin()])
    assert np.exp(best) == pytest.approx(0.03, rel=0.03)
    assert abs(best - float(draws.log().mean())) > 1, "which would be another"


def test_routers_learn_whose_damage_is_large() -> None:
    """Damages of a known mean, that differs between tokens by what they read: routers come to know it."""
    generator = torch.Generator().manual_seed(3)
    routers = RouterNetworks([6], [np.array([0.0])], 64, seed=0)
    truth = torch.randn(6, generator=generator)
    optimiser = torch.optim.Adam(routers.parameters(), lr=distil.RATE * 3)
    for _ in range(400):
        x = torch.randn(256, 6, generator=generator)
        damage = (x @ truth).exp() * torch.randn(256, generator=generator).square()
        loss = _loss(damage[:, None], routers.scores(0, x))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    x = torch.randn(500, 6, generator=generator)
    got, mean = routers.scores(0, x)[:, 0].detach(), x @ truth
    assert float(torch.corrcoef(torch.stack([got, mean]))[0, 1]) > 0.97
    assert float((got - mean).mean()) == pytest.approx(0, abs=0.25)
