"""Answers that are watched: `qbe chat --live`, `qbe explain --trace`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from qbe.cli.console import out
from qbe.errors import QBEError

if TYPE_CHECKING:
    from qbe.budget import Budget
    from qbe.engine.engine import Engine, Result
    from qbe.engine.sampling.sampling_params import SamplingParams
    from qbe.explain.trace import Trace

_FRAMES = 12  # a second, at most


def check_live(as_json: bool) -> None:
    """Raises QBEError where nothing can be drawn."""
    if as_json or not out.is_terminal:
        raise QBEError("--live draws on a terminal: leave it out, or let 'qbe explain --trace FILE' write a picture")


def watch(
    engine: Engine, prompt: Any, params: SamplingParams, budget: Budget, live: bool = False
) -> tuple[Result, Trace]:
    """Answers a prompt; result and trace. `live`: draws it on the terminal meanwhile."""
    from rich.live import Live

    from qbe.engine.result import Request
    from qbe.explain.live import LiveView
    from qbe.explain.trace import Trace
    from qbe.refresh.monitor import Monitor

    key = engine.submit(Request(prompt, params, budget))
    try:
        sequence = engine.sequence(key)
        if sequence.difficulty.monitor is None and engine.core.runner.packed:
            sequence.difficulty.monitor = Monitor(None)  # measures, and changes nothing
        trace = Trace(engine.table.layers)
        view = LiveView(trace, engine.table.gears())
        with Live(view, console=out, refresh_per_second=_FRAMES) if live else nullcontext():
            while not engine.finished(key):
                engine.step()
                view.text += "".join(engine.take_pieces(key))
                trace.follow(sequence, engine.table)
                trace.refreshes = [r.describe() for r in engine.refreshes(key)]
            view.text += "".join(engine.take_pieces(key))
    finally:
        engine.cancel(key)
        result = engine.take_result(key)
    trace.texts = [engine.tokenizer.decode([t]) for t in result.token_ids]
    return result, trace
