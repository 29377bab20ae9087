"""`qbe quantize`: a model's nested store, its sensitivities and what else is known of it, as a folder."""

from __future__ import annotations

import hashlib
import shutil
import warnings
from pathlib import Path

import torch

from qbe.errors import QBEError
from qbe.files import cache_dir, make_folder
from qbe.hardware import detect
from qbe.models import LoadedModel, load_model, pull
from qbe.models.load import quiet
from qbe.pictures.processor import copy_files
from qbe.sites import SiteTable
from qbe.store import checkpoint, drift_profile, drift_table, expert_use, kept, known, provenance, sensitivity_table
from qbe.store.allocation_check import checked
from qbe.store.calibration_text import WINDOW, CalibrationText, built_in, open_text, template_digest
from qbe.store.draft import writing
from qbe.store.estimating import count_on_text, estimate_model, write_estimated
from qbe.store.expert_use import ExpertUse, count, with_use
from qbe.store.layerwise import NotLayered
from qbe.store.measure import measure_into
from qbe.store.nested_linears import NestedWeightConfig
from qbe.store.nesting import nest_model, smooth_model
from qbe.store.prepare import fingerprint


def quantise_to(
    name: str,
    out: Path,
    config: NestedWeightConfig,
    device: torch.device,
    *,
    text: Path | None = None,
    measure: bool | None = None,
    progress: bool = True,
) -> Path:
    """`qbe quantize`: writes the checkpoint folder of a model, sensitivities included.

    Args:
        measure: whether sensitivities are measured site by site (minutes); None: they are estimated, where the package
            has none; False: there are none.
        text: a text file, or the folder of a set that `qbe calibrate build` wrote, to choose the codes on
            (`qbe.store.calibrate`), and to measure and smooth on; without it weights are rounded, and the built-in text
            is read. What is done of it stays in the cache until the folder is complete, so that the same call goes on
            after an interruption.
        device: where weights are nested and looked at, a layer at a time, and where the model reads the text.

    Raises:
        QBEError: bad input, a target that exists, or a disk that refuses; nothing is left at the target then.
    """
    path = pull(name, progress=progress)
    if checkpoint.is_checkpoint(path):
        raise QBEError(f"{path} is already a QBE checkpoint; give the 16-bit model it was made from")
    given = None if text is None else open_text(text)  # told before minutes of work
    if given is not None:
        make_folder(cache_dir() / "calibration")
        kept.forget(cache_dir() / "calibration")
    with writing(out) as partial:
        loaded = load_model(path, progress=progress)
        with quiet():
            loaded.model.save_pretrained(partial)
            loaded.tokenizer.save_pretrained(partial)
        copy_files(path, partial)
        tokens = keep = None
        if given is not None:
            context = int(getattr(loaded.model.config, "max_position_embeddings", None) or WINDOW)
            tokens = given.windows(loaded.tokenizer, context)
            if given.template not in (None, template_digest(loaded.tokenizer)):
                warnings.warn(f"{given.title} was built with another model's chat template; build a set with --model "
                              f"{name}", stacklevel=2)  # fmt: skip
            digest = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:16]
            keep = cache_dir() / "calibration" / f"{fingerprint(path, config)}-{digest}"
        drift = drift_profile.profile(loaded.model, loaded.tokenizer, name, device, tokens, progress=progress)
        named = {"text": (given or built_in()).title}
        drift_table.write(partial, drift, named)
        use = ExpertUse() if tokens is None else count(loaded.model, tokens, progress=progress)
        if given is not None:
            expert_use.write(partial, use, named)
        known_as = known.find(loaded.model, config) if given is None else None  # what is known is of the built-in text
        folds = smooth_model(
            loaded.model, loaded.tokenizer, config, known_as=known_as, device=device, text=given, progress=progress
        )
        try:
            if tokens is not None:  # for its passes forward and back; the codes are chosen on the CPU
                loaded.model.to(device)  # type: ignore[arg-type]
            table = nest_model(loaded.model, name, config, text=tokens, keep=keep, device=device, progress=progress)
        except torch.OutOfMemoryError as error:
            raise QBEError(f"{device} has too little memory to calibrate {name}; give --device cpu, which goes on "
                           "from what is done") from error  # fmt: skip
        checkpoint.write_nested(partial, loaded.model, name, folds=folds, known_as=known_as)
        if measure is None and known.bring(partial, known_as):
            _check_known(partial, loaded, table, device, progress=progress)
        elif measure is None:
            measure = not _estimated(partial, loaded, table, device, use, given, progress=progress)
        if tokens is None and not (partial / expert_use.NAME).exists():
            expert_use.write(partial, count_on_text(loaded.model, loaded.tokenizer), named)
        del loaded
        if measure:
            measure_into(partial, path, name, device, given, check=True, progress=progress)
        made_on = given or built_in()
        provenance.write(partial, name=name, base=path, profile=detect(device), text=made_on, progress=progress)
    if keep is not None:
        shutil.rmtree(keep, ignore_errors=True)
    return out


def _estimated(
    folder: Path, loaded: LoadedModel, table: SiteTable, device: torch.device, use: ExpertUse,
    text: CalibrationText | None, *, progress: bool,
) -> bool:  # fmt: skip
    """Estimates the sensitivities of a nested model, checks them and writes both; False where it has to be measured."""
    model, tokenizer = loaded.model, loaded.tokenizer
    try:
        found, kv, used = estimate_model(model, tokenizer, table, device, use, text, progress=progress)
    except NotLayered:
        return False
    found = checked(model, tokenizer, with_use(table, used), found, device, text, progress=progress)
    write_estimated(folder, found, kv, used, text)
    return True


def _check_known(
    folder: Path, loaded: LoadedModel, table: SiteTable, device: torch.device, *, progress: bool
) -> None:  # fmt: skip
    """Checks sensitivities that came with the package, where they were not before."""
    found = sensitivity_table.read(folder)
    if found is not None and found.check is None:
        found = checked(loaded.model, loaded.tokenizer, table, found, device, progress=progress)
        if found.check is not None:
            sensitivity_table.add_check(folder, found)
