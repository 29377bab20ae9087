"""`qbe promote` and `qbe rollback`: what may become the stable release."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path

from qbe.errors import QBEError
from qbe.models import pull
from qbe.releases.folder import MOST_EARLIER, Release, ReleaseFolder, State
from qbe.releases.verdict import Verdict
from qbe.store.provenance import content_digest


class NotProven(QBEError):
    """The verdict is no pass."""


def promote(
    model: Path, verdict: Verdict, folder: ReleaseFolder, alias: str = "stable", progress: bool = False
) -> State:
    """Gives a model an alias, at once.

    What was stable becomes previous; what is stable already stays as it is.

    Args:
        model: folder or GGUF file. verdict: about it.
        alias: `stable` or `candidate`.
        progress: show a bar.

    Raises:
        NotProven: a verdict that is not `pass`.
        QBEError: another alias, a damaged model, one that the verdict is not about, a folder that cannot be written.
    """
    if alias not in ("stable", "candidate"):
        raise QBEError(f"--alias '{alias}' cannot be given: choose stable or candidate")
    if verdict.verdict != "pass":
        because = f" ({', '.join(verdict.because)})" if verdict.because else ""
        raise NotProven(f"{model} is not promoted: its verdict is {verdict.verdict}{because}; see its report.html")
    there = pull(str(model.expanduser().absolute()), progress=False).resolve()
    digest = content_digest(there, cached=False, progress=progress)
    if digest != verdict.digest:
        raise QBEError(
            f"{model} is not promoted: the verdict is about {short(verdict.digest)}, and this is {short(digest)}; "
            "run 'qbe regress' with it"
        )
    with folder.changing() as state:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        given = Release(folder.named(there), digest, verdict.sha256, verdict.suite, verdict.settings, now)
        there_now = state.aliases()[alias]
        if there_now is not None and (there_now.path, there_now.digest) == (given.path, given.digest):
            return state
        state = _with(state, alias, given)
        folder.switch(state, {verdict.sha256: verdict.content})
    return state


def _with(state: State, alias: str, release: Release) -> State:
    if alias == "candidate":
        return replace(state, candidate=release)
    left = state.candidate
    if left is not None and (left.path, left.digest) == (release.path, release.digest):
        left = None
    earlier = state.earlier if state.stable is None else (*state.earlier, state.stable)
    return State(release, left, earlier[-MOST_EARLIER:])


def rollback(folder: ReleaseFolder, progress: bool = False) -> State:
    """Makes the previous release stable again; the one before it is previous then.

    Raises:
        QBEError: there is none, or its folder is not what was promoted; then nothing has changed.
    """
    none = QBEError(f"there is no previous release in '{folder.path}': nothing was promoted before the stable one")
    if folder.state().previous is None:  # without making the folder
        raise none
    with folder.changing() as state:
        back = state.previous
        if back is None:
            raise none
        there = folder.target(back)
        if not there.exists():
            raise QBEError(f"the previous release, {there}, is gone: promote another with 'qbe promote'")
        found = content_digest(there, progress=progress)
        if found != back.digest:
            raise QBEError(
                f"the previous release, {there}, has changed since it was promoted: it was {short(back.digest)} and is "
                f"{short(found)}; promote another with 'qbe promote'"
            )
        state = State(back, state.candidate, state.earlier[:-1])
        folder.switch(state, {})
    return state


def short(digest: str) -> str:
    """A digest that a line has room for."""
    kind, _, digits = digest.partition(":")
    return f"{kind}:{digits[:12]}"
