"""How the ways to multiply compare for a growing number of rows on this CPU: what sets the numbers of rows in the code.

    python benchmarks/cpu_crossover.py [--dtype float32] [--threads 1]

For one layer, best of 20: the op as it is called, with activations of 16 and of 8 bits; as it is called where rows
share what they read; the compiled kernel by itself; a dequantised weight through torch's product, without rounding x;
and the plain layer. `MANY_ROWS` (dispatch.py) is where the op changes from one to the other, FEW_ALIKE, TILED,
FEW_TILED and INT16_ROWS where the kernel changes its way (job.c, dot_tiles.c, nested.c, dot_winograd.c). Weights are
random: only shapes and bits matter for time.
How fast the linears of a model are is measured by `qbe bench linears`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch.nn.functional import linear

from qbe.format.layout import SliceLayout
from qbe.kernels.cpu import build
from qbe.kernels.cpu.geometry import geometry
from qbe.kernels.cpu.linear import nested as nested_linear
from qbe.kernels.reference.activations import EIGHT, precision_word

SHAPES = ((1536, 576), (576, 1536), (2048, 2048))
ROWS = (1, 2, 4, 5, 8, 16, 32, 48, 64, 256)
LAYOUT, GROUP, EXPONENT = SliceLayout((4, 2, 2)), 64, 110
REPEATS = 20


def best_ms(run: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        best = min(best, (time.perf_counter() - start) * 1e3)
    return best


def ways(
    x: torch.Tensor, packed: torch.Tensor, meta: torch.Tensor, bits: int, weight: torch.Tensor
) -> dict[str, Callable[[], object]]:
    form = geometry(packed.shape, meta.shape, x.shape[1], LAYOUT.slices, EXPONENT)

    def kernel(precision_words: int) -> Callable[[], object]:
        wanted = torch.full((x.shape[0],), precision_words, dtype=torch.int32)
        return lambda: nested_linear._few(x, packed, meta, wanted, None, None, form)

    def called(precision_words: int, invariant: bool = True) -> Callable[[], object]:
        wanted = torch.full((x.shape[0],), precision_words, dtype=torch.int32)
        return lambda: nested_linear.nested_linear(
            x, packed, meta, wanted, None, None, LAYOUT.slices, EXPONENT, batch_invariant=invariant
        )

    return {
        "op": called(bits),
        "op, 8-bit x": called(precision_word(bits, EIGHT)),
        "shared": called(bits, False),
        "shared, 8-bit x": called(precision_word(bits, EIGHT), False),
        "kernel": kernel(bits),
        "8-bit x": kernel(precision_word(bits, EIGHT)),
        "dequantised": lambda: nested_linear._dequantised(x, packed, meta, bits, None, form),
        "plain": lambda: linear(x, weight),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    print(f"{build.backend()}, {args.threads} threads, torch {torch.__version__}, x {args.dtype}, ms")
    for n, k in SHAPES:
        packed = torch.randint(0, 256, (LAYOUT.total_bits, n * k // 8), dtype=torch.uint8)
        meta = torch.randint(0, 256, (2 * len(LAYOUT.precisions), n, k // GROUP), dtype=torch.uint8)
        weight = torch.randn(n, k).to(dtype)
        for rows in ROWS:
            for bits in (4, 8):
                runs = ways(torch.randn(rows, k).to(dtype), packed, meta, bits, weight)
                times = "".join(f"   {name} {best_ms(run):7.3f}" for name, run in runs.items())
                print(f"{n}x{k} rows {rows:4d} {bits} bits{times}")


if __name__ == "__main__":
    main()
