"""What `qbe info` and `qbe records` show: a model's sites and store, this machine, and the table of past requests."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from qbe.hardware import ORIGINAL
from qbe.records import Record
from qbe.sites import Role, SiteTable
from qbe.tier_formats import NESTED

if TYPE_CHECKING:
    from qbe.store.prepare import PreparedModel


def about(model: str, *, verify: bool = False, trust: bool = False, progress: bool = True) -> dict[str, Any]:
    """A model's sites, roles and nested store, and the machine, as JSON.

    Args:
        verify: read every file of a QBE folder again, and compare its digest.
        trust: take the files of a QBE folder as they are.

    Raises:
        QBEError: whatever is wrong with the model or its files.
    """
    import torch

    from qbe.store import checkpoint, provenance, sensitivity_table
    from qbe.store.experts import nested_experts
    from qbe.store.nested_linears import nested_linears
    from qbe.store.nested_tensor import NestedTensor
    from qbe.store.prepare import prepare, store_folder

    prepared = prepare(model, device=torch.device("cpu"), need_sensitivity=False, trust=trust, progress=progress)
    folder = store_folder(model, progress=progress)
    made = None if trust else provenance.check(folder, cached=not verify, progress=progress)
    if verify and made is None:
        checkpoint.verify(folder)
    table, known = prepared.table, sensitivity_table.read(folder)
    check = None if known is None else known.check
    manifest = checkpoint.read_manifest(folder)
    weights = [weight for _, _, weight in nested_linears(prepared.model)]
    experts = [matrices for _, matrices in nested_experts(prepared.model)]
    nested_bytes = sum(w.nested_bytes() for w in weights) + sum(m.nested_bytes() for m in experts)
    own = {p.data_ptr() for p in prepared.model.parameters() if not isinstance(p, NestedTensor)}
    stacked = sum(math.prod(m.shape) for m in experts)
    tied = sum(w.numel() for w in weights if w.original is not None and w.original.data_ptr() in own)
    return {
        "model": model,
        "type": prepared.model.config.model_type,
        "dtype": str(prepared.model.dtype).removeprefix("torch."),
        "parameters": sum(p.numel() for p in prepared.model.parameters()) - tied + stacked,
        "parameters_read": round(table.reads.weights),
        "layers": table.layers,
        "roles": _roles(table),
        "unknown": [s.name for s in table.unknown],
        "pictures": _pictures(prepared),
        "store": {
            "folder": str(folder),
            "slices": list(manifest.slices),
            "group_size": manifest.group_size,
            "gears": list(table.gears()),
            "nested_sites": len(table.nested),
            "nested_parameters": table.nested_parameters,
            "nested_bytes": nested_bytes,
            "bits_per_weight": round(8 * nested_bytes / table.nested_parameters, 4),
            "sensitivity_measured": table.measured,
            "sensitivity_estimated": sensitivity_table.estimated(folder),
            "allocation_check": None if check is None else check.describe(),
            "kv_sensitivity_measured": table.kv_measured,
            "checksums_verified": verify,
        },
        "provenance": None if made is None else {key: value for key, value in made.items() if key != "pending"},
        "hardware": hardware(table.gears()),
    }


def _pictures(prepared: PreparedModel) -> dict[str, Any] | None:
    """Whether a model with a tower reads pictures here, and the tower's bytes; None for a model of text."""
    from qbe.pictures.tower import tower_of

    sites = [s for s in prepared.table if s.role in (Role.VISION_ENCODER, Role.PROJECTOR)]
    if not sites:
        return None
    tower = tower_of(prepared.model, prepared.name, prepared.tokenizer)
    why = tower if isinstance(tower, str) else None
    nbytes = sum(s.parameters for s in sites) * prepared.model.dtype.itemsize
    return {"read": why is None, "why": why, "tower_bytes": nbytes, "tower_nested": False}


