"""Commands about models and their stores: `qbe quantize`, `qbe pull` and `qbe info`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from qbe.cli.console import err, out, print_json
from qbe.cli.options import DEFAULT, Device, DeviceMemory, Json, KVTokens, Model, MostBits, Originals, Trust
from qbe.cli.update import update as bring_up_to_date
from qbe.errors import QBEError


def quantize(
    model: Annotated[
        str | None, typer.Argument(help="hub id, transformers folder, GGUF file or built-in name")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="folder to write; new, or empty")] = None,
    group_size: Annotated[int, typer.Option(help="inputs that share a scale, a multiple of 64")] = 64,
    slices: Annotated[str, typer.Option(help="bits of the slices, most significant first")] = "4,2,2",
    calibrate: Annotated[
        Path | None,
        typer.Option(help="text, or set of `qbe calibrate build`, to make it on (minutes; better at 6 bits and fewer)"),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="measure the sensitivity of each site by itself, which takes minutes")
    ] = False,
    update: Annotated[
        Path | None, typer.Option(help="a folder that this command wrote, to bring up to date in place")
    ] = None,
    from_records: Annotated[
        bool, typer.Option("--from-records", help="with --update: how often experts were used while it was served")
    ] = False,
    device: Device = "auto", as_json: Json = False,
) -> None:  # fmt: skip
    """Write a model's nested store and its sensitivities as a folder that every command takes."""
    if update is not None:
        making = (model, output, group_size, slices, calibrate, measure, device)
        bring_up_to_date(update, from_records, making != (None, None, 64, "4,2,2", None, False, "auto"), as_json)
        return
    if from_records:
        raise QBEError("--from-records is for a store that was served: name it with --update FOLDER")
    if model is None or output is None:
        raise QBEError("say which model to quantise and where to write: qbe quantize MODEL -o FOLDER")
    import torch

    from qbe.engine.devices import pick_device
    from qbe.hardware import detect
    from qbe.store.nested_linears import NestedWeightConfig
    from qbe.store.provenance import tried_on
    from qbe.store.quantise import quantise_to

    try:
        widths = tuple(int(s) for s in slices.split(","))
    except ValueError:
        raise QBEError(f"--slices '{slices}' is not a list of whole numbers; give 4,2,2 for example") from None
    config = NestedWeightConfig(group_size, widths)
    quantise_to(
        model, output, config, pick_device(device), text=calibrate, measure=measure or None, progress=err.is_terminal
    )
    described = _about(str(output))
    tried_on(output, detect(torch.device("cpu")))
    if as_json:
        print_json(described)
    else:
        store = described["store"]
        out.print(
            f"wrote {output}: {store['nested_sites']} sites, {store['bits_per_weight']:.2f} bits a weight",
            highlight=False,
        )
        if store["allocation_check"]:
            from qbe.cli.info import check_table

            out.print(check_table(store["allocation_check"]))


def pull(
    name: Annotated[str, typer.Argument(help="hub id, folder, GGUF file or built-in name")] = DEFAULT,
    as_json: Json = False,
) -> None:
    """Fetch a model into the cache and print where it lies."""
    from qbe.models import pull as fetch

    path = fetch(name, progress=err.is_terminal)
    if as_json:
        print_json({"name": name, "path": str(path)})
    else:
        print(path)


def info(
    model: Model = DEFAULT,
    verify: Annotated[bool, typer.Option("--verify", help="read and compare every file of a QBE folder")] = False,
    device: Annotated[
        str | None, typer.Option(help="say what memory an engine there will take, and load nothing: auto, cpu or cuda")
    ] = None,
    originals: Originals = None, most_bits: MostBits = None, kv_tokens: KVTokens = None, trust: Trust = False,
    experts: Annotated[
        Path | None, typer.Option(help="write a picture: layer by expert, how often each is used and its bits (PNG)")
    ] = None,
    device_memory: DeviceMemory = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Show a model's sites and roles, its nested store and this machine; with --device the memory it will take, with
    --device-memory what of its store will be where."""
    if trust and (verify or experts is not None or device is not None or device_memory is not None):
        raise QBEError("--trust takes files as they are, and goes with --json alone: leave it or the others out")
    if device_memory is not None:
        if originals not in (None, "none") or most_bits is not None:
            raise QBEError("--device-memory does not go with --originals or --most-bits: leave one of them out")
        _residency(model, device or "auto", device_memory, kv_tokens, experts, as_json)
        return
    if experts is not None:
        _experts(model, device, experts, as_json)
        return
    if device is not None:
        _memory(model, device, originals, most_bits, kv_tokens, as_json)
        return
    described = _about(model, verify=verify, trust=trust)
    if as_json:
        print_json(described)
        return
    from qbe.cli.info import render

    out.print(render(described))


def _experts(model: str, device: str | None, picture: Path, as_json: bool) -> None:
    import torch

    from qbe.eval.expert_map import describe, draw
    from qbe.store.prepare import prepare

    if device is not None:
        raise QBEError("--device says what memory an engine will take and loads nothing: leave it out, or --experts")
    table = prepare(model, device=torch.device("cpu"), progress=err.is_terminal).table
    draw(table, model, picture)
    if as_json:
        print_json({"model": model, "picture": str(picture), "experts": describe(table)})
    else:
        print(f"wrote {picture}")


def _residency(
    model: str, device: str, device_memory: str, kv_tokens: int | None, picture: Path | None, as_json: bool
) -> None:
    import torch

    from qbe.engine.devices import pick_device
    from qbe.engine.memory import predicted
    from qbe.eval.expert_map import describe, draw
    from qbe.models import pull as fetch
    from qbe.residency.at_start import at_start
    from qbe.residency.size import parse_size
    from qbe.store.prepare import prepare

    where, bound = pick_device(device), parse_size("--device-memory", device_memory)
    memory = predicted(
        fetch(model, progress=err.is_terminal), where, originals="none", kv_tokens=kv_tokens, free=bound
    )  # fmt: skip
    table = prepare(
        model, device=torch.device("cpu"), originals="none", need_sensitivity=picture is not None,
        progress=err.is_terminal,
    ).table  # fmt: skip
    found = at_start(table, where, bound, memory.describe()["total"])
    if picture is not None:
        draw(table, model, picture, found)
    if as_json:
        experts = {} if picture is None else {"picture": str(picture), "experts": describe(table, found)}
        print_json({"model": model, "device": str(where), "residency": found.describe(), **experts})
    else:
        print(f"{model} on {where} within {device_memory}: {found.line()}")
        if picture is not None:
            print(f"wrote {picture}")


def _memory(
    model: str, device: str, originals: str | None, most_bits: int | None, kv_tokens: int | None, as_json: bool
) -> None:
    from qbe.engine.devices import pick_device
    from qbe.engine.memory import predicted
    from qbe.models import pull as fetch

    where = pick_device(device)
    path = fetch(model, progress=err.is_terminal)
    memory = predicted(path, where, originals=originals, most_bits=most_bits, kv_tokens=kv_tokens)
    if as_json:
        print_json({"model": model, "device": str(where), "memory": memory.describe()})
    else:
        print(f"{model} on {where} will take {memory.line()}")


def _about(model: str, verify: bool = False, trust: bool = False) -> dict[str, Any]:
    from qbe.cli.info import about

    return about(model, verify=verify, trust=trust, progress=err.is_terminal)
