"""Times the CPU kernel of `qbe::nested_linear` on the linears of one SmolLM2-135M step, beside torch's F.linear.

    python benchmarks/cpu_linear.py [--rows 1 4 8] [--dtype float32] [--threads 1] [--crossover]

Every layer has weights of its own, so that a step streams them from memory as a model does. Weights are random: only
shapes and bits matter for time.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn.functional import linear

from qbe.kernels import ops
from qbe.kernels.cpu import build, nested_linear
from qbe.store.layout import SliceLayout

LAYERS, HIDDEN, INNER, KV, VOCABULARY = 30, 576, 1536, 192, 49152
BLOCK = [
    (HIDDEN, HIDDEN),
    (KV, HIDDEN),
    (KV, HIDDEN),
    (HIDDEN, HIDDEN),
    (INNER, HIDDEN),
    (INNER, HIDDEN),
    (HIDDEN, INNER),
]
SHAPES = BLOCK * LAYERS + [(VOCABULARY, HIDDEN)]
SLICES, GROUP = (4, 2, 2), 64
EXPONENT = 110


def random_store(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """packed and meta of a matrix that was never quantised: the kernel cannot tell."""
    layout = SliceLayout(SLICES)
    packed = torch.randint(0, 256, (layout.total_bits, n * k // 8), dtype=torch.uint8)
    return packed, torch.randint(0, 256, (2 * len(layout.precisions), n, k // GROUP), dtype=torch.uint8)


def timed(step: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Best and median milliseconds; on a shared machine the best is what the code costs."""
    for _ in range(3):
        step()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    return min(times), statistics.median(times)


def report(what: str, times: tuple[float, float], moved: float) -> None:
    best, median = times
    print(f"{what:36s} best {best:8.2f} ms  median {median:8.2f} ms  {moved / best / 1e6:6.1f} GB/s at best")


def weight_bytes(bits: int) -> float:
    """Bytes that a read at `bits` moves: the slices and the planes of scales (four; two at the widest precision)."""
    planes = 2 if bits == sum(SLICES) else 4
    return sum(n * k for n, k in SHAPES) * (bits / 8 + planes / GROUP)


def decode(rows: int, dtype: torch.dtype, repeats: int) -> None:
    """One step's linears with `rows` rows: at each precision, with all of them in one batch, and unquantised."""
    x = {k: torch.randn(rows, k, dtype=dtype) for k in (HIDDEN, INNER)}
    stores = [(k, *random_store(n, k)) for n, k in SHAPES]

    def step(call: Callable[..., torch.Tensor], bits: torch.Tensor) -> None:
        for k, packed, meta in stores:
            call(x[k], packed, meta, bits, None, None, SLICES, EXPONENT)

    batches = {str(b): [b] * rows for b in (4, 6, 8)}
    if rows > 1:
        batches["4|6|8"] = [(4, 6, 8)[r % 3] for r in range(rows)]
    for name, wanted in batches.items():
        bits = torch.tensor(wanted, dtype=torch.int32)
        for label, call in (("kernel", nested_linear.nested_linear), ("custom op", ops.nested_linear)):
            times = timed(functools.partial(step, call, bits), repeats)
            report(f"rows {rows:3d}  bits {name:6s} {label}", times, weight_bytes(max(wanted)))
    for other in (torch.bfloat16, torch.float32):
        plain(rows, other, repeats)


def plain(rows: int, dtype: torch.dtype, repeats: int) -> None:
    weights = [torch.randn(n, k).to(dtype) for n, k in SHAPES]
    x = {k: torch.randn(rows, k, dtype=dtype) for k in (HIDDEN, INNER)}

    def step() -> None:
        for w in weights:
            linear(x[w.shape[1]], w)

    name = str(dtype).removeprefix("torch.")
    report(f"rows {rows:3d}  F.linear {name}", timed(step, repeats), sum(w.nbytes for w in weights))


def crossover(dtype: torch.dtype, repeats: int) -> None:
    """Compiled kernel against dequantising for a growing number of rows of one layer: sets MANY_ROWS."""
    for n, k in ((INNER, HIDDEN), (HIDDEN, INNER), (2048, 2048)):
        packed, meta = random_store(n, k)
        for rows in (4, 8, 12, 16, 24, 32, 128):
            x = torch.randn(rows, k, dtype=dtype)
            line = f"{n}x{k} rows {rows:4d}"
            for bits in (4, 8):
                args = (x, packed, meta, torch.full((rows,), bits, dtype=torch.int32), None, None, SLICES, EXPONENT)
                for name, limit in (("kernel", rows + 1), ("dequantise", 0)):
                    nested_linear.MANY_ROWS[dtype] = limit
                    best, _ = timed(functools.partial(nested_linear.nested_linear, *args), repeats)
                    line += f"   {bits} bits {name} {best:7.3f} ms"
            print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--crossover", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{build.backend()}, {args.threads} threads, torch {torch.__version__}, x {args.dtype}")
    dtype = getattr(torch, args.dtype)
    if args.crossover:
        crossover(dtype, args.repeats)
    else:
        for rows in args.rows:
            decode(rows, dtype, args.repeats)


if __name__ == "__main__":
    main()
