"""Norms and rotary embeddings as one op, and layers that call theirs: the same bits as the model's own modules make."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm, apply_rotary_pos_emb

from conftest import tiny_llama
from qbe.engine.execution import patch_modules
from qbe.kernels.cpu import build, native
from qbe.kernels.ops.rms_norm import rms_norm
from qbe.kernels.ops.rotary import rotate
from qbe.store.nested_linears import nest

DTYPES = [torch.bfloat16, torch.float32]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def compiled_ops() -> None:
    native.load()  # where there is a compiler; else the ops are torch's


def numbers(*shape: int) -> torch.Tensor:
    """Of all sizes."""
    generator = torch.Generator().manual_seed(shape[-1])
    return torch.randn(shape, generator=generator) * 10 ** (4 * torch.randn(*shape[:-1], 1, generator=generator))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 576), (1, 7, 100), (3, 5), (1, 300, 64)])
@torch.inference_mode()
def test_a_norm_has_the_same_bits(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(shape[-1], 1e-5).to(dtype)
    norm.weight.copy_(numbers(shape[-1], 1)[:, 0])
    x = numbers(*shape).to(dtype)
    x.view(-1)[3] = torch.inf
    torch.testing.assert_close(rms_norm(x, norm.weight, 1e-5), norm(x), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "tokens", "width"), [(9, 1, 64), (3, 40, 64), (2, 7, 24), (1, 5, 2)])
@torch.inference_mode()
def test_rotary_embeddings_have_the_same_bits(heads: int, tokens: int, width: int, dtype: torch.dtype) -> None:
    x = numbers(1, tokens, heads, width).to(dtype).transpose(1, 2)
    cos, sin = (torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(s)).to(dtype) for s in (1, 2))
    x[0, 0, 0, 0] = torch.nan
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    for given in (x, x.contiguous()):
        torch.testing.assert_close(rotate(given, cos, sin), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_a_model_has_the_same_bits(dtype: torch.dtype) -> None:
    model = tiny_llama().to(dtype).eval()
    nest(model, [n for n, m in model.named_modules() if isinstance(m, nn.Linear)])
    patch_modules.patch_modules(model, CPU)
    taken = [type(m) for m in model.modules() if "forward" in m.__dict__]
    assert nn.Linear in taken
    compiled = build.backend() in ("avx512", "amx")
    assert (LlamaAttention in taken) == compiled
    assert (LlamaRMSNorm in taken) == (compiled and dtype is torch.bfloat16)
    ids = torch.arange(20)[None]
    with patch_modules.unpatched(model):
        assert not any("forward" in m.__dict__ for m in model.modules())
        expected = model(ids).logits
    assert torch.equal(model(ids).logits, expected)
    other = copy.deepcopy(model)
    other.model.norm.weight.mul_(2)
    assert not torch.equal(other(ids).logits, expected)
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("name", ["Olmo", "Olmo2"])
@torch.inference_mode()
def test_cosines_of_another_precision_go_the_models_own_way(name: str) -> None:
    """They are float32 there, and what was turned is rounded at the end."""
    import transformers

    config = getattr(transformers, f"{name}Config")(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16).eval()
    ids = torch.arange(20)[None]
    expected = model(ids).logits
    patch_modules.patch_modules(model, CPU)
    assert torch.equal(model(ids).logits, expected)


def test_a_norm_of_another_kind_stays() -> None:
    norm = GemmaRMSNorm(64).to(torch.bfloat16)
    patch_modules.patch_modules(nn.Sequential(norm), CPU)
    assert "forward" not in norm.__dict__


def test_gradients_go_the_models_own_way() -> None:
    norm = LlamaRMSNorm(64).to(torch.bfloat16)
    patch_modules.patch_modules(nn.Sequential(norm), CPU)
    norm(torch.randn(2, 64).to(torch.bfloat16)).float().sum().backward()
    assert norm.weight.grad is not None
