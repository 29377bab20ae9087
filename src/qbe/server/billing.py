"""Who pays for what: every token is in the ledger before it goes out, and stays there through `kill -9`.

A stream is booked token by token, a whole answer when it is complete; what nobody was sent is not booked. One thread
writes: what the engine and the event loop hand it while a transaction runs goes into the next one together.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from qbe.blueprint import weights_by_bits
from qbe.engine.result import Result
from qbe.errors import QBEError
from qbe.records.ledger import UNIT, Ledger, LedgerEntry
from qbe.server.energy.spending import MODEL
from qbe.server.errors import APIError
from qbe.server.job import Delta, Event, Job, deliver
from qbe.server.observe.observer import Observer
from qbe.server.pricing import read_tokens
from qbe.server.quotas import Quotas, Use

if TYPE_CHECKING:
    from qbe.server.exchange import EngineRequest

log = logging.getLogger(__name__)

_PAUSE_S = 2.0  # after a failed write nobody is let in for so long, and how often an idle ledger is tried


class Account:
    """What one prompt and its answers have come to. The ledger's thread alone changes it.

    Args:
        asked: the request; an attribute, too.
        id, index: the request's id and the number of the prompt in it.
        model: its name.
        job: the prompt's.

    Attributes:
        stream: whether tokens are booked as they come.
        first_at, waited_s: when its first token came, by `time.monotonic`, and the longest wait of its answers.
        written, bits: tokens of each answer so far, and the average bits that were chosen for them.
        priced_bits: that are charged as long as nothing else is known.
        joules, energy: what its answers took, and who says so: `nvml`, `rapl`, or `model` if any of it is modelled.
        lost: whether something in it could not be booked, so that it was not sent either.
    """

    def __init__(self, asked: EngineRequest, id: str, index: int, model: str, job: Job) -> None:
        self.stream, self.lost = asked.stream, False
        self.first_at: float | None = None
        self.waited_s, self.joules, self.energy = 0.0, 0.0, ""
        self._last_at: list[float | None] = [None] * len(job.requests)
        self.asked, self._request, self._id, self._model = asked, id, f"{id}-{index}", model
        self._prompt_tokens, self._chosen = job.choice[1].prompt_tokens, job.choice[1]
        self.bits = self._chosen.blueprint.average_weight_bits(self._chosen.table)
        self.priced_bits = min(self.bits, self._chosen.asked_bits)
        weights = weights_by_bits(self._chosen.blueprint, self._chosen.table)
        self._shares = {bits: n / self._chosen.table.reads.weights for bits, n in weights.items()}
        self._kv_bits = self._chosen.blueprint.average_kv_bits(self._chosen.table)
        self._cached, self.written = 0, [0] * len(job.requests)
        self._results: list[Result | None] = [None] * len(job.requests)
        self._charged = self._counted = 0
        self.most = Use()  # that it may come to
        self._cut = False
        self._began = datetime.now(UTC).isoformat(timespec="milliseconds")

    def take(self, delta: Delta, now: float, energy: str) -> float | None:
        """More of an answer; returns the seconds between its tokens, None with the first of them.

        Args:
            energy: who says what it took.
        """
        self.joules += delta.joules
        self.energy = energy if self.energy in ("", energy) else MODEL
        self.written[delta.answer] += len(delta.tokens)
        self._results[delta.answer] = delta.result
        if delta.answer == 0:
            self._cached = min(delta.cached_tokens, self._prompt_tokens)
        self.waited_s = max(self.waited_s, delta.waited_s)
        if not delta.tokens:
            return None
        self.first_at = self.first_at or now
        last, self._last_at[delta.answer] = self._last_at[delta.answer], now
        return None if last is None else (now - last) / len(delta.tokens)

    @property
    def cost(self) -> int:
        """So far, in the ledger's units; an answer that is not done counts at the bits chosen for it."""
        terms, total = self.asked.terms, 0
        for i, (written, result) in enumerate(zip(self.written, self._results, strict=True)):
            read = (self._read, self._cached) if i == 0 else (0, 0)
            bits = self.priced_bits if result is None else result.priced_weight_bits
            total += terms.pricing.cost(*read, max(0, written - self.asked.hidden), bits)
        return total

    @property
    def _read(self) -> int:
        """Tokens of the prompt that were computed, as far as is known: all of them when there is a token, and when its
        first answer was cut before, those that were."""
        if self._results[0] is not None:
            return read_tokens(self._results[0])
        return self._prompt_tokens - self._cached if self.written[0] else 0

    def charged(self, entry: LedgerEntry) -> Use:
        """It was booked so: what that adds to what was booked before."""
        tokens = entry.prompt_tokens + entry.completion_tokens
        more = Use(tokens - self._counted, entry.cost - self._charged)
        self._charged, self._counted = entry.cost, tokens
        return more

    def cut(self) -> bool:
        """No further answer begins: whether a row of it is to be ended."""
        self._cut = True
        return self._counted > 0 or any(self.written)

    @property
    def _finish(self) -> str | None:
        """How its answers have ended; None while one goes on."""
        if self._cut:
            return ",".join("cancelled" if r is None else r.finish_reason for r in self._results)
        done = [r.finish_reason for r in self._results if r is not None]
        return ",".join(done) if len(done) == len(self._results) else None

    def entry(self) -> LedgerEntry:
        """The row as it is now. Streams ask for it at every token: it takes microseconds."""
        done = [r for r in self._results if r is not None]
        # Of an answer that goes on, the last token has not gone through the model.
        begun = [n - 1 for n, r in zip(self.written, self._results, strict=True) if r is None and n]
        computed = (self._read if self._results[0] is None else 0) + sum(begun)
        spread = {bits: round(computed * share) for bits, share in self._shares.items()}
        total, bits_sum, kv_sum = computed, self.bits * computed, self._kv_bits * computed
        for result in done:
            weight = max(1, result.computed_tokens)
            total += weight
            bits_sum += result.average_weight_bits * weight
            kv_sum += result.average_kv_bits * weight
            for bits, count in result.tokens_by_bits.items():
                spread[bits] = spread.get(bits, 0) + count
        return LedgerEntry(
            id=self._id, request=self._request, key=self.asked.client.name, tier=self.asked.terms.tier,
            model=self._model, policy=self._chosen.blueprint.policy, began=self._began,
            finish=self._finish,
            prompt_tokens=self._prompt_tokens, cached_tokens=self._cached,
            completion_tokens=sum(max(0, n - self.asked.hidden) for n in self.written),
            weight_bits=bits_sum / total if total else self.bits, kv_bits=kv_sum / total if total else self._kv_bits,
            tokens_by_bits={bits: spread[bits] for bits in sorted(spread) if spread[bits]}, cost=self.cost,
            currency=self.asked.terms.prices.currency, joules=self.joules, energy=self.energy or MODEL,
            arm=None if self.asked.terms.arm is None else self.asked.terms.arm.name,
        )  # fmt: skip


