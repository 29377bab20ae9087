"""One server's life behind HTTP: who may come in, on what terms, who is told when it ends."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from llguidance import LLMatcher

from qbe.engine.engine import Engine
from qbe.engine.result import PromptInput
from qbe.errors import QBEError
from qbe.records.ledger import Ledger
from qbe.server import contract
from qbe.server.admission import Admission
from qbe.server.billing import Account, Billing
from qbe.server.choose import choose
from qbe.server.errors import APIError
from qbe.server.exchange import EngineRequest, Exchange
from qbe.server.grammar import Grammars
from qbe.server.job import Job
from qbe.server.keys import Client
from qbe.server.observe.observer import Observer
from qbe.server.observe.overview import overview
from qbe.server.observe.traces import Traces
from qbe.server.preparing import Preparing
from qbe.server.queues import TierQueues, in_order, keep_in_order, stand, withdraw
from qbe.server.quotas import Quotas, Use
from qbe.server.rates import Rates
from qbe.server.responses.store import ResponseStore
from qbe.server.settings import TIER_NAMES, Settings, TierName
from qbe.server.settings_file import Reloading, Watched
from qbe.server.speed import Speed
from qbe.server.token_text import TokenText
from qbe.server.watching import watch
from qbe.server.worker import Worker

log = logging.getLogger(__name__)

_RELOAD_S = 1.0  # between two looks at the settings file
_STOP_S = 30.0  # for the engine's thread to end
_TRACES_S = 5.0  # for the last traces to leave


class Service:
    """Everything between HTTP and the engine's thread.

    Args:
        make: makes the engine.
        watched: the settings.
        public: whether others than this machine can connect, so that keys must not vanish.
        name: what the model is called; the engine's own name for it serves too.
        failed: told of an engine that could not be made or is broken.
        ledger: where all that is served is booked.
        traces: told of every request.
        model_check: raises QBEError while what is served is not what the model's name stands for.
    """

    def __init__(
        self, make: Callable[[], Engine], watched: Watched, public: bool, name: str,
        failed: Callable[[BaseException], None], ledger: Ledger, traces: Traces | None = None,
        model_check: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:  # fmt: skip
        self._watched, self.names, self._failed = watched, [name], failed
        self.created, self.speed = int(time.time()), Speed()
        self.observer = Observer(name, lambda: self.settings, traces, ledger.path)
        self.metrics = self.observer.metrics
        self.broken = self.stopping = False
        self._prepare = Preparing()
        self.rates, self.responses = Rates(), ResponseStore()
        self._admission: Admission | None = None
        self._grammars: Grammars | None = None
        self._token_text: TokenText | None = None
        self._queues: TierQueues | None = None
        self._lowest, self._ledger, self.quotas = 0.0, ledger, Quotas()
        self._billing = Billing(ledger, asyncio.get_running_loop(), self.observer, self.quotas)
        self._worker = Worker(
            lambda: self._prepared(make()), self._on_ready, self._on_broken, self._billing.deliver, self._stepped,
            self.observer.health.scorer,
        )  # fmt: skip
        self._reloading = Reloading(watched, public, self._check_settings, self.observer.settings_read)
        self._model_check = model_check
        self._watching: list[asyncio.Task[None]] = []
        self._exchanges: weakref.WeakSet[Exchange] = weakref.WeakSet()  # for as long as anybody reads them
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.TimerHandle | None = None

    @property
    def settings(self) -> Settings:
        """Those in use now."""
        return self._watched.current

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self._admission is not None and not self.broken and not self.stopping and self._billing.works

    @property
    def admission(self) -> Admission | None:
        """Who is inside; None while nobody comes in."""
        return self._admission if self.ready else None

    def start(self) -> None:
        """Begin to make the engine."""
        self._billing.start()
        self._worker.start()
        over_budget = "the energy's budget cannot be kept: %s"
        self._watching = [  # each by itself, because a source of intensities may be slow
            asyncio.create_task(watch(_RELOAD_S, self._reloading.look, self._reloading.failed)),
            asyncio.create_task(watch(_RELOAD_S, self.observer.look, lambda why: log.warning(over_budget, why))),
        ]
        if self._model_check is not None:
            self._watching.append(asyncio.create_task(watch(_RELOAD_S, self._model_check, log.warning)))

    def drain(self, seconds: float) -> None:
        """Let what runs go on for so long; then end it, so that every client hears why. Again: for less."""
        ends = self._loop.time() + seconds
        if self._draining is None or ends < self._draining.when():
            self._draining = self._loop.call_at(ends, self._end_all)

    def _end_all(self) -> None:
        left = [e for e in self._exchanges if e.left or e.preparing is not None]
        if left:
            log.warning("drain_s is over: %d requests are cut", len(left))
        self.stopping = True
        for exchange in left:
            exchange.shut_down()

    async def stop(self) -> None:
        """Cancel what runs and end the engine's thread."""
        self.stopping = True
        if self._draining is not None:
            self._draining.cancel()
        for task in self._watching:
            task.cancel()
        self._worker.stop()
        # A model that is still being loaded is not waited for.
        await asyncio.to_thread(self._worker.join, _STOP_S if self._worker.engine is not None else 0.0)
        await asyncio.to_thread(self._billing.close, _STOP_S)
        self._prepare.close()
        if self._grammars is not None:
            await self._grammars.close()
        await asyncio.to_thread(self.observer.close, _TRACES_S)

    def _prepared(self, engine: Engine) -> Engine:
        """In the engine's thread: what is made of an engine once."""
        self._lowest = engine.table.reads.lowest_average
        self._grammars = Grammars(engine)
        self.observer.begin(engine)
        self.quotas.load(self._ledger)
        scheduler = engine.core.scheduler
        self._queues = TierQueues(lambda: self.settings, scheduler.max_sequences, scheduler.max_batch_tokens)
        self._queues.guide(scheduler)
        self._token_text = TokenText(engine.tokenizer, self._grammars.tokenizer, engine.core.eos_ids)
        return engine

    def _stepped(self, seconds: float) -> dict[str, float]:
        """In the engine's thread: a step has run. Returns the joules of the answers in it."""
        if self._queues is not None:
            self._queues.stepped(seconds)
        return self.observer.step(seconds)

    def _on_ready(self, error: BaseException | None) -> None:
        engine = self._worker.engine
        if error is None and engine is not None:
            try:
                contract.check(self.settings, self._lowest)
            except QBEError as wrong:
                error = wrong
        if error is not None or engine is None:
            self._failed(error or QBEError("there is no engine"))
            return
        self.names += [engine.name] if engine.name not in self.names else []
        self._admission = Admission(engine.core.scheduler.max_sequences, rates=self.rates)
        log.info("ready")

    def _on_broken(self) -> None:
        self.broken = True

    def _check_settings(self, settings: Settings) -> None:
        if self._admission is not None:
            contract.check(settings, self._lowest)

    def engine(self) -> Engine:
        """Raises APIError while there is none that takes requests."""
        if self._admission is None or self.broken or self.stopping or self._worker.engine is None:
            why = "is shutting down" if self.stopping else "has failed" if self.broken else "loads its model"
            raise APIError(503, f"the server {why}: try again later", code="not_ready", retry_after=5)
        return self._worker.engine

    @property
    def token_text(self) -> TokenText:
        """The text of tokens; only when `engine` does not raise."""
        assert self._token_text is not None
        return self._token_text

    async def compile(self, grammar: str, param: str) -> LLMatcher:
        """A grammar for `EngineRequest`. Raises APIError."""
        self.engine()
        assert self._grammars is not None
        limits = self.settings.limits
        return await self._grammars.compile(grammar, limits.grammar_s, limits.grammar_bytes, param)

    async def matches(self, schema: dict[str, Any], text: str) -> bool | None:
        """Whether JSON text is of a schema; None where that cannot be found out."""
        assert self._grammars is not None
        return await self._grammars.matches(schema, text, self.settings.limits.grammar_s)

    def brownout(self, tier: TierName = TIER_NAMES[0]) -> float:
        """How far a tier with a floor has sunk; the cheapest sinks furthest."""
        return 0.0 if self._admission is None else self._admission.brownout(self.settings.limits, tier)

    async def scrape(self) -> bytes:
        """What `/metrics` shows."""
        load = await self._worker.load(2.0) if self.ready else None
        inside = 0 if self._admission is None else self._admission.inside
        self.observer.scrape(self._worker.engine)
        self.metrics.ledger_ok.set(self._billing.works)
        return self.metrics.text(load, inside, self.brownout())

    async def live(self, client: Client) -> dict[str, Any]:
        """What the console shows to this client."""
        load = await self._worker.load(2.0) if self.ready else None
        running = 0 if load is None else load.running
        inside = 0 if self._admission is None else self._admission.inside
        return {
            "model": self.names[0], "ready": self.ready, "running": running, "waiting": max(0, inside - running),
            **overview(client, self.settings, self.observer, self._billing.works, self.brownout),
        }  # fmt: skip

    async def begin(self, asked: EngineRequest) -> Exchange:
        """Let a request in and hand it to the engine, which has taken it when this returns.

        Raises:
            APIError: there is no room, or something in it cannot be served.
        """
        self.engine()
        self._billing.check()
        admission, limits = self._admission, self.settings.limits
        assert admission is not None
        count = len(asked.prompts) * asked.n
        if count > limits.choices:
            raise APIError(400, f"n: {count} answers in all, but at most {limits.choices} are written", param="n")
        admission.enter(count, limits, asked.terms.tier, asked.client)
        asked = in_order(asked, admission, count)
        exchange, jobs = Exchange(asked, self._worker.cancel, limits.timeout_s), list[Job]()
        self._exchanges.add(exchange)
        try:
            for i, prompt in enumerate(asked.prompts):
                jobs.append(await self._job(exchange, i, prompt))
            most = Use(sum(j.most_tokens for j in jobs), sum(j.account.most.cost for j in jobs if j.account))
            self.quotas.reserve(asked.client, most)
            try:
                admission.charge(asked.client, most.tokens)
            except APIError:
                self.quotas.release(asked.client, most)
                raise
        except BaseException:
            withdraw(asked, jobs, admission, count)
            exchange.over()
            raise
        exchange.jobs += jobs
        exchange.left = len(jobs)
        self.observer.began(exchange)
        for job in jobs:
            self._worker.submit(job)
        exchange.began()
        try:
            await exchange.taken()
        except BaseException:
            exchange.over()
            raise
        return exchange

    async def count_tokens(self, client: Client, prompt: PromptInput, **more: Any) -> int:
        """Tokens of a prompt; counts as a request of its client. Raises APIError, QBEError, TimeoutError."""
        engine = self.engine()
        self.rates.charge(client, 0)
        async with asyncio.timeout(self.settings.limits.timeout_s):
            return await self._prepare.count_tokens(engine, prompt, **more)

    async def booked(self, exchange: Exchange) -> None:
        """Charge for an answer that is complete and goes out whole. Raises APIError when it must not go out."""
        if not exchange.asked.stream:
            await self._billing.book(exchange.accounts)

    async def _job(self, exchange: Exchange, index: int, prompt: PromptInput) -> Job:
        """Tokens and blueprint for a prompt, found in another thread."""
        asked = exchange.asked
        try:
            async with asyncio.timeout_at(exchange.ends_at) as exchange.preparing:
                prompt = await self._prepare.read_pictures(self.engine(), prompt)
                about = asked, prompt, self._lowest, self.speed, self.observer.health
                request, choice, served = await self._prepare.run(choose, self.engine(), *about)
        except TimeoutError:
            exchange.late = exchange.late if exchange.late == "shutdown" else "timeout"
            raise exchange.unbegun from None
        except QBEError as error:
            raise asked.refused(error) from error
        finally:
            exchange.preparing = None
        if served is not asked:
            self.observer.fell_back(asked.terms)
            asked = exchange.asked = served
        assert self._admission is not None
        assert self._queues is not None
        others = self._admission.inside - asked.n * len(asked.prompts)
        line = self._worker.line if others >= self._admission.running else None
        priority = stand(asked, request, choice, self._queues, self._admission, self.speed, line)
        requests = asked.requests(replace(request, priority=priority), self._grammars)
        choice, within = keep_in_order(asked, choice, self._admission)
        job = Job(requests, choice, exchange.events, lambda job: self.settle(exchange, job), within)
        job.account = Account(asked, exchange.id, index, self.names[0], job)
        written = sum(r.params.max_tokens for r in requests)
        cost = asked.terms.pricing.cost(choice[1].prompt_tokens, 0, written, job.account.priced_bits)
        job.account.most = Use(job.most_tokens, cost)
        return job

    def settle(self, exchange: Exchange, job: Job) -> None:
        """A prompt's answers have ended, whoever still listens: free its place, count it."""
        results, asked = [r for r in job.results if r is not None], exchange.asked
        if self._admission is not None:
            ended, terms = sum(bool(r.token_ids) for r in results), asked.terms
            self._admission.leave(len(job.requests), terms.tier, ended, asked.client, job.within)
            used = job.choice[1].prompt_tokens + sum(len(r.token_ids) for r in results)
            self._admission.refund(asked.client, job.most_tokens - used)
            self.quotas.release(asked.client, Use() if job.account is None else job.account.most)
        for result in results:
            waited_s = 0.0 if job.account is None else job.account.waited_s
            if not exchange.refused:
                self.observer.answer(result, waited_s)
            if not result.token_ids:  # cut before its first: of its time nothing is known
                continue
            self.speed.learn(
                result.prompt_tokens, max(0.0, result.prefill_ms - waited_s * 1e3), len(result.token_ids),
                result.decode_ms, result.average_weight_bits,
            )  # fmt: skip
        exchange.left -= 1
        if not exchange.left and exchange.refused:
            self.observer.refused(exchange)
        elif not exchange.left:
            self.observer.request(exchange)
