"""`qbe.Engine`: a prompt comes in, its blueprint is chosen, its answer is written at that blueprint.

analysis -> policy -> blueprint -> core (plan, pages, model, sampler) -> text, record
"""

from __future__ import annotations

import functools
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from jinja2 import TemplateError
from torch import nn

from qbe import policies
from qbe.analysis import Analyzer, QueryProfile
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.engine import core
from qbe.engine.detokenize import Detokenizer
from qbe.engine.devices import out_of_memory, pick_device
from qbe.engine.result import Prompt, Request, Result
from qbe.engine.sequence import SamplingParams
from qbe.engine.sequence import Sequence as Running
from qbe.engine.stream import Stream
from qbe.engine.tuner_host import TunerHost
from qbe.errors import QBEError
from qbe.explain import Explanation
from qbe.kernels.tuning.tunable import KernelCache, kernel_cache
from qbe.kernels.tuning.tuner import Tuner
from qbe.models import DEFAULT_MODEL
from qbe.policies import kv
from qbe.records import Record, RecordStore
from qbe.sites import FULL_BITS, SiteTable
from qbe.store.prepare import prepare, prepare_in_memory

__all__ = ["Engine", "Request", "Result"]

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class _Live:
    """A request in the core, and what the engine keeps of it."""

    request: Request
    chosen: Explanation
    running: Running
    detokenizer: Detokenizer
    started: float
    pieces: list[str] = field(default_factory=list)
    first_token: float | None = None
    result: Result | None = None
    entropies: int = 0  # of `running`, how many have been looked at