def hardware(gears: Sequence[int] = (4, 6, 8, 16)) -> dict[str, Any]:
    """This machine: device, memory, threads, which kernels serve it and the versions that matter.

    `profile`, `tiers` and `native_formats` are those of the device that an engine takes by itself (CUDA if there is
    one): what it runs natively, what the four precision tiers ask for on it, and for each format of torchao's null or
    the line that refuses it. `kernel_cache` is what the disk holds of tuned launch configurations for it.

    Args:
        gears: precisions of the store that the tiers are read from.
    """
    import os

    import torch
    import torchao
    import transformers

    from qbe.engine.devices import pick_device
    from qbe.hardware import detect
    from qbe.kernels.cpu.build import backend
    from qbe.kernels.tuning.store import shared
    from qbe.kernels.tuning.tunable import hardware as tuned_for
    from qbe.store.native_formats import availability
    from qbe.tier_formats import tier_formats
    from qbe.version import __version__

    device = pick_device("auto")
    profile = detect(device)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "cpu_kernel": backend(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpus": gpus,
        "profile": profile.describe(),
        "tiers": {str(tier): form.describe() for tier, form in tier_formats(profile, gears).items()},
        "native_formats": availability(profile),
        "kernel_cache": shared.summary(tuned_for(device)),
        "versions": {
            "qbe": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torchao": torchao.__version__,
            "transformers": transformers.__version__,
        },
    }


def _roles(table: SiteTable) -> list[dict[str, Any]]:
    roles: dict[str, dict[str, Any]] = {}
    for site in table:
        row = roles.setdefault(
            str(site.role), {"role": str(site.role), "sites": 0, "parameters": 0, "nested": 0, "gears": []}
        )
        row["sites"] += 1
        row["parameters"] += site.parameters
        row["nested"] += site.nested
        row["gears"] = sorted({*row["gears"], *site.gears})
    return list(roles.values())


