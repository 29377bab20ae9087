"""Norms, rotary embeddings and gates of a GPU, and layers that run together there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import silu
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, apply_rotary_pos_emb

from conftest import tiny_llama
from covering import FULL
from qbe.engine.execution import patch_modules
from qbe.engine.execution.patch_layers import is_pre_norm, patch_layers
from qbe.engine.execution.patch_projections import patch_projections
from qbe.kernels.ops.register import OPS
from qbe.kernels.ops.rms_norm import add_rms_norm, rms_norm
from qbe.kernels.ops.rotary import rotate, rotate_both
from qbe.kernels.ops.swiglu import swiglu
from qbe.kernels.reference.activations import precision_word
from qbe.store.nested_linears import nest, nested_linears, set_weight
from qbe.store.nested_tensor import NestedTensor
from qbe.store.placement import drop_original, tile
from test_fused_rows import near, rms
from test_triton_kernel import CUDA, DEVICE, INTERPRET, on_device, run_in_interpreter

EPS = 1e-5
OWN = (
    "rms_norm", "add_rms_norm", "rotate", "rotate_both", "swiglu", "norm", "add_norm", "gate", "nested_linear",
    "nested_linears", "converted_linears",
)  # fmt: skip
DTYPES = [torch.bfloat16, torch.float16] if CUDA or FULL else [torch.bfloat16]


@pytest.mark.skipif(CUDA or INTERPRET, reason="the tests below run here directly")
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@pytest.fixture(autouse=True, scope="module")
def _kernels_on_cpu() -> object:
    """In the interpreter the kernels take CPU tensors."""
    library = torch.library.Library("qbe", "IMPL")
    if INTERPRET:
        from qbe.kernels.triton.linear import merged as nested_linears
        from qbe.kernels.triton.linear import nested as nested_linear
        from qbe.kernels.triton.rows import fused as fused_rows
        from qbe.kernels.triton.rows import norm_rope

        for module in (norm_rope, fused_rows, nested_linear, nested_linears):
            for name in OWN:
                if function := getattr(module, name, None):
                    library.impl(name, function, "CPU", allow_override=True)
    return library


def test_the_kernels_are_the_ones_that_a_gpu_has() -> None:
    assert all(OPS[name].cuda is not None for name in OWN)


@on_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 576), (1, 7, 100), (1, 3, 4, 128), (3, 1)])
@torch.inference_mode()
def test_a_norm_is_the_models(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(shape[-1])
    x, weight = (10 * torch.randn(s, device=DEVICE).to(dtype) for s in (shape, shape[-1:]))
    x.view(-1, shape[-1])[0, 0] = 1e3
    found = rms_norm(x, weight, EPS)
    assert found.is_contiguous()
    near(found, rms(x, weight))
    if len(shape) == 4:  # heads of a product of several projections
        both = torch.cat([x.flatten(2), x.flatten(2)], -1)[..., : x.shape[2] * x.shape[3]].unflatten(-1, x.shape[2:])
        assert torch.equal(rms_norm(both, weight, EPS), found)
    total, normed = add_rms_norm(x, x.flip(0), weight, EPS)
    near(total, x + x.flip(0))
    assert torch.equal(normed, rms_norm(total, weight, EPS))
    alone = rms_norm(x[:, -1:], weight, EPS)
    assert torch.equal(alone, found[:, -1:])  # whatever rows are beside it


@on_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "tokens", "width"), [(9, 1, 64), (3, 20, 64), (2, 7, 24), (1, 5, 2)])
@torch.inference_mode()
def test_rotary_embeddings_are_the_models(heads: int, tokens: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x = torch.randn(1, tokens, heads, width, device=DEVICE).to(dtype).transpose(1, 2)
    cos, sin = (torch.randn(1, tokens, width, device=DEVICE).to(dtype) for _ in range(2))
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    part = torch.cat([x.transpose(1, 2).flatten(2)] * 2, -1)[..., : heads * width]  # of several projections
    for given in (x, x.contiguous(), part.unflatten(-1, (heads, width)).transpose(1, 2)):
        found = rotate(given, cos, sin)
        cut = 4 * torch.finfo(dtype).eps if INTERPRET else 0  # the interpreter cuts where a GPU rounds
        torch.testing.assert_close(found, expected, rtol=cut, atol=cut)
        for keys in (given[:, -1:], given.transpose(2, 3).contiguous().transpose(2, 3)):
            both = rotate_both(given, keys, cos, sin)
            assert torch.equal(both[0], found)
            assert torch.equal(both[1], rotate(keys, cos, sin))


@on_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1100), (2, 3, 64)])
@torch.inference_mode()
def test_a_gate_is_the_models(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate, up = (4 * torch.randn(*shape[:-1], 2 * shape[-1], device=DEVICE)).to(dtype).chunk(2, -1)
    found = swiglu(gate, up)
    assert found.is_contiguous()
    near(found, silu(gate) * up)


def tiled_llama(layers: int = 1) -> nn.Module:
    """A bfloat16 model whose linear weights are as a GPU has them, each row of a step at bits of its own."""
    model = tiny_llama(hidden_size=256, intermediate_size=256, num_hidden_layers=layers).to(torch.bfloat16)
    nest(model, [n for n, m in model.named_modules() if isinstance(m, nn.Linear)])
    for i, (_, layer, weight) in enumerate(nested_linears(model)):
        drop_original(weight)
        packed = tile(weight.packed, weight.meta, weight.layout, weight.in_features, weight.exponent)
        assert packed is not None
        bits = torch.tensor([(4, 6, 8)[(i + r) % 3] for r in range(17)], dtype=torch.int32)
        moved = NestedTensor(
            packed.to(DEVICE), weight.meta, bits.to(DEVICE), weight.slices, weight.group_size, weight.exponent,
            weight.in_features, weight.logical_dtype,
        )  # fmt: skip
        set_weight(layer, moved)
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and not isinstance(parameter.data, NestedTensor):
                module._parameters[name] = nn.Parameter(parameter.to(DEVICE), requires_grad=False)
        for name, buffer in list(module._buffers.items()):
            module._buffers[name] = None if buffer is None else buffer.to(DEVICE)
    return model


@on_device
@torch.inference_mode()
def test_layers_that_read_the_same_input_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiled_llama()
    ids = torch.arange(3, device=DEVICE)[None]
    expected = model(ids).logits
    calls: list[int] = []
    merged = patch_projections.__globals__["merged_ops"]
    plain = merged.nested_linears

    def counted(x: torch.Tensor, packed: list[torch.Tensor], *rest: object) -> torch.Tensor:
        calls.append(len(packed))
        return plain(x, packed, *rest)

    monkeypatch.setattr(merged, "nested_linears", counted)
    patch_projections(model, patch_modules._replace)
    calls.clear()  # the trials'
    found = model(ids).logits
    assert calls == [3, 2]  # queries, keys and values; gate and up
    torch.testing.assert_close(found, expected, rtol=2**-5, atol=2**-5)
    assert not any("left" in m.__dict__ for m in model.modules())  # nothing is kept beyond a step
    with patch_modules.unpatched(model):
        assert torch.equal(model(ids).logits, expected)
    other = copy.deepcopy(model)
    other.model.layers[0].self_attn.q_proj.weight.bits.fill_(4)
    assert not torch.equal(other(ids).logits, found)
    assert torch.equal(model(ids).logits, found)
    calls.clear()
    long = model(torch.arange(17, device=DEVICE)[None]).logits
    assert calls == [3, 2]  # of the batch kernel
    torch.testing.assert_close(long[:, :3], expected, rtol=2**-4, atol=2**-4)


@on_device
@pytest.mark.parametrize("shared", [False, True])
@torch.inference_mode()
def test_norms_and_gates_take_sums_along_and_hand_over_what_linears_read(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiled_llama(layers=2)
    for _, _, weight in nested_linears(model):
        weight.batch_invariant = not shared
    ids = torch.arange(6, device=DEVICE)[None]  # rows that share are as many as the batch kernel takes
    expected = model(ids).logits
    readers = patch_projections(model, patch_modules._replace)
    assert readers.keys() == {256}
    from qbe.kernels.triton.linear import merged
    from qbe.kernels.triton.linear.tiled import launch as tiled_linear
    from qbe.kernels.triton.rows import fused as fused_rows
    from qbe.kernels.triton.rows import norm_rope

    launched: list[str] = []
    for module, name in (
        (fused_rows, "norm_kernel"), (norm_rope, "rms_norm_kernel"), (fused_rows, "gate_kernel"), (merged, "quantised"),
        (merged, "half_rows"), (tiled_linear, "quantised"), (tiled_linear, "half_rows"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, Counted(getattr(module, name), launched, name))
    norms = [m for m in model.modules() if type(m).__name__ == "LlamaRMSNorm"]
    patch_layers(model, norms, readers, patch_modules._replace)
    found = model(ids).logits
    torch.testing.assert_close(found, expected, rtol=2**-4, atol=2**-4)
    # Of a layer: two norms, the gate, and the input of the output projection alone; then the last norm and the head.
    made = "half_rows" if shared else "quantised"
    layer = ["norm_kernel", made, "norm_kernel", "gate_kernel"]
    assert launched == [*layer, *layer, "rms_norm_kernel" if shared else "norm_kernel", made]
    with patch_modules.unpatched(model):
        assert torch.equal(model(ids).logits, expected)
    for _, _, weight in nested_linears(model):
        weight.bits = weight.bits.fill_(precision_word(4, 8))  # what was made for other words is not taken
    assert not torch.equal(model(ids).logits, found)


class Counted:
    """A function or a Triton kernel that notes when it is called or launched."""

    def __init__(self, plain: Any, calls: list[str], name: str) -> None:
        self._plain, self._calls, self._name = plain, calls, name

    def __getitem__(self, grid: object) -> Any:
        return Counted(self._plain[grid], self._calls, self._name)

    def __call__(self, *args: object, **named: object) -> Any:
        self._calls.append(self._name)
        return self._plain(*args, **named)


def test_layers_of_other_forms_are_known_by_their_code() -> None:
    from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer
    from transformers.models.granite.modeling_granite import GraniteDecoderLayer
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

    class Scaled(LlamaDecoderLayer):
        def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            return 2 * super().forward(hidden_states, **kwargs)

    assert is_pre_norm(LlamaDecoderLayer)
    assert is_pre_norm(Qwen3MoeDecoderLayer)
    assert not any(map(is_pre_norm, (Gemma2DecoderLayer, GraniteDecoderLayer, Scaled, nn.Identity)))


@pytest.mark.cuda
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@torch.inference_mode()
def test_a_model_on_a_gpu_takes_all_of_them() -> None:
    model = tiled_llama()
    ids = torch.arange(3, device=DEVICE)[None]
    expected = model(ids).logits
    patch_modules.patch_modules(model, DEVICE if isinstance(DEVICE, torch.device) else torch.device(DEVICE))
    patched = {type(m).__name__ for m in model.modules() if "forward" in m.__dict__}
    assert patched == {"LlamaRMSNorm", "LlamaAttention", "LlamaMLP", "LlamaDecoderLayer", "Linear"}
    torch.testing.assert_close(model(ids).logits, expected, rtol=2**-4, atol=2**-4)
