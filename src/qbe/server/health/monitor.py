"""Where a server's health comes together: what answers show, what clients tell, what the ladder does about it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbe.engine.engine import Engine
from qbe.engine.request_selector import Choice
from qbe.engine.result import Request, Result
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.errors import QBEError
from qbe.server.grammar_constraint import GrammarConstraint
from qbe.server.health.detectors import AnswerFacts, Detectors, Rating
from qbe.server.health.feedback import Answered, FeedbackRequest, Told
from qbe.server.health.held import held
from qbe.server.health.ladder import Change, Ladder
from qbe.server.health.loops import ends_in_loop
from qbe.server.health.metrics import HealthMetrics
from qbe.server.health.scorer import IdleScorer, ScoredAnswer
from qbe.server.health.settings import Health
from qbe.server.health.syndromes import DETECTORS, LADDER, Action
from qbe.server.job import Job
from qbe.server.keys import Client
from qbe.server.protocol import Contract
from qbe.server.rollout.controller import RolloutController
from qbe.server.rollout.settings import MetricName
from qbe.server.settings import TIER_NAMES, Settings
from qbe.sites import FULL_BITS
from qbe.store import calibration_set
from qbe.store.calibration_text import open_text

if TYPE_CHECKING:
    from qbe.server.exchange import Exchange
    from qbe.server.observe.report import RequestReport

log = logging.getLogger(__name__)

_PASSAGE = 2000  # characters of a calibration text's passages that are looked at
_PASSAGES = 256  # of them


class HealthMonitor:
    """Of one server. Threads may share it.

    Args:
        settings: those in use now.
        metrics: are told of all.
        rollout: whose candidate is aborted before anything else is done, and which is told what its arms show.

    Attributes:
        ladder: what is in force.
        scorer: of answers; the engine's thread runs it.
    """

    def __init__(
        self, settings: Callable[[], Settings], metrics: HealthMetrics, rollout: RolloutController
    ) -> None:  # fmt: skip
        self._all, self._metrics, self._rollout, self._aborts = settings, metrics, rollout, 0
        self.ladder = Ladder(self._settings, arm=lambda: rollout.weight > 0)
        self._detectors, self._answered = Detectors(self._settings), Answered()
        self.scorer = IdleScorer(self._settings, self, self._share)

    def _settings(self) -> Health:
        return self._all().health

    def _share(self, job: Job) -> float:
        """Of answers like this one that are scored."""
        arm = None if job.account is None else job.account.asked.terms.arm
        tried = arm is not None and arm.name == "candidate"
        return max(self._settings().sample, self._rollout.sample if tried else 0.0)

    def _floor(self) -> float:
        """Average bits that a raised floor gives."""
        tiers = self._all().tiers
        highest = max(getattr(tiers, name).bits[1] for name in TIER_NAMES)
        return self._settings().floor_bits or float(highest)

    def begin(self, engine: Engine) -> None:
        """There is an engine. Raises QBEError for a calibration set that cannot be read."""
        self.scorer.begin(engine)
        if self._settings().calibration:
            self._detectors.compare_with(_classes(Path(self._settings().calibration), engine))

    def hold(self, engine: Engine, request: Request, choice: Choice, contract: Contract) -> tuple[Request, Choice]:
        """The request and its choice, or what the ladder makes of them. Raises QBEError."""
        actions = self.ladder.taken
        return held(actions, engine, request, choice, contract, self._floor()) if actions else (request, choice)

    def began(self, exchange: Exchange) -> None:
        """A request was taken."""
        for job in exchange.jobs:
            job.epoch = self.ladder.epoch

    def request(self, exchange: Exchange, report: RequestReport) -> None:
        """All answers of a request have ended."""
        now = self.ladder.epoch
        for job in exchange.jobs:
            for number, result in enumerate(job.results):
                if result is not None and result.finish_reason != "cancelled":
                    facts = _facts(job, number, result)
                    self._compare(exchange, facts, result)
                    if job.epoch == now:
                        self._detectors.answer(facts)
        self._answered.add(
            exchange.id,
            Told(exchange.asked.client.name, report.tier, exchange.asked.structure is not None, report.cost,
                 report.currency, exchange.jobs[0].epoch, exchange.asked.terms.arm),
        )  # fmt: skip

    def _compare(self, exchange: Exchange, facts: AnswerFacts, result: Result) -> None:
        """Tell the rollout what an answer of one of its arms shows."""
        if (arm := exchange.asked.terms.arm) is None:
            return
        values: dict[MetricName, float] = {"errors": facts.failed, "loops": facts.loops}
        if facts.rejected is not None:
            values["malformed"] = facts.rejected
        between = result.decode_ms / 1e3 / (len(result.token_ids) - 1) if len(result.token_ids) > 1 else None
        if between is not None:
            values["itl"] = between
        self._rollout.metrics.answer(arm, result.finish_reason, result.average_weight_bits, between)
        self._rollout.saw(arm, values)

    def feedback(self, client: Client, body: FeedbackRequest) -> None:
        """A client tells of an answer. Raises APIError."""
        told = self._answered.tell(client, body)
        self._metrics.rated(told.tier, body.failed, body.retries, told.cost, told.currency)
        if body.failed is not None:
            self._rollout.saw(told.arm, {"failures": body.failed})
        if told.epoch == self.ladder.epoch:
            self._detectors.rated(Rating(body.failed, told.structured, body.retries, told.cost, told.key))

    def on_scored(self, answer: ScoredAnswer) -> None:
        """As `Listener`."""
        self._metrics.scored(answer)
        if answer.arm is not None:
            score, margin = answer.score, answer.score.flip_margin
            values: dict[MetricName, float] = {"live_kl": score.kl, "top1_agreement": score.top1}
            self._rollout.metrics.scored(answer.arm, score.kl)
            self._rollout.saw(answer.arm, values if margin is None else {**values, "flip_margin": margin})
        if answer.epoch == self.ladder.epoch:
            self._detectors.scored(answer)

    def on_not_scored(self, why: str) -> None:
        """As `Listener`."""
        self._metrics.not_scored(why)

    def on_scoring(self, seconds: float) -> None:
        """As `Listener`."""
        self._metrics.scoring(seconds)

    def on_inputs(self, inputs: tuple[float | None, ...], tokens: int) -> None:
        """As `Listener`."""
        self._detectors.inputs, self._detectors.inputs_tokens = inputs, tokens

    def look(self) -> None:
        """About once a second: what follows from what was seen."""
        if self._rollout.aborts != self._aborts:  # what the candidate did is no cause for more
            self._aborts = self._rollout.aborts
            self.ladder.begin_anew()
            self._detectors.clear()
        before, readings = self.ladder.tripped, self._detectors.readings()
        change = self.ladder.look(readings)
        for name in sorted(self.ladder.tripped - before):
            if DETECTORS[name].action is None or not self._settings().ladder:
                log.warning(
                    "health: %s is %.4g, beyond %g", name, readings[name].value, getattr(self._settings(), name)
                )
        if change is not None:
            if change.action == "arm_aborted":
                limit = getattr(self._settings(), change.cause)
                self._rollout.abort(f"health's {change.cause} is {change.value:.4g}; limit {limit:g}", change.cause)
                self._aborts = self._rollout.aborts
            self._detectors.clear()
            _say(change, self._settings())
        self._rollout.held, self._rollout.scores = bool(self.ladder.taken), self.scorer.why_not is None
        self._metrics.looked(readings, self.ladder, change, bool(self._rollout.aborted))

    def describe(self) -> dict[str, Any]:
        """As JSON: what each detector says, and which actions are in force."""
        settings, readings = self._settings(), self._detectors.readings()
        return {
            "actions": [
                {"action": action, "in_force": in_force, "cause": self._cause(action), "what": rung.what}
                for action, rung in LADDER.items()
                for in_force in [self._cause(action) is not None]
            ],
            "exhausted": self.ladder.exhausted,
            "scoring": {"sample": settings.sample, "why_not": self.scorer.why_not},
            "detectors": {
                name: {"value": _finite(reading.value), "threshold": getattr(settings, name), "answers": reading.seen,
                       "tripped": name in self.ladder.tripped, "action": DETECTORS[name].action}
                for name, reading in readings.items()
            },
        }  # fmt: skip

    def _cause(self, action: Action) -> str | None:
        """Of an action in force; None: it is not."""
        return self._rollout.aborted or None if action == "arm_aborted" else self.ladder.taken.get(action)


def _facts(job: Job, number: int, result: Result) -> AnswerFacts:
    constraint = job.requests[number].constraint
    rejected = None
    if isinstance(constraint, GrammarConstraint):
        rejected = constraint.error is not None or constraint.cut in ("loop", "too_long")
    watched = result.blueprint.average_kv_bits(result.table) < FULL_BITS and job.choice[1].budget.kv_bits is None
    return AnswerFacts(
        prompt_class=result.profile.prompt_class, failed=result.finish_reason == "error" and not rejected,
        loops=ends_in_loop(result.token_ids), rejected=rejected, kv_raised=result.kv_raises > 0 if watched else None,
        drafted=result.drafted_tokens, accepted=result.accepted_tokens,
    )  # fmt: skip


def _classes(path: Path, engine: Engine) -> Mapping[str, int]:
    """Of what classes the passages of a calibration set, or of a text, are."""
    try:
        if path.is_dir():
            return Counter(p.prompt_class for p in calibration_set.read(path).passages)
        passages = open_text(path).passages
    except QBEError as error:
        raise QBEError(f"health.calibration: {error}") from None
    passages = tuple(p for p in passages[:: -(-len(passages) // _PASSAGES)] if p.strip())
    if not passages:
        raise QBEError(f"health.calibration: {path} is empty: give the text that the model was calibrated on")
    one = SamplingParams(max_tokens=1)
    return Counter(engine.choose(Request(p[:_PASSAGE], one))[1].profile.prompt_class for p in passages)


def _say(change: Change, settings: Health) -> None:
    what = LADDER[change.action].what
    if change.taken:
        log.warning(
            "health: %s: %s, because %s is %.4g (threshold %g)", change.action, what, change.cause, change.value,
            getattr(settings, change.cause),
        )  # fmt: skip
    else:
        log.warning("health: %s is over: nothing has tripped since", change.action)


def _finite(value: float | None) -> float | None:
    return value if value is not None and abs(value) != float("inf") else None
