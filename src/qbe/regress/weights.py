"""Whether a candidate's weights are its baseline's, as nearly as their precision lets them be, group by group.

A damaged group of 64 weights among millions moves no answer that a suite asks for, but it is not rounding: its error is
many times a step of the quantiser. So the codes are decoded and each group is compared with what it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from qbe.errors import QBEError
from qbe.models import load_model
from qbe.sites import FULL_BITS
from qbe.store import checkpoint
from qbe.store.experts import nested_experts
from qbe.store.nested_linears import nested_linears
from qbe.store.nested_tensor import NestedTensor

GROUP = 64
# Of the root of a group's mean squared error over the step of its range at so many bits. Rounding to nearest has 0.29;
# truncated codes with fitted scales and codes calibrated on a text have more. A scale that is off by half has over 1.6
# from 4 bits on.
MOST_STEPS = 1.25
LEAST_BITS = 4  # that the linear layers of a checkpoint in 16 bits may have been rounded to before
_SAME = 2.0**-6  # relative error of a group of other tensors, beyond the rounding of any 16-bit dtype


@dataclass
class WeightCheck:
    """What was found.

    Attributes:
        sites, groups: compared.
        worst: site and bits -> the error of its worst group, in steps.
        wrong: a line for each site with a group beyond `MOST_STEPS`.
        skipped: why the baseline's weights were not compared; "" where they were.
    """

    sites: int = 0
    groups: int = 0
    worst: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    skipped: str = ""


def check(candidate: Path, store: Path, baseline: Path | None, tick: Callable[[], None]) -> WeightCheck:
    """Codes of the store against the 16-bit weights that they stand for, and these against the baseline's.

    Args:
        candidate: of the 16-bit weights.
        store: folder of its nested store.
        baseline: None where it is elsewhere.
        tick: called for each of `steps` parts.

    Raises:
        QBEError: a model cannot be loaded, or the store does not fit it.
    """
    found = WeightCheck()
    model: nn.Module = load_model(candidate, progress=False).model
    tick()
    if baseline is not None:
        _compare_checkpoints(load_model(baseline, progress=False).model, model, found)
    else:
        found.skipped = "the baseline is not here"
    tick()
    checkpoint.attach(model, store)
    for name, weight in _nested(model):
        found.sites += 1
        original = weight.dequantise(FULL_BITS).float()
        for bits in (b for b in weight.gears if b < FULL_BITS):
            read = weight.at_gear(bits).float()
            _judge(found, f"{name} at {bits} bits", steps_off(original, read, bits, weight.group_size))
    tick()
    return found


steps = 3


def steps_off(original: torch.Tensor, read: torch.Tensor, bits: int, group: int = GROUP) -> torch.Tensor:
    """Root mean squared error of each group of inputs over a step of its range.

    Args:
        original, read: float32 [outputs, inputs].

    Returns:
        float32 [outputs, groups].
    """
    before, now = (_grouped(x, group) for x in (original, read))
    step = (before.amax(-1) - before.amin(-1)) / (2**bits - 1)
    # A group of equal numbers has no steps; what of it is lost counts beside the matrix.
    floor = original.square().mean().sqrt() * 2.0**-bits / 8
    return (now - before).square().mean(-1).sqrt() / step.maximum(floor).clamp_min(torch.finfo(torch.float32).tiny)


def _grouped(x: torch.Tensor, group: int) -> torch.Tensor:
    """[outputs, groups, group]; a last group that is not full has its last number again."""
    missing = -x.shape[1] % group
    return pad(x, (0, missing), mode="replicate").unflatten(1, (-1, group)) if missing else x.unflatten(1, (-1, group))


def _nested(model: nn.Module) -> Iterator[tuple[str, NestedTensor]]:
    yield from ((name, weight) for name, _, weight in nested_linears(model))
    for name, stack in nested_experts(model):
        yield from ((f"{name}.{e}", stack.expert(e)) for e in range(len(stack)))


def _judge(found: WeightCheck, name: str, off: torch.Tensor) -> None:
    worst = float(off.max())
    found.groups += off.numel()
    found.worst[name] = worst
    wrong = off > MOST_STEPS
    if bool(wrong.any()) or not bool(off.isfinite().all()):
        row, group = divmod(int(off.nan_to_num(float("inf")).argmax()), off.shape[1])
        found.wrong.append(f"{name}: {int(wrong.sum())} of {off.numel()} groups are off by more than rounding, output "
                           f"{row} group {group} by {worst:.1f} steps")  # fmt: skip


def _compare_checkpoints(baseline: nn.Module, candidate: nn.Module, found: WeightCheck) -> None:
    """The tensors in 16 bits. Those of linear layers may have been rounded to `LEAST_BITS` before."""
    before, now = dict(baseline.named_parameters()), dict(candidate.named_parameters())
    shapes = [{name: tuple(p.shape) for name, p in of.items()} for of in (before, now)]
    if shapes[0] != shapes[1]:
        other = sorted(set(shapes[0].items()) ^ set(shapes[1].items()))[0]
        found.skipped = f"the two have other tensors: {other[0]} {list(other[1])}"
        return
    linears = {f"{name}.weight" for name, m in candidate.named_modules() if isinstance(m, nn.Linear)}
    for name, tensor in before.items():
        a, b = tensor.detach(), now[name].detach()
        if torch.equal(a, b):
            continue
        for part, (x, y) in enumerate(_matrices(a, b)):
            where = name if a.dim() < 3 else f"{name}[{part}]"
            if name in linears or a.dim() == 3:
                _judge(found, f"{where} in 16 bits", steps_off(x, y, LEAST_BITS))
            elif float((x - y).norm()) > _SAME * float(x.norm()):
                found.wrong.append(f"{where} differs by {float((x - y).norm() / x.norm()):.1%}")


def _matrices(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if a.dim() == 3:
        yield from ((x.float(), y.float()) for x, y in zip(a, b, strict=True))
    else:
        yield (
            a.float().reshape(1, -1) if a.dim() < 2 else a.float(),
            b.float().reshape(1, -1) if b.dim() < 2 else b.float(),
        )


def on_this_machine(device: str) -> str:
    """Why the candidate's products take a slow path here; "" where they do not."""
    from qbe.engine.devices import pick_device
    from qbe.kernels.cpu import native

    try:
        where = pick_device(device)
    except QBEError as error:
        return str(error)
    if where.type == "cpu" and not native.load():
        return "QBE's compiled CPU kernels are not there, so that torch's products run"
    return ""


def describe(found: WeightCheck) -> dict[str, Any]:
    """As JSON: the worst group of every gear rather than of every site."""
    worst: dict[str, tuple[float, str]] = {}
    for name, off in found.worst.items():
        kind = name.rpartition(" at ")[2] if " at " in name else "16 bits"
        worst[kind] = max(worst.get(kind, (0.0, "")), (off, name))
    shown = {kind: {"steps": round(off, 4), "at": name} for kind, (off, name) in sorted(worst.items())}
    return {
        "sites": found.sites,
        "groups": found.groups,
        "wrong": found.wrong,
        "skipped": found.skipped,
        "worst": shown,
    }
