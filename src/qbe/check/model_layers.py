"""The layers that are about the artifact: model, format, validation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from qbe.check.report import Finding
from qbe.check.subject import Subject
from qbe.server.settings import Weights
from qbe.store.provenance import NAME

_REGRESS = "run 'qbe regress --candidate {path}'"


def model_layer(subject: Subject) -> Iterator[Finding]:
    """Whether QBE runs models of this kind, and what its clients can ask for."""
    size = f"{subject.parameters / 1e6:.1f} million parameters"
    yield Finding("model", "pass", f"{subject.family}, {size}, {str(subject.dtype).removeprefix('torch.')}")
    if subject.situation.alone:
        yield Finding("model", "warn", "every sequence of this model has a forward of its own: requests share no step",
                      "expect the speed of one request at a time, or choose another model")  # fmt: skip
    if not subject.chats:
        yield Finding("model", "warn", "the tokenizer has no chat template: chat requests are refused",
                      "add chat_template.jinja, or serve completions only")  # fmt: skip


def format_layer(subject: Subject, weights: Weights) -> Iterator[Finding]:
    """The nested store and what is written about it."""
    if not subject.nested:
        yield Finding("format", "warn", "no nested store: the first start makes one, in its cache",
                      f"run 'qbe quantize {subject.path} -o FOLDER'")  # fmt: skip
        return
    gears = ", ".join(map(str, subject.gears))
    yield Finding("format", "pass", f"nested store of {gears} bits")
    if weights.most_bits is not None and weights.most_bits not in subject.gears:
        yield Finding("format", "fail", f"weights.most_bits is {weights.most_bits}, but the store has {gears}",
                      f"set it to one of {gears}")  # fmt: skip
    if not subject.measured:
        yield Finding("format", "warn", "no sensitivities: the first start estimates them",
                      "run 'qbe quantize' again")  # fmt: skip
    if subject.made is None:
        yield Finding("format", "warn", f"no {NAME}: a changed byte is not noticed", "run 'qbe quantize' again")


def validation_layer(subject: Subject, settings: str | None) -> Iterator[Finding]:
    """Whether a verdict of `qbe regress` is about exactly these bytes and settings.

    Args:
        settings: text of the settings file; None: there is none.
    """
    remedy = _REGRESS.format(path=subject.path)
    if subject.made is None:
        yield Finding("validation", "warn", f"no {NAME}, so that no verdict is noted here",
                      "'qbe promote' asks for one of its own")  # fmt: skip
        return
    mine = [one for one in subject.made["verdicts"] if one.get("digest") == subject.digest]
    if not mine:
        old = bool(subject.made["verdicts"])
        saw = "the verdicts here are about other content than there is now" if old else "no verdict"
        yield Finding("validation", "warn", saw, remedy)
        return
    digest = f"sha256:{hashlib.sha256((settings or '').encode()).hexdigest()}"
    fitting = [one for one in mine if one.get("settings") == digest]
    last = (fitting or mine)[-1]
    verdict, suite = str(last.get("verdict")), str(last.get("suite"))
    if verdict in ("fail", "anomalous"):
        yield Finding("validation", "fail", f"the verdict of suite {suite} is {verdict}", "do not serve it")
    elif verdict != "pass":
        yield Finding("validation", "warn", f"the verdict of suite {suite} is {verdict}", f"{remedy} with more items")
    elif not fitting:
        yield Finding("validation", "warn", f"passed suite {suite}, but served with other settings",
                      f"{remedy} with these: --serve FILE" if settings is not None else remedy)  # fmt: skip
    else:
        yield Finding("validation", "pass", f"passed suite {suite}")
