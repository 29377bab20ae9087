"""Programmatic dependent launch: a kernel may be launched before the one ahead of it has ended (Hopper and later).

A decode step is a chain of short kernels, and what a launch takes by itself is a third of some of them. Launched early,
a kernel's programs wait on the device: `gdc_wait` returns once the kernel ahead is complete and what it wrote is there.

Who is launched so keeps to this: it waits before it writes, and before it reads what may still be written. So whatever
has waited knows that all before it is complete. A kernel that others than QBE's may follow lets the next one begin only
once it has waited itself (`follow`): Inductor's kernels wait for what their direct predecessor writes and for nothing
that is older.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def early(device: torch.device) -> dict[str, bool]:
    """A launch's arguments: the kernel's constant EARLY, and Triton's option where it is true."""
    hopper = device.type == "cuda" and torch.cuda.get_device_properties(device).major >= 9
    possible = hopper and torch.version.hip is None
    return {"EARLY": possible, **({"launch_pdl": True} if possible else {})}


@triton.jit
def lead(EARLY: tl.constexpr):
    """Of a kernel that one of QBE's follows: that one may begin, and wait, while this one waits."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def follow(EARLY: tl.constexpr):
    """Of a kernel that any other may follow."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
