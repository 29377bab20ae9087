"""From how many rows on a dequantised weight beats the compiled kernel on this CPU: what sets `MANY_ROWS`.

    python benchmarks/cpu_crossover.py [--dtype float32] [--threads 1]

Both ways of `qbe.kernels.cpu.nested_linear` for a growing number of rows of one layer, best of 20. Weights are random:
only shapes and bits matter for time. How fast the linears of a model are is measured by `qbe bench linears`.
"""

from __future__ import annotations

import argparse
import time

import torch

from qbe.kernels.cpu import build, nested_linear
from qbe.store.layout import SliceLayout

SHAPES = ((1536, 576), (576, 1536), (2048, 2048))
ROWS = (4, 8, 12, 16, 24, 32, 128)
LAYOUT, GROUP, EXPONENT = SliceLayout((4, 2, 2)), 64, 110
REPEATS = 20


def best_ms(rows: int, dtype: torch.dtype, store: tuple[torch.Tensor, torch.Tensor], k: int, bits: int) -> float:
    x, wanted = torch.randn(rows, k, dtype=dtype), torch.full((rows,), bits, dtype=torch.int32)
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        nested_linear.nested_linear(x, *store, wanted, None, None, LAYOUT.slices, EXPONENT)
        best = min(best, (time.perf_counter() - start) * 1e3)
    return best


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
        for rows in ROWS:
            line = f"{n}x{k} rows {rows:4d}"
            for bits in (4, 8):
                for name, limit in (("kernel", rows + 1), ("dequantise", 0)):
                    nested_linear.MANY_ROWS[dtype] = limit
                    line += f"   {bits} bits {name} {best_ms(rows, dtype, (packed, meta), k, bits):7.3f}"
            print(line)


if __name__ == "__main__":
    main()
