"""Compiles, before an engine serves, every nested linear kernel that its steps can launch: no request waits for one."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator

import torch
from torch import nn

from qbe.kernels.reference.activations import word
from qbe.sites import ACTIVATION_GEARS, Role, SiteTable
from qbe.store.nested_tensor import UNIFORM_ROWS, NestedTensor
from qbe.store.prepare import bar


@torch.inference_mode()
def compile_kernels(
    model: nn.Module, table: SiteTable, device: torch.device, rows: int, head_rows: int, progress: bool
) -> None:
    """Compile them in several processes, or find them in Triton's disk cache, and load them.

    Args:
        model: on its device; nothing happens on a CPU or without Triton.
        rows: of the longest step.
        head_rows: of it that the output head sees at most.
        progress: show a progress bar.
    """
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return
    from qbe.kernels.tuning.compiling import CompilePool, collecting
    from qbe.kernels.tuning.tunable import recording

    launches = list(_launches(model, table, rows, head_rows))
    with recording():  # none of them is a step's
        with collecting() as found:
            for launch in launches:
                launch()
        pool = CompilePool()
        try:
            with bar("compiling kernels", len(found), progress and bool(found)) as advance:
                pool.compile(found, advance)
        finally:
            pool.close()
        for launch in launches:  # one that did not compile raises here what Triton says
            launch()
    torch.cuda.synchronize(device)


def row_counts(most: int) -> list[int]:
    """Numbers of rows that stand for all up to `most`: a kernel and its configuration change at these only."""
    powers = [8 << i for i in range(max(most, 8).bit_length())]
    return sorted({min(n, most) for n in (1, *powers, 255)})


def _launches(model: nn.Module, table: SiteTable, rows: int, head_rows: int) -> Iterator[Callable[[], object]]:
    """Calls that together need every kernel, for each kind of nested layer once."""
    seen: set[object] = set()
    for site in table.nested:
        layer = model.get_submodule(site.name)
        weight = layer.weight
        assert isinstance(weight, NestedTensor)
        most = head_rows if site.role is Role.OUTPUT_HEAD else rows
        layout = (tuple(weight.slices), weight.group_size, weight.packed.dim() == 1)
        # A plan of one row has bits that do not lie at a multiple of 16 bytes, for which Triton compiles once more.
        aligned = weight.bits.data_ptr() % 16 == 0
        kind = (weight.shape, layout, weight.original is not None, layer.bias is not None, aligned, most)
        if kind not in seen:
            seen.add(kind)
            for m in row_counts(most):
                yield functools.partial(_multiply, layer, m)
        if (layout, aligned) not in seen and weight.packed.dim() == 1 and most >= UNIFORM_ROWS:
            seen.add((layout, aligned))
            for width in weight.layout.precisions:
                for activations in ACTIVATION_GEARS:
                    yield functools.partial(_multiply, layer, UNIFORM_ROWS, word(width, activations))


def _multiply(layer: nn.Module, rows: int, uniform: int | None = None) -> torch.Tensor:
    """A call with that many rows, and the word that all of them read if it is known."""
    weight: NestedTensor = layer.weight  # type: ignore[assignment]
    x = torch.zeros(rows, weight.in_features, dtype=weight.logical_dtype, device=weight.packed.device)
    weight.uniform = uniform
    try:
        y: torch.Tensor = layer(x)
    finally:
        weight.uniform = None
    return y