@dataclass(frozen=True)
class _Parcel:
    """What is booked together: news for streams, or whole answers and who waits for that."""

    news: list[tuple[Job, Event]]
    accounts: Sequence[Account] = ()
    done: asyncio.Future[None] | None = None


class Billing(threading.Thread):
    """The thread between the engine and those who wait for tokens: it books, then it delivers.

    Args:
        ledger: where to.
        loop: where what was booked is delivered.
        observer: told of every token and charge, in this thread.
        quotas: told of what is booked.
    """

    def __init__(
        self, ledger: Ledger, loop: asyncio.AbstractEventLoop, observer: Observer, quotas: Quotas
    ) -> None:  # fmt: skip
        super().__init__(name="qbe-ledger", daemon=True)
        self._quotas = quotas
        self._ledger, self._loop, self._observer = ledger, loop, observer
        self._inbox: queue.SimpleQueue[_Parcel | None] = queue.SimpleQueue()
        self._failed_at: float | None = None

    @property
    def works(self) -> bool:
        """Whether the last write or trial of one was good."""
        return self._failed_at is None

    def check(self) -> None:
        """Raises APIError while the ledger cannot be written."""
        if self._failed_at is not None and time.monotonic() < self._failed_at + _PAUSE_S:
            raise APIError(503, "the ledger cannot be written: try again later", code="ledger", retry_after=_PAUSE_S)

    def deliver(self, news: list[tuple[Job, Event]]) -> None:
        """Book what streams have got, then tell everyone."""
        self._inbox.put(_Parcel(news))

    async def book(self, accounts: Sequence[Account]) -> None:
        """Book whole answers, of which all deltas were heard. Raises APIError where that fails; nothing is booked."""
        done: asyncio.Future[None] = self._loop.create_future()
        self._inbox.put(_Parcel([], accounts, done))
        await done

    def close(self, seconds: float) -> None:
        """Write what there is and end."""
        self._inbox.put(None)
        self.join(seconds)
        self._ledger.close()

    def run(self) -> None:
        """The thread's life."""
        while True:
            try:
                parcels = [self._inbox.get(timeout=_PAUSE_S)]
            except queue.Empty:
                self._try()
                continue
            with suppress(queue.Empty):
                while parcels[-1] is not None:
                    parcels.append(self._inbox.get_nowait())
            self._handle([p for p in parcels if p is not None])
            if parcels[-1] is None:
                return

    def _try(self) -> None:
        """Nobody writes: find out what whoever comes next would."""
        try:
            self._ledger.probe()
            self._good()
        except QBEError as error:
            self._bad(error)

    def _good(self) -> None:
        if self._failed_at is not None:
            log.warning("the ledger can be written again")
        self._failed_at = None

    def _bad(self, error: QBEError) -> None:
        if self._failed_at is None:
            log.error("%s; until then nothing is served", error)
        self._failed_at = time.monotonic()

    def _handle(self, parcels: list[_Parcel]) -> None:
        try:
            good = self._write(self._taken(parcels))
        except Exception:  # a thread that ended here would leave every client waiting
            log.exception("a defect of the ledger")
            self._failed_at, good = time.monotonic(), False
            for job, _ in (event for parcel in parcels for event in parcel.news):
                if job.account is not None and not job.account.stream:
                    job.account.lost = True  # some of it may not have been counted
        for parcel in parcels:
            if parcel.news:
                self._tell(deliver, list(_sent(parcel.news, good)))
            if parcel.done is not None:
                self._tell(_resolve, parcel.done, good and not any(a.lost for a in parcel.accounts))

    def _taken(self, parcels: list[_Parcel]) -> dict[Account, None]:
        """The accounts to book, with the news in them."""
        changed: dict[Account, None] = {}
        now = time.monotonic()
        for parcel in parcels:
            for job, event in parcel.news:
                if isinstance(event, Delta) and job.account is not None:
                    between = job.account.take(event, now, self._observer.energy)
                    self._observer.written(
                        job.account.asked, len(event.tokens), job.account.bits, event.joules, between
                    )
                    if job.account.stream and not job.account.lost:
                        changed[job.account] = None
                elif (
                    isinstance(event, Exception)  # its other answers never begin
                    and (account := job.account) is not None
                    and (account.stream and account.cut() and not account.lost)
                ):
                    changed[account] = None
            if not any(account.lost for account in parcel.accounts):
                changed |= dict.fromkeys(parcel.accounts)
        return changed

    def _write(self, accounts: dict[Account, None]) -> bool:
        try:
            if accounts:
                entries = [account.entry() for account in accounts]
                self._ledger.write(entries)
                self._good()
                for account, entry in zip(accounts, entries, strict=True):
                    more = account.charged(entry)
                    self._observer.charged(account.asked, more.cost / UNIT)
                    self._quotas.add(account.asked.client.name, more)
        except QBEError as error:
            self._bad(error)
            return False
        return True

    def _tell(self, call: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            log.debug("the event loop has ended")


def _sent(news: list[tuple[Job, Event]], good: bool) -> Iterator[tuple[Job, Event]]:
    """What of it goes out: of a stream that could not be booked, that it ends, and then nothing any more."""
    for job, event in news:
        account = job.account
        if isinstance(event, Delta) and account is not None and account.stream:
            if account.lost:
                continue
            if not good:
                account.lost, event = True, _unbooked()
        yield job, event


def _unbooked() -> APIError:
    return APIError(503, "the ledger cannot be written, so the answer ends here", code="ledger", retry_after=_PAUSE_S)


def _resolve(done: asyncio.Future[None], good: bool) -> None:
    if not done.done():
        done.set_result(None) if good else done.set_exception(_unbooked())
