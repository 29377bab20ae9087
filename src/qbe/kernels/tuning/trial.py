"""A problem made of random numbers: what candidates are compared on, without a weight of the model being touched."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qbe.errors import QBEError
from qbe.format.layout import SliceLayout
from qbe.kernels.cuda.dispatch import PREFILL_ROWS
from qbe.kernels.tuning.tunable import Choice, Config, Problem

EXPONENT = 104  # of the scales: results of random codes then fit float16
NARROW = 512  # outputs of the weights that results are compared on
COPIES = 8  # of the weights that launches are timed on, at most: they should not come out of the L2 cache
SPARE_BYTES = 1 << 29  # of the device's memory, left alone


class _Weights:
    """Weights of a problem in the layout of its kernel, with `outputs` in place of its own."""

    def __init__(self, problem: Problem, tiled: bool, outputs: tuple[int, ...], device: torch.device, read: bool):
        layout = SliceLayout.of(problem.slices)
        k, group = problem.inputs, problem.group_size
        kp = -(-k // group) * group
        self.packed: list[torch.Tensor] = []
        self.meta: list[torch.Tensor] = []
        self.originals: list[torch.Tensor] = []
        self.biases: list[torch.Tensor] = []
        for n in outputs:
            meta = _bytes((2 * len(layout.precisions), n, kp // group), device)
            if tiled:
                from qbe.kernels.triton.linear.tiled.layout import tiled_bytes

                packed = _bytes((tiled_bytes(n, k, layout, group),), device)
                packed[-(-(-n // 64) * 16) :] = 0  # the counters
            else:
                packed = _bytes((layout.total_bits, n * kp // 8), device)
            self.packed.append(packed)
            self.meta.append(meta)
            if problem.original:
                # One that no row reads may be of any size.
                shape = (n, k) if read else (1, 16)
                self.originals.append((torch.randn(shape, device=device) * 0.1).to(problem.dtype))
            if problem.bias:
                self.biases.append(torch.randn(n, device=device).to(problem.dtype))


class TuningTrial:
    """Launches of a choice's kernel with any configuration.

    Args:
        choice: what is tuned.

    Attributes:
        copies: weights of the full size; launches go around them.
        precisions: that a launch may be timed at.

    Raises:
        QBEError: the device has not enough free memory.
    """

    def __init__(self, choice: Choice) -> None:
        self.problem, self.device = choice.problem, choice.device
        self.tiled = choice.tunable.name != "plain"
        self.batch_invariant = choice.tunable.name != "batch"
        problem, layout = self.problem, SliceLayout.of(self.problem.slices)
        self.precisions = layout.precisions
        # The batch kernel serves fewer than the next power of two where prefill begins.
        self.rows = min(problem.rows, PREFILL_ROWS - 1) if self.tiled else problem.rows
        size = sum(problem.outputs) * problem.inputs * (layout.total_bits + 1) // 8
        self.copies = max(1, min(COPIES, 3 * self._cache_bytes() // max(1, size)))
        self._check_memory(size * self.copies)
        # Sizes that Triton compiles for as it does for the full ones: whether 16 divides them is all it sees.
        narrow = tuple(n if n <= NARROW else NARROW + n % 16 for n in problem.outputs)
        self._narrow = _Weights(problem, self.tiled, narrow, self.device, read=True)
        self._full = [
            _Weights(problem, self.tiled, problem.outputs, self.device, read=False) for _ in range(self.copies)
        ]
        self._x = torch.randn(self.rows, problem.inputs, device=self.device).to(problem.dtype)
        self._bits = self.precision_words([self.precisions[0]])

    def precision_words(self, widths: Sequence[int]) -> torch.Tensor:
        """Bits of the rows, int32 [rows]: these in turn."""
        values = [widths[i % len(widths)] for i in range(self.rows)]
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def results(self, config: Config) -> list[torch.Tensor]:
        """What the kernel makes of narrow weights, at each precision and at all of them mixed."""
        widths = [*self.precisions, *([16] if self.problem.original else [])]
        asked = [[w] for w in widths] + ([widths] if self.rows > 1 else [])
        return [self._run(config, self._narrow, self.precision_words(a)) for a in asked]

    def launch(self, config: Config, copy: int) -> torch.Tensor:
        """A launch on weights of the full size, at the bits of `set_bits`."""
        return self._run(config, self._full[copy % self.copies], self._bits)

    def set_bits(self, width: int) -> None:
        """What launches from now on read, those in a CUDA graph too; a width below 16."""
        self._bits.fill_(width)

    def _run(self, config: Config, w: _Weights, bits: torch.Tensor) -> torch.Tensor:
        from qbe.kernels.triton.linear.merged import nested_linears
        from qbe.kernels.triton.linear.nested import nested_linear

        slices = self.problem.slices
        if len(w.packed) > 1:
            count = len(w.packed)
            return nested_linears(
                self._x, w.packed, w.meta, [bits] * count, w.originals, w.biases, slices, [EXPONENT] * count,
                self.batch_invariant, config,
            )  # fmt: skip
        original, bias = w.originals[0] if w.originals else None, w.biases[0] if w.biases else None
        return nested_linear(
            self._x, w.packed[0], w.meta[0], bits, original, bias, slices, EXPONENT, self.problem.float32_output,
            self.batch_invariant, config,
        )  # fmt: skip

    def _cache_bytes(self) -> int:
        return torch.cuda.get_device_properties(self.device).L2_cache_size if self.device.type == "cuda" else 0

    def _check_memory(self, needed: int) -> None:
        if self.device.type == "cuda" and needed + SPARE_BYTES > torch.cuda.mem_get_info(self.device)[0]:
            raise QBEError(f"a trial needs {needed / 1e6:.0f} MB of {self.device}, which has not so much left")


def _bytes(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
