"""Where everything that a server sees of its work comes together, and from where it is told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbe.engine.engine import Engine
from qbe.engine.memory import of_engine
from qbe.engine.result import Result
from qbe.server.energy.governor import Governor
from qbe.server.energy.meter import find
from qbe.server.energy.spending import MODEL, Spending, assumed_watts
from qbe.server.errors import APIError
from qbe.server.health.monitor import HealthMonitor
from qbe.server.observe import logs
from qbe.server.observe.live import LiveView
from qbe.server.observe.metrics import Metrics
from qbe.server.observe.report import report
from qbe.server.observe.steps import StepObserver
from qbe.server.observe.traces import Traces
from qbe.server.rollout.controller import RolloutController
from qbe.server.settings import Settings
from qbe.store.expert_use import moved, stored_use, top_tenth

if TYPE_CHECKING:
    from qbe.server.contract import Terms
    from qbe.server.exchange import EngineRequest, Exchange

log = logging.getLogger(__name__)


class Observer:
    """Sees steps, answers and requests.

    Args:
        model: its name.
        settings: those in use now.
        traces: told of every request.
        ledger: the file that a rollout's state lies beside.
    """

    def __init__(
        self, model: str, settings: Callable[[], Settings], traces: Traces | None, ledger: Path
    ) -> None:  # fmt: skip
        self.metrics, self.live = Metrics(model), LiveView()
        self._model, self._settings, self._traces = model, settings, traces
        self.governor = Governor(lambda: settings().energy)
        self.rollout = RolloutController(lambda: settings().rollout, ledger, self.metrics.rollout)
        self.health = HealthMonitor(settings, self.metrics.health, self.rollout)
        self.settings_refused: str | None = None
        self._steps: StepObserver | None = None
        self._spending: Spending | None = None

    def begin(self, engine: Engine) -> None:
        """There is an engine. Raises QBEError for settings that it cannot be watched by."""
        core = engine.core
        self.health.begin(engine)
        assumed, memory = assumed_watts(core.device), of_engine(core)
        self.metrics.took(memory)
        log.info("%s on %s takes %s", self._model, core.device, memory.line())
        self._steps = StepObserver(core)
        self._spending = Spending(find(core.device), lambda: self._settings().energy.watts or assumed)

    def step(self, seconds: float) -> dict[str, float]:
        """In the engine's thread: a step has run. Returns the joules of the answers in it."""
        step = None if self._steps is None else self._steps.last()
        if step is None or self._spending is None:
            return {}
        self.metrics.step(step)
        return self._spending.step(seconds, step.shares)

    @property
    def energy(self) -> str:
        """Who says what is spent: `nvml`, `rapl` or `model`."""
        return MODEL if self._spending is None else self._spending.source

    async def look(self) -> bool:
        """About once a second: keep within the energy's budget, and look after the answers. False: a look that goes
        well is no news."""
        self.health.look()
        await asyncio.to_thread(self.rollout.look)  # which may write
        await self.governor.look(self._spending)
        return False

    def scrape(self, engine: Engine | None) -> None:
        """Somebody asks for the metrics."""
        use = None if engine is None else engine.expert_use
        if engine is not None and use is not None:
            self.metrics.experts(use.tokens, top_tenth(use), moved(use, stored_use(engine.table)))
        if self._spending is not None:
            governor = self.governor
            self.metrics.energy(self._spending.watts, self._spending.source, governor.shift, governor.intensity.now)

    def began(self, exchange: Exchange) -> None:
        """A request was taken."""
        self.health.began(exchange)
        self.live.began(exchange)

    def written(self, asked: EngineRequest, tokens: int, bits: float, joules: float, between: float | None) -> None:
        """In the ledger's thread: tokens of an answer have come, so many seconds after each other unless it is its
        first."""
        self.live.wrote(asked.client.name, asked.terms.tier, tokens, bits, joules)
        if between is not None:
            self.metrics.written(tokens, between)

    def charged(self, asked: EngineRequest, cost: float) -> None:
        """In the ledger's thread: so much more was booked."""
        self.live.charged(asked.client.name, asked.terms.tier, cost)
        self.metrics.charged(asked.terms, cost)

    def answer(self, result: Result, waited_s: float) -> None:
        """An answer has ended."""
        self.metrics.answer(result, waited_s)

    def turned_away(self, error: APIError) -> None:
        """Somebody got this error as an answer."""
        self.metrics.refused.labels(self._model, str(error.status), error.code or "").inc()
        self.live.turned_away(error.status, error.code)

    def settings_read(self, refused: str | None) -> None:
        """The settings file has changed and was taken over, or was refused for this."""
        self.settings_refused = refused
        self.metrics.settings_ok.set(refused is None)

    def refused(self, exchange: Exchange) -> None:
        """The engine did not take a request. It counts where refusals do, which the answer to it sees to."""
        self.live.refused(exchange)

    def request(self, exchange: Exchange) -> None:
        """All answers of a request have ended."""
        reported = report(exchange, self._model)
        self.metrics.request(reported)
        self.health.request(exchange, reported)
        if (arm := exchange.asked.terms.arm) is not None and reported.first_s is not None:
            self.metrics.rollout.first(arm, reported.first_s)
            self.rollout.saw(arm, {"ttft": reported.first_s})
        self.live.ended(exchange, ",".join(reported.finish))
        told = reported.describe() | {"request_id": exchange.request_id}
        logs.say("request", told | (_texts(exchange) if self._settings().logs.prompts else {}))
        if self._traces is not None:
            self._traces.request(reported)

    def fell_back(self, terms: Terms) -> None:
        """A request could not be served by the candidate (these terms), and is by the stable arm."""
        self.metrics.rollout.fell_back()
        self.rollout.saw(terms.arm, {"errors": 1.0})

    def close(self, seconds: float) -> None:
        """Tell what is not told yet, for so long at most."""
        self.rollout.close()
        if self._traces is not None:
            self._traces.close(seconds)


def _texts(exchange: Exchange) -> dict[str, Any]:
    """What was asked and answered, for a log that shall have it."""
    answers = [r.text for job in exchange.jobs for r in job.results if r is not None]
    return {"prompts": list(exchange.asked.prompts), "answers": answers}
