"""How far a rollout is, in a file that a restart goes on from."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from qbe.files import reason, write_text
from qbe.server.rollout.settings import Rollout

Phase = Literal["progressing", "paused", "aborted", "successful"]
FORMAT = 1


@dataclass(frozen=True)
class State:
    """How far it is.

    Attributes:
        step: number of the step, from 0.
        elapsed_s: seconds that it has run for.
        cause: why it was aborted, in one line; empty where it was not.
    """

    phase: Phase = "progressing"
    step: int = 0
    elapsed_s: float = 0.0
    cause: str = ""


def identity(rollout: Rollout) -> str:
    """Of a rollout: another table is another one, with a state of its own."""
    described = json.dumps(rollout.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()[:12]


class StateFile:
    """The states of rollouts beside a ledger, a file for each.

    Args:
        ledger: the ledger's file.
    """

    def __init__(self, ledger: Path) -> None:
        self._ledger = ledger

    def path(self, id: str) -> Path:
        """Of the rollout of this identity."""
        return self._ledger.with_name(f"{self._ledger.stem}.rollout-{id}.json")

    def read(self, id: str, steps: int) -> State:
        """What was written last; the beginning where nothing was. A file that cannot be read is an abort: it may have
        said so."""
        path = self.path(id)
        try:
            return _parsed(json.loads(path.read_bytes()), steps)
        except FileNotFoundError:
            return State()
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            why = reason(error) if isinstance(error, OSError) else repr(error)
            return State("aborted", cause=f"its state in {path} cannot be read: {why}")

    def write(self, id: str, state: State) -> None:
        """Whole or not at all. Raises QBEError."""
        write_text(self.path(id), json.dumps({"format": FORMAT, **asdict(state)}, indent=1) + "\n")


def _parsed(found: dict[str, Any], steps: int) -> State:
    if found["format"] != FORMAT or found["phase"] not in get_args(Phase):
        raise ValueError(f"format {found['format']}, phase {found['phase']!r}")
    step, elapsed, cause = found["step"], float(found["elapsed_s"]), str(found["cause"])
    if not (isinstance(step, int) and 0 <= step < steps and 0 <= elapsed < float("inf")):
        raise ValueError(f"step {step!r} after {elapsed} s")
    return State(found["phase"], step, elapsed, cause)
