"""What multiplying one site in a native 8-bit format does to the model's output, without hardware that has the format.

A GPU that multiplies E4M3 or int8 can do so with a long prompt, inputs and weight with a scale per row. That costs more
than int8 with a scale per group does, so each site is measured, and a site is multiplied that way where it may
(`qbe.sites.SiteTable.native`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from qbe.format import scales
from qbe.kernels.reference import eight_bit_rows
from qbe.kernels.reference.eight_bit_rows import DTYPES
from qbe.sites import SiteTable
from qbe.store.nested_tensor import NestedTensor
from qbe.store.sensitivity import lowered_divergence


def measure_native(
    model: nn.Module, table: SiteTable, tokens: torch.Tensor, on_site: Callable[[str], None] | None = None
) -> dict[str, dict[str, float]]:
    """Measures every nested site whose inputs may have fewer bits in every format of `DTYPES`, at 16-bit weights.

    Both formats on any machine, so that what was measured holds wherever the model runs later.

    Args:
        model, tokens, on_site: as of `qbe.store.sensitivity.measure`.

    Returns:
        site name -> format -> KL, nats per token. A format is left out where nothing changed: a model may multiply by a
        layer's weight and never call the layer, and then nothing was measured.

    Raises:
        QBEError: a nested site lost its 16-bit original.
    """
    forms = {site.name: list(DTYPES) for site in table.nested if len(site.activation_gears) > 1 and site.expert is None}
    found = lowered_divergence(model, table, tokens, forms, multiplied_in, on_site)
    return {name: {form: kl for form, kl in of.items() if kl > 0} for name, of in found.items()}


@contextmanager
def multiplied_in(layer: nn.Linear, form: str) -> Iterator[None]:
    """Inside, a nested layer whose rows all read the same bits multiplies [..., K] in this format, whatever runs it.

    In float32, as `qbe.kernels.reference.eight_bit_rows.linear` does; the result has the dtype of its inputs.
    """
    weight: NestedTensor = layer.weight  # type: ignore[assignment]
    bits, widest = int(weight.bits[0]) & 255, weight.layout.total_bits
    full = weight.dequantise(bits)
    # The scale of an output comes from the bound that a GPU takes it from; 16-bit weights may be beyond it.
    bound = scales.largest_of_rows(weight.meta, weight.exponent, weight.layout, min(bits, widest)).to(full.device)
    largest = torch.maximum(bound, full.abs().amax(-1).float())

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = eight_bit_rows.linear(x.reshape(-1, x.shape[-1]), full, DTYPES[form], largest).to(x.dtype)
        return (y if layer.bias is None else y + layer.bias).view(*x.shape[:-1], full.shape[0])

    layer.forward = forward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del layer.forward  # the class's method shows again
