"""Counts that were made on a device, on their way to the host without anybody waiting for them."""

from __future__ import annotations

import torch

from qbe.residency.planner import Numbers


class CountedReads:
    """A copy of what a device has counted.

    Args:
        counts: float64 [nested sites, slices], which nobody changes any more.
        tokens: that these are of.
    """

    def __init__(self, counts: torch.Tensor, tokens: int) -> None:
        self.tokens = tokens
        self._copied: torch.cuda.Event | None = None
        if counts.device.type == "cuda":
            self._host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
            self._host.copy_(counts, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(counts.device))
        else:
            self._host = counts

    @property
    def there(self) -> bool:
        """Whether the copy has arrived."""
        return self._copied is None or self._copied.query()

    @property
    def numbers(self) -> Numbers:
        """The counts; once they are there."""
        found: Numbers = self._host.numpy()
        return found