def check_table(check: dict[str, Any]) -> Table:
    """What a store's assignments were measured to do (`qbe.store.checked`), for a terminal."""
    read = f"{check['passages']} passages of {check['tokens']} tokens"
    rows = Table(title=f"divergence of assignments, {read}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("bits", "predicted", "measured", "uniform", "ratio", "95 %", "uncorrected"):
        rows.add_column(column, justify="right")
    for row in check["averages"]:
        rows.add_row(
            f"{row['bits']:.4g}", f"{row['predicted']:.3g}", f"{row['measured']:.3g}", f"{row['uniform']:.3g}",
            f"{row['ratio']:.2f}", f"{row['low']:.2f} to {row['high']:.2f}", f"{row['uncorrected']:.2f}",
        )  # fmt: skip
    return rows


def render(described: dict[str, Any]) -> RenderableType:
    """The result of `about` for a terminal."""
    store, machine = described["store"], described["hardware"]
    roles = Table(title="sites", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column, justify in (("role", "left"), ("sites", "right"), ("nested", "right"), ("weights", "right")):
        roles.add_column(column, justify=justify)  # type: ignore[arg-type]
    roles.add_column("gears")
    for row in described["roles"]:
        gears = " ".join(map(str, row["gears"]))
        roles.add_row(row["role"], str(row["sites"]), str(row["nested"]), f"{row['parameters']:,}", gears)
    unknown = described["unknown"]
    how = "estimated" if store.get("sensitivity_estimated") else "measured"
    measured = [
        f"sensitivity of {of} {how if store[key] else 'not measured'}"
        for of, key in (("weights", "sensitivity_measured"), ("KV cache", "kv_sensitivity_measured"))
    ]
    parts: list[RenderableType] = [
        Text(
            f"{described['model']}  ({described['type']}, {described['parameters'] / 1e6:.1f} M parameters, "
            f"{described['layers']} layers, {described['dtype']})",
            style="bold",
        ),
        roles,
        Text(f"unknown, at 16 bits: {', '.join(unknown) if unknown else 'none'}", style="yellow" if unknown else "dim"),
        Text(
            f"nested store: slices {tuple(store['slices'])}, group {store['group_size']}, "
            f"{store['nested_sites']} sites, {store['nested_bytes'] / 1e6:.1f} MB, "
            f"{store['bits_per_weight']:.3f} bits a weight"
        ),
        Text(f"  in {store['folder']}; {', '.join(measured)}"),
        *([check_table(store["allocation_check"])] if store["allocation_check"] else []),
        *_seen(described["pictures"], described["dtype"]),
        *_provenance(described["provenance"]),
        Text(
            f"machine: {machine['cpu']}, {machine['threads']} threads, CPU kernel {machine['cpu_kernel']}, "
            f"GPUs: {', '.join(machine['gpus']) or 'none'}"
        ),
        Text("  " + ", ".join(f"{k} {v}" for k, v in machine["versions"].items()), style="dim"),
        *_profile(machine),
    ]
    return Group(*parts)


def _seen(pictures: dict[str, Any] | None, dtype: str) -> list[RenderableType]:
    """A line about pictures, where the model has a tower."""
    if pictures is None:
        return []
    size = f"tower and projector {pictures['tower_bytes'] / 1e6:.1f} MB, not nested: {dtype} at every budget"
    return [Text(f"pictures: {pictures['why'] or 'read'}; {size}")]


def _provenance(made: dict[str, Any] | None) -> list[RenderableType]:
    """Nothing for a store in the cache, for a folder of an older version, and for one that was to be trusted."""
    if made is None:
        return []
    text, name = made["calibration"]["text"], made["hardware"]["made_for"]["name"]
    on = f", calibrated on {text}" if text else ""
    return [Text(f"  made of {made['base']['name']} by QBE {made['qbe']} on {name}{on}; {len(made['files'])} files")]


def _profile(machine: dict[str, Any]) -> list[RenderableType]:
    """The device that an engine takes by itself, and the precision tiers on it."""
    profile = machine["profile"]
    capability = f"compute capability {profile['capability']}, " if profile["capability"] else ""
    extensions = f", extensions: {' '.join(profile['extensions']) or 'none'}" if profile["family"] == "cpu" else ""
    torchao = [name for name, refused in machine["native_formats"].items() if refused is None]
    tiers = Table(
        title="precision tiers, as far as this device goes",
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
    )
    for column in ("tier", "weights", "activations", "usual format", "why"):
        tiers.add_column(column, no_wrap=column != "why")
    for tier, form in machine["tiers"].items():
        sides = [
            f"{name} {bits}" if name in (NESTED, ORIGINAL) else name
            for name, bits in (
                (form["weight_format"], form["weight_bits"]),
                (form["activation_format"], form["activation_bits"]),
            )
        ]
        tiers.add_row(tier, *sides, form["specification"] or "-", form["why"])
    return [
        Text(
            f"device: {profile['device']}, {profile['name']} ({profile['family']}), {capability}"
            f"{profile['memory_bytes'] / 1e9:.1f} GB, {profile['processors']} processors{extensions}"
        ),
        Text(
            f"  runs natively: {' '.join(profile['formats']) or 'nothing below float32'}; "
            f"of torchao's formats: {' '.join(torchao) or 'none'}"
        ),
        Text(f"  activation gears: {_activations(profile)}"),
        tiers,
        *_kernel_cache(machine["kernel_cache"]),
    ]


def _kernel_cache(kept: dict[str, Any]) -> list[RenderableType]:
    """A line about tuned kernels, where there are any."""
    if not kept["tuned"]:
        return []
    return [
        Text(
            f"tuned kernels: {kept['tuned']} problems, {kept['mean_speedup']:.2f}x the generic configurations on "
            f"average; {kept['compile_seconds']:.0f} s of compilation, {kept['tuning_seconds']:.1f} s of trials"
        ),
        Text(f"  in {kept['file']}", style="dim"),
    ]


def _activations(profile: dict[str, Any]) -> str:
    """The activation gears of a described profile, and what 8 bits are there."""
    native = profile["activation_formats"].get("8")
    eight = "int8, a scale per group"
    if native is None:
        eight += " (rounded to, not multiplied in)"
    elif profile["capability"]:
        eight += f"; long prompts {native}, a scale per row, at sites that bear it"
    return f"16 ({ORIGINAL}), 8 ({eight})"


def records_table(rows: Sequence[Record], total: int) -> RenderableType:
    """Records as a table that fits 80 columns, newest first. The JSON form has every field."""
    table = Table(box=None, padding=(0, 1, 0, 0), caption=f"{len(rows)} of {total} records", caption_justify="left")
    for column in ("time (UTC)", "id", "policy", "class"):
        table.add_column(column, no_wrap=True)
    for column in ("score", "bits", "in", "out", "MB/token"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("end", no_wrap=True)
    for r in rows:
        table.add_row(
            r.time[5:19].replace("T", " "),
            r.id[:8],
            r.policy,
            (r.prompt_class or "-").replace("question_answering", "questions").replace("_output", ""),
            "-" if r.score is None else f"{r.score:.2f}",
            "-" if r.average_weight_bits is None else f"{r.average_weight_bits:.2f}",
            str(r.prompt_tokens),
            str(r.completion_tokens),
            f"{r.bytes_per_token / 1e6:.1f}",
            r.finish_reason,
        )
    return table
