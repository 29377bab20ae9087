"""Times `qbe::nested_linear` on a GPU against bfloat16 F.linear, at the linear layers of Llama-3.1-8B.

    python benchmarks/cuda_linear.py [--json FILE]

The weights are in the layout that a GPU gets (`qbe.kernels.triton.layout`). Each time is the median of CUDA graph
replays of at least 24 launches over distinct copies of the weights (more than the L2 cache holds), divided by their
number. One graph is captured per shape; the columns differ only in the contents of the
bits tensor. Error: worst row against the float32 reference, with all precisions mixed.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch

from qbe.kernels.reference import nested_linear as reference
from qbe.kernels.triton.layout import to_device_layout
from qbe.kernels.triton.nested_linear import nested_linear
from qbe.store.codes import quantise
from qbe.store.layout import SliceLayout
from qbe.store.packing import pack

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROWS = (1, 8, 16, 64, 512, 2048)
COLUMNS = {"4": (4,), "6": (6,), "8": (8,), "4+6+8": (4, 6, 8)}
LAYOUT = SliceLayout((4, 2, 2))
COLD_BYTES = 180_000_000  # three times the L2 cache of an H200, counted at 4 bits
REPLAYS = 15


def capture(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Warms `run` up (compilation) and captures it."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, launches: int) -> float:
    """Median microseconds of one of the graph's launches."""
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    return sorted(times[2:])[(REPLAYS - 2) // 2]


def measure(name: str, n: int, k: int, group_size: int) -> list[dict[str, object]]:
    """One row of results for each number of rows."""
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02
    codes, meta, exponent = quantise(weight, LAYOUT, group_size)
    packed = pack(codes, LAYOUT)
    del codes
    copies = max(3, COLD_BYTES * 2 // (n * k))
    tiled = to_device_layout(packed, meta, LAYOUT, k)
    if tiled is None:
        raise SystemExit(f"group size {group_size} has no GPU layout: give 64 or 128")
    stores = [(tiled.clone(), meta.clone()) for _ in range(copies)]
    launches = max(copies, 24)
    dense = [weight.clone() for _ in range(max(3, copies // 4))]

    out: list[dict[str, object]] = []
    for m in ROWS:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        bits = torch.full((m,), 4, dtype=torch.int32, device="cuda")
        y = [x.new_empty(m, n)]

        def run_nested(x: torch.Tensor = x, bits: torch.Tensor = bits, y: list[torch.Tensor] = y) -> None:
            for i in range(launches):
                y[0] = nested_linear(x, *stores[i % copies], bits, weight, None, LAYOUT.slices, exponent)

        def run_dense(x: torch.Tensor = x) -> None:
            for i in range(launches):
                torch.nn.functional.linear(x, dense[i % len(dense)])

        row: dict[str, object] = {"linear": name, "n": n, "k": k, "m": m, "group": group_size}
        row["bf16_us"] = replay_us(capture(run_dense), launches)
        graph = capture(run_nested)
        times = {}
        for column, widths in COLUMNS.items():
            bits.copy_(torch.tensor([widths[i % len(widths)] for i in range(m)], dtype=torch.int32))
            times[column] = replay_us(graph, launches)
        row["nested_us"] = times
        expected = reference.nested_linear(x.float(), packed, meta, bits, weight, None, LAYOUT.slices, exponent)
        row["error"] = ((y[0].float() - expected).norm(dim=1) / expected.norm(dim=1)).max().item()
        out.append(row)
        cells = "".join(f"{t:9.1f}" for t in (row["bf16_us"], *times.values()))
        print(f"{name:8} {n:6} x {k:5}  M {m:4}{cells}   {row['error']:.1e}", flush=True)
        del graph
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--group-size", type=int, default=64)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, microseconds a linear, group {args.group_size}")
    print(f"{'':33}" + "".join(f"{c:>9}" for c in ("bf16", *COLUMNS)) + "   error")
    results = [row for name, (n, k) in SHAPES.items() for row in measure(name, n, k, args.group_size)]
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        partial = args.json.with_suffix(".partial")
        head = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "results": results}
        partial.write_text(json.dumps(head, indent=1))
        os.replace(partial, args.json)


if __name__ == "__main__":
    main()
