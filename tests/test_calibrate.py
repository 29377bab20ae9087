"""Calibration of a whole model: what it reads of a text, what it keeps when it is interrupted, what it makes of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from models_tiny import tiny_model, write_folder
from qbe.errors import QBEError
from qbe.format.codes import quantise
from qbe.format.layout import SliceLayout
from qbe.format.packing import pack
from qbe.kernels.reference import descent as reference
from qbe.store import calibrate as module
from qbe.store import checkpoint, descent, kept, tuning
from qbe.store import quantise as quantise_module
from qbe.store.calibrate import calibrate, damped, second_moments
from qbe.store.nested_linears import NestedWeightConfig, nested_linears
from qbe.store.nested_tensor import NestedTensor
from qbe.store.nesting import nestable
from qbe.store.prepare import prepare
from qbe.store.quantise import quantise_to
from qbe.tagger import tag

CPU = torch.device("cpu")
TOKENS = (torch.arange(8 * 64).view(8, 64) * 7919 % 251) + 2
CONFIG = NestedWeightConfig(slices=(3, 1, 1, 1, 2))


def names_of(model: nn.Module) -> list[str]:
    return nestable(tag(model))


def weights_of(model: nn.Module) -> dict[str, NestedTensor]:
    return {name: weight for name, _, weight in nested_linears(model)}


def test_second_moments_are_those_of_the_inputs_by_what_the_answer_feels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 40)  # of 64 and 96 columns
    monkeypatch.setattr(module, "detect", lambda _: SimpleNamespace(formats=()))  # no bfloat16
    model = tiny_model(tie=False)
    wanted = {n: 0.0 for n in ("model.layers.1.mlp.up_proj", "model.layers.0.mlp.down_proj", "lm_head")}
    drawn = torch.Generator().manual_seed(0)
    for row in TOKENS:
        inputs: dict[str, torch.Tensor] = {}
        off: dict[str, torch.Tensor] = {}

        def add_nothing(name: str, args: Any, out: torch.Tensor, inputs: Any = inputs, off: Any = off) -> torch.Tensor:
            inputs[name], off[name] = args[0].detach()[0], torch.zeros_like(out, requires_grad=True)
            return out + off[name]

        hooks = [
            model.get_submodule(n).register_forward_hook(lambda _, args, out, n=n: add_nothing(n, args, out))
            for n in wanted
        ]
        logits = model(input_ids=row[None]).logits[0]
        p = logits.detach().softmax(-1)
        root = p.sqrt() * torch.randn(p.shape, generator=drawn)
        logits.backward(root - p * root.sum(-1, keepdim=True))
        for hook in hooks:
            hook.remove()
        for name, x in inputs.items():
            gradient = off[name].grad
            assert gradient is not None
            size = gradient[0].square().mean(-1).sqrt()
            wanted[name] += (x * (size / size.mean())[:, None]).T @ x / TOKENS.numel()
    model.zero_grad()
    moments = second_moments(model, names_of(model), TOKENS)
    for name, moment in wanted.items():
        torch.testing.assert_close(moments[name], moment, rtol=1e-4, atol=1e-6)
    assert set(moments) == set(names_of(model))
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_the_noise_at_the_logits_has_the_covariance_of_a_drawn_token() -> None:
    p = torch.tensor([0.9, 0.06, 0.03, 0.01])
    noise = module._curved(p.expand(400_000, -1), torch.Generator().manual_seed(0))
    wanted = torch.diag(p) - p[:, None] * p
    torch.testing.assert_close(noise.T @ noise / len(noise), wanted, rtol=0.02, atol=2e-4)


@torch.no_grad()
def test_a_calibrated_model_is_nearer_at_every_low_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "STEPS", 0)  # which looks at the whole model's answers, not at each site's
    errors: dict[str, torch.Tensor] = {}
    for how in ("plain", "calibrated"):
        model = tiny_model()
        names = names_of(model)
        moments = second_moments(model, names, TOKENS)
        before = {n: model.get_submodule(n).weight.clone() for n in names}
        if how == "plain":
            made = {n: NestedTensor.from_weight(w, CONFIG.slices, 64) for n, w in before.items()}
        else:
            calibrate(model, names, TOKENS, CONFIG, progress=False)
            made = weights_of(model)
        total = torch.zeros(5)
        for n, w in before.items():
            off = [w - made[n].dequantise(b) for b in (3, 4, 5, 6, 8)]
            energy = ((w @ moments[n]) * w).sum()
            total += torch.stack([((e @ moments[n]) * e).sum() / energy for e in off])
        errors[how] = total
    assert (errors["calibrated"][:4] < 0.9 * errors["plain"][:4]).all()
    assert errors["calibrated"][4] < errors["calibrated"][3] / 2


def test_an_interrupted_calibration_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tiny_model()
    names = names_of(whole)
    calibrate(whole, names, TOKENS, CONFIG, progress=False)
    calls: list[int] = []
    descend = descent.descend

    def counted(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return descend(*args)

    monkeypatch.setattr(descent, "descend", counted)
    with pytest.raises(KeyboardInterrupt):
        calibrate(tiny_model(), names, TOKENS, CONFIG, tmp_path, progress=False)
    damaged = sorted(tmp_path.iterdir())
    assert len(damaged) == 4
    damaged[0].write_bytes(b"not a result")
    model = tiny_model()
    calibrate(model, names, TOKENS, CONFIG, tmp_path, progress=False)
    assert len(calls) == 5 + len(names) - 3
    for name, weight in weights_of(model).items():
        assert torch.equal(weight.packed, weights_of(whole)[name].packed)
        assert torch.equal(weight.meta, weights_of(whole)[name].meta)
    calls.clear()
    other = tiny_model(seed=1)  # the same names and shapes: nothing that was kept is of these weights
    calibrate(other, names[:3], TOKENS, CONFIG, tmp_path, progress=False)
    assert len(calls) == 3
    calls.clear()
    monkeypatch.setattr(module, "SETTINGS", "as another version has them")
    calibrate(tiny_model(seed=1), names[:3], TOKENS, CONFIG, tmp_path, progress=False)
    assert len(calls) == 3


def test_many_passes_give_what_one_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    one, many = tiny_model(), tiny_model()
    names = names_of(one)
    calibrate(one, names, TOKENS, CONFIG, progress=False)
    monkeypatch.setattr(module, "MOMENTS_BYTES", 40_000)
    calibrate(many, names, TOKENS, CONFIG, progress=False)
    for name, weight in weights_of(many).items():
        assert torch.equal(weight.packed, weights_of(one)[name].packed)


def test_sites_without_usable_inputs_are_rounded_plainly() -> None:
    model = tiny_model()
    names = names_of(model)
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[3] = float("nan")
    with pytest.warns(UserWarning, match=r"rounded plainly, model\.layers\.1"):
        calibrate(model, names, TOKENS, CONFIG, progress=False)
    layout = SliceLayout(CONFIG.slices)
    made = weights_of(model)["model.layers.1.self_attn.q_proj"]
    codes, meta, _ = quantise(model.model.layers[1].self_attn.q_proj.weight.original, layout, 64)
    assert torch.equal(made.packed, pack(codes, layout))
    assert torch.equal(made.meta, meta)


@pytest.mark.parametrize("hessian", [None, torch.zeros(4, 4), torch.full((4, 4), float("inf"))])
def test_what_says_nothing_is_no_hessian(hessian: torch.Tensor | None) -> None:
    assert damped(hessian) is None


def test_dead_inputs_are_rounded_to_nearest() -> None:
    layout = SliceLayout((4, 2, 2))
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    x[:, 10:20] = 0
    hessian = damped(x.T @ x)
    assert hessian is not None
    codes, meta, exponent = quantise(weight, layout, 64)
    better, new = descent.descend(weight, hessian, codes, meta, exponent, layout)
    before, after = (
        reference.objective(weight, hessian, *pair, exponent, layout) for pair in ((codes, meta), (better, new))
    )
    assert (after[:2].sum(-1) < before[:2].sum(-1)).all()
    assert torch.isfinite(after).all()


def test_quantize_with_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(quantise_module, "cache_dir", lambda: tmp_path / "cache")
    model = write_folder(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("he said a thing or two, and then another one. " * 200)
    config = NestedWeightConfig(slices=(3, 1, 1, 1, 2))
    out = quantise_to(str(model), tmp_path / "out", config, device, text=text, measure=False, progress=False)
    checkpoint.verify(out)
    assert not list((tmp_path / "cache" / "calibration").iterdir())  # nothing to go on with is left
    plain = quantise_to(str(model), tmp_path / "plain", config, CPU, measure=False, progress=False)
    found, rounded = (prepare(p, device=CPU, need_sensitivity=False, progress=False) for p in (out, plain))
    assert found.table.gears() == (3, 4, 5, 6, 8, 16)
    some = weights_of(found.model)
    assert any(not torch.equal(w.packed, weights_of(rounded.model)[n].packed) for n, w in some.items())
    ids = TOKENS[:1]
    with torch.inference_mode():
        assert torch.equal(found.model(input_ids=ids).logits, rounded.model(input_ids=ids).logits)


def test_what_is_kept_comes_back_or_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "state.safetensors"
    assert kept.kept(path) is None
    wanted = {"a": torch.arange(6.0).view(2, 3).T, "b": torch.tensor([1], dtype=torch.uint8)}
    kept.keep(path, wanted, {"about": "it"})
    found = kept.kept(path)
    assert found is not None
    assert found[1] == {"about": "it"}
    assert all(torch.equal(found[0][n], t) for n, t in wanted.items())
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    path.write_bytes(path.read_bytes()[:50])
    assert kept.kept(path) is None
    with pytest.raises(QBEError, match="cannot be written: File exists"):
        kept.keep(path / "inside.safetensors", wanted, {})


def test_a_site_that_nothing_calls_has_no_moments() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
            return SimpleNamespace(logits=self.used(torch.nn.functional.one_hot(input_ids % 8, 8).float()))

    assert set(second_moments(Lazy(), ["used", "unused"], TOKENS)) == {"used"}
    assert second_moments(Lazy(), ["unused"], TOKENS) == {}
