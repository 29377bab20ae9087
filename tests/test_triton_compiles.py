"""Kernels become machine code for a GPU that is not here: the interpreter takes what the compiler refuses.

A number that is 1 becomes a constant of the kernel, whose type has no methods; so each is compiled with such ones, too.
"""

from __future__ import annotations

from typing import Any

import pytest

from qbe.format.layout import SliceLayout

pytest.importorskip("triton.backends.nvidia.compiler")
LAYOUT = SliceLayout()


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> int:
    """Bytes of the kernel for compute capability 9.0; numbers that have no type here are int32."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    return len(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"])


@pytest.mark.parametrize(
    ("ones", "paged"), [((), False), ((), True), (("blocks",), True), (("N", "K", "blocks"), False)], ids=str
)
def test_experts(ones: tuple[str, ...], paged: bool) -> None:
    from qbe.kernels.triton.experts.nested import _parts
    from qbe.kernels.triton.experts.nested_kernel import experts_kernel

    numbers = {"x_ptr": "*bf16", "meta_ptr": "*u8", "y_ptr": "*bf16", "alpha": "fp32", "limit": "fp32"}
    order = dict.fromkeys(("packed_ptr", "exponents_ptr", "words_ptr", "first_ptr", "tile_expert_ptr"), "*i32")
    constants = {
        "original_ptr": None, "bias_ptr": None, "PRECISIONS": LAYOUT.precisions, "PARTS": _parts(LAYOUT),
        "GROUP_BLOCKS": 1, "STEP_BLOCKS": 1, "DEQUANTISE": False, "STAGES": 2, "BLOCK_N": 64, "BLOCK_M": 16,
        "GATED": True, "INTERLEAVED": False, "ACTIVATION": 0, "LIMITED": False,
        "PAGES": ((0, 64), (2, 128), (3, 128)) if paged else (), "COLUMNS": 4, "ALIGNED": 16,
        "SLICE_PAGES": (0, 2, 3) if paged else (),
        "packed_ptr" if paged else "addresses_ptr": None,
    }  # fmt: skip
    types = numbers | order | {"order_ptr": "*i64", "tile_first_ptr": "*i32", "addresses_ptr": "*i64"}
    assert compiled(experts_kernel, types, constants | dict.fromkeys(ones, 1))


@pytest.mark.parametrize("name", ["batch_three_kernel"])
def test_several_weights_in_a_launch(name: str) -> None:
    from qbe.kernels.triton.linear.tiled import batch_kernel as tiled_batch_kernel
    from qbe.kernels.triton.linear.tiled import decode_kernel as tiled_decode_kernel
    from qbe.kernels.triton.linear.tiled.layout import unit

    few = name.startswith("decode")
    kernel = getattr(tiled_decode_kernel if few else tiled_batch_kernel, name)
    types = dict.fromkeys(("x_ptr", "y_ptr"), "*bf16") | {"parts_ptr": "*fp32"}
    types |= dict.fromkeys(("half_ptr", "quantised_ptr", "packed0_ptr", "packed1_ptr", "packed2_ptr"), "*u8")
    types |= {f"bits{i}_ptr": "*i32" for i in range(3)}
    constants = {f"bias{i}_ptr": None for i in range(3)}
    constants |= {f"original{i}_ptr": None for i in range(3)}
    constants |= {
        "PRECISIONS": LAYOUT.precisions, "PARTS": LAYOUT.needed_parts, "GROUP": 128, "UNIT": unit(LAYOUT),
        "SPLIT": True, "BN": 64, "BM": 16, "STAGES": 3, "EARLY": True, "ASM": True, "AHEAD": 2, "ROWS": 0,
    }  # fmt: skip
    assert compiled(kernel, types, {k: v for k, v in constants.items() if k in kernel.arg_names})
