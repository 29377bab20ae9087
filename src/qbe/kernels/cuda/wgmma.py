"""wgmma instructions as C++ functions: asm names every register, so they are written for each shape."""

from __future__ import annotations


def wgmma(rows: int, numbers: str) -> str:
    """The function `wgmma` of 64 outputs and so many rows, the first operand in registers.

    Args:
        rows: a multiple of 8 up to 256.
        numbers: f16, bf16 or int8; int8's sums are int32, the others' float32.
    """
    sums, eight = rows // 2, numbers == "int8"
    d = ",".join(f"%{i}" for i in range(sums))
    a = ",".join(f"%{sums + i}" for i in range(4))
    shape, rest = ("k32.s32.s8.s8", "1") if eight else (f"k16.f32.{numbers}.{numbers}", "1,1,1,0")
    outputs = ",".join(f'"+{"r" if eight else "f"}"(d[{i}])' for i in range(sums))
    return (
        f"DEVICE void wgmma({'int' if eight else 'float'} (&d)[{sums}], u32 a0, u32 a1, u32 a2, u32 a3, u64 x) {{\n"
        f'asm volatile("wgmma.mma_async.sync.aligned.m64n{rows}{shape} {{{d}}},{{{a}}},%{sums + 4},{rest};" '
        f': {outputs} : "r"(a0),"r"(a1),"r"(a2),"r"(a3),"l"(x));\n}}\n'
    )
