"""`qbe check`: all seven layers of one model on one target."""

from __future__ import annotations

from pathlib import Path

from qbe.check.model_layers import format_layer, model_layer, validation_layer
from qbe.check.report import Finding
from qbe.check.smoke import smoke
from qbe.check.subject import subject
from qbe.check.target_layers import RUNTIMES, decoding_layer, hardware_layer, kernels_layer, policy_layer
from qbe.check.targets import HERE, target
from qbe.errors import QBEError
from qbe.models import pull
from qbe.server.settings_file import load


def check(
    model: str, on: str, serve: Path | None = None, runtime: str = "qbe", run: bool = False, progress: bool = False
) -> list[Finding]:
    """What each layer finds.

    Args:
        model: as `qbe.pull` takes it.
        on: one of `qbe.check.targets.NAMES`.
        serve: settings file.
        runtime: one of `RUNTIMES`.
        run: run a batch, too.
        progress: show bars.

    Raises:
        QBEError: bad input: there is no such model, target or runtime, or the settings are wrong.
    """
    if runtime not in RUNTIMES:
        raise QBEError(f"--runtime '{runtime}' is unknown: choose {' or '.join(RUNTIMES)}")
    if run and (on not in HERE or runtime != "qbe"):
        raise QBEError(
            f"--smoke runs QBE's own engine on this machine: give --target {' or '.join(HERE)}, no --runtime"
        )
    profile, settings, here = target(on), load(serve), on in HERE
    text = None if serve is None else serve.read_text(encoding="utf-8")
    path = pull(model, progress=progress).resolve()
    tried = list(smoke(path, profile, settings)) if run else []  # it may be what a later layer asks for
    try:
        found = subject(path, progress)
    except QBEError as error:
        saw, _, remedy = str(error).partition("; ")
        return [Finding("model", "fail", saw, remedy or "choose another model"), *tried]
    return [
        *model_layer(found),
        *format_layer(found, settings.weights),
        *kernels_layer(found, profile, runtime),
        *hardware_layer(found, profile, settings, runtime, here),
        *decoding_layer(found, profile, settings, runtime),
        *policy_layer(found, profile, settings, runtime, here),
        *validation_layer(found, text),
        *tried,
    ]
