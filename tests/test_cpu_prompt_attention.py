"""The compiled attention of prompts against torch's own in float32."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from qbe.kernels.cpu import build
from qbe.kernels.cpu.prompt_attention import prompt_attention

pytestmark = pytest.mark.skipif(build.backend() != "avx512", reason="needs AVX-512 with bfloat16")
SCALING = 0.2
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _tensors(heads: int, kv_heads: int, rows: int, keys: int, key_dim: int, value_dim: int) -> Three:
    """As a model has them: a head's numbers of a token beside each other, tokens after that."""
    generator = torch.Generator().manual_seed(rows)
    sizes = (rows, heads, key_dim), (keys, kv_heads, key_dim), (keys, kv_heads, value_dim)
    q, k, v = (torch.randn(size, generator=generator).bfloat16().transpose(0, 1) for size in sizes)
    return q, k, v


@pytest.mark.parametrize("window", [None, 5, 70])
@pytest.mark.parametrize(
    "sizes",
    [(9, 3, 128, 128, 64, 64), (9, 3, 64, 500, 64, 64), (4, 4, 1, 100, 40, 24), (6, 2, 37, 200, 40, 24),
     (8, 1, 65, 65, 128, 96), (2, 2, 1, 1, 2, 1)],
)  # fmt: skip
def test_it_is_attention(sizes: tuple[int, ...], window: int | None) -> None:
    query, key, value = _tensors(*sizes)
    repeat, (rows, keys) = sizes[0] // sizes[1], sizes[2:4]
    at = torch.arange(keys)
    seen = at <= at[keys - rows :, None]
    if window is not None:
        seen &= at > at[keys - rows :, None] - window
    k, v = (t.float().repeat_interleave(repeat, 0) for t in (key, value))
    expected = scaled_dot_product_attention(query.float(), k, v, seen, scale=SCALING).transpose(0, 1)
    found = prompt_attention(query, key, value, window, SCALING).float()
    # Rounding: of the weights to 2^-9 of themselves, so at most that of the largest value; of the result once more.
    torch.testing.assert_close(found, expected, rtol=2**-8, atol=float(value.abs().max()) * 2**-9)


@pytest.mark.parametrize("window", [None, 70])
def test_a_row_does_not_depend_on_how_a_prompt_is_cut(window: int | None) -> None:
    query, key, value = _tensors(6, 2, 150, 200, 64, 48)
    whole = prompt_attention(query, key, value, window, SCALING)
    for begin, end in ((0, 1), (0, 149), (13, 77), (149, 150)):
        upto = 50 + end
        part = prompt_attention(query[:, begin:end], key[:, :upto], value[:, :upto], window, SCALING)
        assert torch.equal(part, whole[begin:end])


def test_what_is_no_number_shows() -> None:
    query, key, value = _tensors(4, 2, 20, 20, 16, 16)
    key[1, 7] = torch.nan
    found = prompt_attention(query, key, value, None, SCALING)
    assert found[7:, 2:].isnan().all()
    assert found[:, :2].isfinite().all()
    assert found[:7].isfinite().all()


def test_shapes_that_do_not_belong_together() -> None:
    query, key, value = _tensors(4, 2, 20, 20, 16, 16)
    with pytest.raises(RuntimeError, match="do not belong together"):
        prompt_attention(query, key[:, :19], value, None, SCALING)
    with pytest.raises(RuntimeError, match="do not belong together"):
        prompt_attention(query, key[:, :19], value[:, :19], None, SCALING)