def _locked(method: Callable[Concatenate[Engine, P], T]) -> Callable[Concatenate[Engine, P], T]:
    """One thread at a time: the steps of an engine are shared by all of its requests, whichever thread asked."""

    @functools.wraps(method)
    def call(self: Engine, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._lock:
            return method(self, *args, **kwargs)

    return call


class Engine:
    """One model that serves every precision from one copy of its weights. Threads may share it.

    Args:
        model: anything `qbe.pull` takes, a folder that `qbe quantize` wrote, or a transformers causal LM in memory
            (its linear layers are nested in place; then `tokenizer` is required).
        policy: the default policy's name.
        dtype: of the 16-bit weights and activations: `auto`, `float32`, `bfloat16` or `float16`.
        device: `auto`, `cpu` or `cuda`.
        originals: where the 16-bit weights of nested sites live when the device is a GPU: `device` or `host`.
        max_batch_tokens: tokens per step; longer prompts are spread over steps; None: 512 on a CPU, 2048 on a GPU.
        max_sequences: requests that run at once; more wait.
        kv_tokens: size of the KV cache in tokens; None chooses one that fits.
        compile: on a CPU, compile the decode step of one sequence with torch.compile: faster answers for a start that
            takes tens of seconds the first time (see docs/performance.md). Other batch sizes run without it.
        tune: on a GPU, look for better launch configurations of the kernels in the background, in moments without a
            request. What was found serves all later engines of this machine, with or without `tune`.
        records: the file that records go to; None takes the user's, False keeps none.
        progress: show progress bars on standard error.

    Raises:
        QBEError: bad input, in one line.
    """

    def __init__(
        self,
        model: str | Path | nn.Module = DEFAULT_MODEL,
        *,
        tokenizer: Any = None,
        policy: str = "tiered",
        dtype: str = "auto",
        device: str = "auto",
        originals: str = "device",
        max_batch_tokens: int | None = None,
        max_sequences: int = 16,
        kv_tokens: int | None = None,
        compile: bool = False,
        tune: bool = False,
        records: str | Path | bool | None = None,
        progress: bool = False,
    ) -> None:
        self.policy = policies.load(policy)
        self._policies = {policy: self.policy}
        where = pick_device(device)
        sizes = {"max_batch_tokens": max_batch_tokens, "max_sequences": max_sequences, "kv_tokens": kv_tokens}
        for name, size in sizes.items():
            if size is not None and not (isinstance(size, int) and 1 <= size < 2**40):
                raise QBEError(f"{name} is {size}, but must be a whole number, 1 or more and below 2^40")
        if isinstance(model, nn.Module):
            if dtype != "auto":
                raise QBEError(f"a model given in memory keeps its dtype; convert it first, not with dtype='{dtype}'")
            prepared = prepare_in_memory(
                model, tokenizer, device=where, originals=originals,
                need_sensitivity=self.policy.needs_sensitivity, progress=progress,
            )  # fmt: skip
        else:
            prepared = prepare(
                model, dtype=dtype, device=where, originals=originals,
                need_sensitivity=self.policy.needs_sensitivity, progress=progress,
            )  # fmt: skip
        self.name, self.tokenizer, self.model = prepared.name, prepared.tokenizer, prepared.model
        self.eos_ids = _eos_ids(self.model, self.tokenizer)
        try:
            self.core = core.Core(
                self.model, prepared.table, eos_ids=self.eos_ids, max_batch_tokens=max_batch_tokens,
                max_sequences=min(max_sequences, max_batch_tokens or max_sequences), kv_tokens=kv_tokens, device=where,
                progress=progress, compile=compile,
            )  # fmt: skip
        except (MemoryError, RuntimeError) as error:
            if kv_tokens is None or not out_of_memory(error):
                raise
            raise QBEError(
                f"kv_tokens is {kv_tokens}, but they leave too little memory on {where}: lower it"
            ) from error
        self._table = self.core.table
        self.analyzer = Analyzer(self.model.get_input_embeddings().weight)
        self.analyzer.analyze("warm up", [0], tier=2)  # the first analysis of a process takes milliseconds
        where_to = Path(records) if isinstance(records, str | Path) else None
        self._records = None if records is False else RecordStore(where_to)
        self._closed = False
        self._lock = threading.RLock()
        self._live: dict[str, _Live] = {}
        full = Blueprint.of("full", self._table, tuple(s.gears[-1] for s in self._table.nested))
        self._full_bytes = full.bytes_per_token(self._table)
        self._host = TunerHost(self._lock, self.core)
        self._tuner = Tuner(self.core.device, self._host) if tune and self.core.device.type == "cuda" else None

    @property
    def kernel_cache(self) -> KernelCache:
        """Hits and misses of tuned kernels on this engine's device and what tuning them took, in this process."""
        return kernel_cache(self.core.device) if self._tuner is None else self._tuner.numbers()

    @property
    def table(self) -> SiteTable:
        """The model's sites."""
        return self._table

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        budget: Budget | None = None,
        policy: str | None = None,
    ) -> Result:
        """Answers one prompt.

        Raises:
            QBEError: an empty or too long prompt, or a budget that cannot be met.
        """
        return self.generate_batch([Request(prompt, params or SamplingParams(), budget or Budget(), policy)])[0]

    def generate_batch(self, requests: Sequence[Request]) -> list[Result]:
        """Answers several prompts in shared steps, each at its own blueprint; results in the order of the requests.

        Raises:
            QBEError: any request is refused; none of them has started then.
        """
        ids: list[str] = []
        try:
            for request in requests:
                ids.append(self.submit(request))
            while not all(map(self.finished, ids)):
                self.step()
        finally:
            results = self._end(ids)
        return results

    def answers(
        self,
        prompt: Prompt,
        n: int,
        params: SamplingParams | None = None,
        *,
        budget: Budget | None = None,
        policy: str | None = None,
    ) -> list[Result]:
        """Writes n answers to one prompt, which goes through the model once; they share its pages.

        Args:
            n: 1 or more; those beyond `max_sequences` wait for the others.
            params: with a seed s the i-th answer, counted from 0, is that of seed s + i.

        Raises:
            QBEError: what `generate` raises, or n out of range.
        """
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise QBEError(f"n is {n!r}, but must be a whole number, 1 or more")
        params = params or SamplingParams()
        request = Request(prompt, params, budget or Budget(), policy)
        ids = [self.submit(request)]
        try:
            while not self.started(ids[0]):
                self.step()
            for i in range(1, n):
                seed = None if params.seed is None else (params.seed + i) % 2**63
                ids.append(self.submit(replace(request, params=replace(params, seed=seed)), twin=ids[0]))
            while not all(map(self.finished, ids)):
                self.step()
        finally:
            results = self._end(ids)
        return results

    def _end(self, ids: list[str]) -> list[Result]:
        """Results of these requests; nothing is left running when one was refused or the caller interrupts."""
        for i in ids:
            self.cancel(i)
        return [self.take_result(i) for i in ids]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        budget: Budget | None = None,
        policy: str | None = None,
    ) -> Stream:
        """Answers one prompt piece by piece. Other streams and batches may run meanwhile, in the same thread."""
        request_id = self.submit(Request(prompt, params or SamplingParams(), budget or Budget(), policy))
        return Stream(self, request_id)

    def explain(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        budget: Budget | None = None,
        policy: str | None = None,
    ) -> Explanation:
        """What `generate` would run this prompt at, and why; nothing is generated."""
        return self._choose(Request(prompt, params or SamplingParams(), budget or Budget(), policy))[1]

    @_locked
    def submit(self, request: Request, twin: str | None = None) -> str:
        """Queues a request; `step` moves it on until `finished`, then `take_result` has its answer. Returns its id.

        Args:
            twin: id of a request of the same prompt that has `started`, to begin on its pages.
        """
        if self._closed:
            raise QBEError("this engine is closed; make a new one")
        ids, chosen = self._choose(request)
        key = uuid.uuid4().hex
        running = Running(key, ids, request.params, chosen.blueprint)
        running.twin = None if twin is None else self._live[twin].running
        # An average that was asked for is kept; one that was chosen may turn out too low for what comes.
        running.watched = request.budget.kv_bits is None and chosen.blueprint.average_kv_bits(self._table) < FULL_BITS
        if request.budget.careful_tokens:
            running.difficult = self._table.difficult_entropy
        self.core.add(running)
        chosen = replace(chosen, blueprint=running.blueprint)  # the cache may not hold what was chosen
        text = Detokenizer(self.tokenizer, request.params.stop, self.eos_ids)
        self._live[key] = _Live(request, chosen, running, text, time.perf_counter())
        return key

    @_locked
    def step(self) -> None:
        """Runs one step of every request that can run."""
        try:
            outputs = self.core.step()
        except BaseException:
            for live in list(self._live.values()):
                if live.running.finish_reason is not None and live.result is None:
                    self._finish(live)
            raise
        now = time.perf_counter()
        for output in outputs:
            live = self._live[output.sequence.request_id]
            self._raise_kv(live)
            if output.new_token is not None:
                live.first_token = live.first_token or now
                live.pieces.append(live.detokenizer.push(output.new_token))
            if output.finished:
                self._finish(live, now)
            elif live.detokenizer.stopped is not None:
                self.core.cancel(output.sequence.request_id, "stop")
                self._finish(live, now)

    @_locked
    def cancel(self, request_id: str) -> None:
        """Ends a request now; its pages are free at once and its result holds what was written so far."""
        live = self._live.get(request_id)
        if live is not None and live.result is None:
            self.core.cancel(request_id)
            self._finish(live)

    @_locked
    def take_pieces(self, request_id: str) -> list[str]:
        """The text that came since the last call."""
        live = self._live[request_id]
        pieces, live.pieces = [p for p in live.pieces if p], []
        return pieces

    @_locked
    def started(self, request_id: str) -> bool:
        """Whether the request has its first token, or its result."""
        live = self._live[request_id]
        return live.first_token is not None or live.result is not None

    @_locked
    def finished(self, request_id: str) -> bool:
        """Whether the request has its result."""
        return self._live[request_id].result is not None

    @_locked
    def take_result(self, request_id: str) -> Result:
        """The result of a finished request, which the engine forgets then. Raises KeyError for any other."""
        live = self._live[request_id]
        if live.result is None:
            raise KeyError(request_id)
        del self._live[request_id]
        return live.result

    @_locked
    def close(self) -> None:
        """Cancels what still runs, ends the tuner and closes the record store."""
        if self._tuner is not None:
            self._tuner.close()
        for key in list(self._live):
            self.cancel(key)
        self._closed = True
        if self._records is not None:
            self._records.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _choose(self, request: Request) -> tuple[list[int], Explanation]:
        """Token ids of the prompt and the blueprint for it."""
        text, words, ids = self._encode(request.prompt)
        policy = self._policy(request.policy)
        start = time.perf_counter()
        profile: QueryProfile = self.analyzer.analyze(text, words)
        analysed = time.perf_counter()
        context = len(ids) + request.params.max_tokens
        profile = replace(profile, context=context if self.core.context is None else min(context, self.core.context))
        blueprint = policy.blueprint(profile, request.budget, self._table)
        if request.budget.kv_error is not None:
            blueprint = replace(blueprint, kv_error=float(request.budget.kv_error))
        done = time.perf_counter()
        chosen = Explanation(
            prompt_tokens=len(ids),
            profile=profile,
            blueprint=blueprint,
            table=self._table,
            budget=request.budget,
            target_bits=request.budget.bits_for(profile.score),
            analysis_ms=(analysed - start) * 1e3,
            policy_ms=(done - analysed) * 1e3,
            bytes_per_token=blueprint.bytes_per_token(self._table),
            bytes_per_token_16bit=self._full_bytes,
        )
        return ids, chosen

    def _encode(self, prompt: Prompt) -> tuple[str, list[int], list[int]]:
        """The text to analyse (of a conversation: the last message), its token ids, and the token ids to run."""
        try:
            if isinstance(prompt, str):
                text = prompt
                words = ids = self.tokenizer(prompt)["input_ids"]
            else:
                if not isinstance(prompt, list) or not prompt or not all(map(_is_message, prompt)):
                    raise QBEError(
                        "a prompt is text or a conversation: a list of messages, each with 'role' and 'content'"
                    )
                if not getattr(self.tokenizer, "chat_template", None):
                    raise QBEError(f"{self.name} has no chat template; give the prompt as plain text")
                text = prompt[-1]["content"]
                whole = self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
                ids = self.tokenizer(whole, add_special_tokens=False)["input_ids"]
                words = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        except TemplateError as error:  # a damaged template, or one that refuses these roles
            said = " ".join(str(error).split())[:200]
            raise QBEError(f"the chat template of {self.name} fails ({said}); give the prompt as plain text") from error
        except UnicodeEncodeError as error:
            raise QBEError(f"the prompt is not valid UTF-8 (character {error.start}); convert it first") from None
        except (TypeError, ValueError) as error:  # what tokenizers raise for lone surrogates and odd types
            raise QBEError(f"the prompt cannot be tokenised ({error}); give valid UTF-8 text") from None
        if not text.strip() or not ids:
            raise QBEError("the prompt is empty; give some text")
        return text, list(words), list(ids)

    def _policy(self, name: str | None) -> policies.Policy:
        if name is None:
            return self.policy
        if name not in self._policies:
            self._policies[name] = policies.load(name)
        if self._policies[name].needs_sensitivity and not self._table.measured:
            raise QBEError(f"this engine was started without a sensitivity table; start it with policy='{name}'")
        return self._policies[name]

    def _raise_kv(self, live: _Live) -> None:
        """More KV bits for pages to come, where a request's attention has turned out unlike calibration's."""
        running = live.running
        if len(running.entropies) == live.entropies or running.finish_reason is not None:
            return
        live.entropies = len(running.entropies)
        now = running.blueprint.kv_bits
        bits = kv.raised(live.chosen.blueprint.kv_bits, now, self._table, running.entropies)
        if bits != now:
            self.core.raise_kv(running, bits)

    def _finish(self, live: _Live, now: float | None = None) -> None:
        """Makes the result and its record."""
        now = time.perf_counter() if now is None else now
        live.pieces.append(live.detokenizer.finish())
        running, chosen = live.running, live.chosen
        first = live.first_token or now
        reason = "stop" if live.detokenizer.stopped is not None else running.finish_reason or "cancelled"
        live.result = Result(
            id=running.request_id, text=live.detokenizer.text, token_ids=running.output_ids, finish_reason=reason,
            prompt_tokens=len(running.prompt_ids), profile=chosen.profile, blueprint=chosen.blueprint,
            table=self._table, bytes_per_token=chosen.bytes_per_token, analysis_ms=chosen.analysis_ms,
            policy_ms=chosen.policy_ms, prefill_ms=(first - live.started) * 1e3, decode_ms=(now - first) * 1e3,
            error=running.error, cached_tokens=running.cached, careful_tokens=running.careful_computed,
            average_kv_bits=running.average_kv_bits or chosen.blueprint.average_kv_bits(self._table),
            kv_error=running.blueprint.kv_error, pages_read=running.pages_read, pages_raised=running.pages_raised,
            host_bytes=running.host_bytes,
        )  # fmt: skip
        if self._records is not None:
            self._records.try_append(self._record(live, live.result))

    def _record(self, live: _Live, result: Result) -> Record:
        budget, b = live.request.budget, result.blueprint
        steps = len(result.token_ids)  # passes over the weights at batch 1: the prompt's, then one per further token
        # Sites differ within one token: a token counts towards each gear by the share of weights that ran at it.
        share: dict[int, int] = {}
        for site, gear in zip(self._table.nested, b.weight_bits, strict=True):
            share[gear] = share.get(gear, 0) + site.parameters
        computed = live.running.computed - live.running.cached
        by_bits = {g: round(computed * n / self._table.nested_parameters) for g, n in share.items()}
        low = sum(s.parameters for s, a in zip(self._table.nested, b.activation_bits, strict=True) if a < FULL_BITS)
        eight = round((computed - result.careful_tokens) * low / self._table.nested_parameters)
        return Record(
            id=result.id, model=self.name, policy=b.policy, tier=budget.tier, budget_bits=budget.bits,
            prompt_tokens=result.prompt_tokens, completion_tokens=len(result.token_ids),
            finish_reason=result.finish_reason, score=result.profile.score, prompt_class=result.profile.prompt_class,
            analysis_tier=result.profile.tier, features=result.profile.features, blueprint_key=b.key,
            average_weight_bits=result.average_weight_bits, weight_bits=b.weight_bits,
            activation_bits=b.activation_bits, kv_bits=b.kv_bits, bytes_per_token=result.bytes_per_token,
            bytes_moved=result.bytes_per_token * steps, tokens_by_bits=by_bits,
            tokens_by_activation_bits={g: n for g, n in ((8, eight), (FULL_BITS, computed - eight)) if n},
            entropies=tuple(live.running.token_entropies) or None, analysis_ms=result.analysis_ms,
            policy_ms=result.policy_ms, prefill_ms=result.prefill_ms, decode_ms=result.decode_ms, error=result.error,
            kv_error=result.kv_error, pages_read=result.pages_read, pages_raised=result.pages_raised,
            host_bytes=result.host_bytes,
        )  # fmt: skip


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("content"), str) and isinstance(value.get("role"), str)


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer, as transformers' `generate` takes them."""
    config = getattr(model, "generation_config", None)
    ids = getattr(config, "eos_token_id", None)
    if ids is None:
        ids = getattr(tokenizer, "eos_token_id", None)
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)
