"""`qbe.Engine`: a prompt comes in, its blueprint is chosen, its answer is written at that blueprint.

analysis -> policy -> blueprint (`selector`) -> core (plan, pages, model, sampler) -> text, record (`requests`, `live`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn

from qbe import policies
from qbe.budget import Budget
from qbe.cache import CacheNumbers, open_cache
from qbe.cache.traffic import LoggedRequest
from qbe.compatibility import check_engine
from qbe.engine import bounded_memory
from qbe.engine.core import Core
from qbe.engine.devices import out_of_memory, pick_device
from qbe.engine.execution.tuner_host import TunerHost
from qbe.engine.given_model import cascade_of, prepare_model
from qbe.engine.memory import Memory, of_engine
from qbe.engine.request_selector import RequestSelector
from qbe.engine.requests import Requests, locked
from qbe.engine.result import PromptInput, Request, Result
from qbe.engine.sampling.sampling_params import MOST_ANSWERS, SamplingParams
from qbe.engine.scheduling.kv_size import SEQUENCES
from qbe.engine.setup import check_sizes
from qbe.engine.stop_tokens import eos_ids
from qbe.engine.stream import Stream
from qbe.errors import QBEError
from qbe.explain import Explanation
from qbe.kernels.tuning.tunable import KernelCache, kernel_cache
from qbe.kernels.tuning.tuner import Tuner
from qbe.models import DEFAULT_MODEL
from qbe.pictures.tower import tower_of
from qbe.records import RecordStore, RecordWriter
from qbe.refresh.monitor import Pace
from qbe.refresh.thresholds import RUN, WINDOW
from qbe.residency.residency import Residency, ResidencyNumbers
from qbe.store.shared_rows import check_rows

__all__ = ["Engine", "Request", "Result"]


class Engine(Requests):
    """One model that serves every precision from one nested store. Threads may share it.

    Args:
        model: anything `qbe.pull` takes, a folder that `qbe quantize` wrote, or a transformers causal LM in memory
            (its linear layers are nested in place; then `tokenizer` is required).
        processor: of transformers, for the pictures of a model given in memory; a folder brings its own.
        policy: the default policy's name.
        dtype: of the 16-bit weights and activations: `auto`, `float32`, `bfloat16` or `float16`.
        device: `auto`, `cpu` or `cuda`.
        originals: where the 16-bit weights of nested sites live: `none` (the default on a GPU: its widest gear is then
            the store's), `host` (the default on a CPU) or `device`.
        most_bits: the widest precision of the store that is loaded, 4, 6 or 8; None loads all.
        device_memory: bytes of weights and KV cache that may be on the device, a number or a size such as "12GiB"; None
            bounds nothing. Slices that do not fit stay in the store's file; what is read most is brought to the device
            while requests run. Without 16-bit originals. Of a CPU main memory is meant; on a GPU only experts are left
            out, and wait in page-locked host memory, or where that ends in the store's file.
        trust: load a folder of `qbe quantize` whose files are not those that its `provenance.json` lists.
        miss: what a row does that asks for a slice which is not on the device: `lower` (None), it reads the nearest
            precision that is, and nobody waits; or `wait`, it gets the bits that it asked for.
        max_batch_tokens: tokens per step; longer prompts are spread over steps; None: 512 on a CPU, 2048 on a GPU.
        max_sequences: requests that run at once; more wait.
        kv_tokens: size of the KV cache in tokens; None chooses one that fits.
        rows: what requests of one step read: `exact`, each the bits of its own blueprint; or `shared`, each site at the
            highest bits that any of them has there, which costs a step that is bound by memory nothing and is faster
            where precisions are mixed. Nobody reads less than was asked for; answers then depend on who shares steps.
        compile: compile steps with torch.compile, on a CPU those with prompts and those of up to 16 answers at once, on
            a GPU those of one answer: faster answers for a start that takes one (`max_sequences=1`) to three minutes
            the first time (see docs/performance.md).
        speculate: be ready for requests that speculate (`SamplingParams.speculate`): room for steps of a few rows, and
            with `compile` on a GPU those of up to 4 rows compiled, too.
        tune: on a GPU, look for better launch configurations of the kernels in the background, in moments without a
            request. What was found serves all later engines of this machine, with or without `tune`.
        records: the file that records go to, each before its answer is given back; None takes the user's, False keeps
            none. A `RecordWriter` writes them in a thread, so that no step waits for the disk.
        blueprint_cache: the file of the blueprint cache; None takes the user's, False always asks the policy.
        refresh_interval, refresh_count: of requests that ask for refreshes and do not say: tokens of a window, and
            windows of one kind in a row that are cause for another blueprint.
        analysis_tier: of the query analysis: 1 thresholds, 2 classifier, 3 sentence encoder as well; None takes 1 for
            queries under 32 tokens and 2 for the others.
        progress: show progress bars on standard error.

    Raises:
        QBEError: bad input, in one line.
    """

    def __init__(
        self,
        model: str | Path | nn.Module = DEFAULT_MODEL,
        *,
        tokenizer: Any = None,
        processor: Any = None,
        policy: str = "tiered",
        dtype: str = "auto",
        device: str = "auto",
        originals: str | None = None,
        most_bits: int | None = None,
        device_memory: int | str | None = None,
        miss: str | None = None,
        trust: bool = False,
        max_batch_tokens: int | None = None,
        max_sequences: int = SEQUENCES,
        kv_tokens: int | None = None,
        rows: str = "exact",
        compile: bool = False,
        speculate: bool = False,
        tune: bool = False,
        records: str | Path | RecordWriter | bool | None = None,
        blueprint_cache: str | Path | bool | None = None,
        analysis_tier: int | None = None,
        refresh_interval: int = WINDOW,
        refresh_count: int = RUN,
        progress: bool = False,
    ) -> None:
        default, pace = policies.load(policy), Pace(refresh_interval, refresh_count)
        where = pick_device(device)
        check_rows(rows)
        check_sizes(max_batch_tokens=max_batch_tokens, max_sequences=max_sequences, kv_tokens=kv_tokens)
        beside = {"a model given in memory": isinstance(model, nn.Module), "compile": compile,
                  "most_bits": most_bits is not None, "originals": originals not in (None, "none")}  # fmt: skip
        bound = bounded_memory.check(device_memory, miss, beside)
        originals = "none" if bound is not None else originals
        prepared = prepare_model(
            model, tokenizer, processor, dtype, trust, device=where, originals=originals, most_bits=most_bits,
            need_sensitivity=default.needs_sensitivity, progress=progress, paged=bound is not None,
        )  # fmt: skip
        self.model = prepared.model
        tower = tower_of(self.model, prepared.name, prepared.tokenizer, processor)
        residency = None
        if bound is not None and prepared.folder is not None:
            residency = Residency(self.model, prepared.table, prepared.folder, where, miss or "lower", progress)
        cascade = cascade_of(prepared)
        try:
            core = Core(
                self.model, prepared.table, eos_ids=eos_ids(self.model, prepared.tokenizer), speculate=speculate,
                max_batch_tokens=max_batch_tokens, max_sequences=min(max_sequences, max_batch_tokens or max_sequences),
                kv_tokens=kv_tokens, device_memory=bound, device=where, progress=progress, compile=compile,
                cascade=None if isinstance(cascade, QBEError) else cascade, routers=default.routers(prepared.table),
                shared_rows=rows == "shared", tower=None if isinstance(tower, str) else tower,
            )  # fmt: skip
            if residency is not None and bound is not None:
                bounded_memory.hold(core, residency, bound)
        except BaseException as error:
            if residency is not None:
                residency.close()
            memory = isinstance(error, MemoryError | RuntimeError) and out_of_memory(error)
            if kv_tokens is None or not memory:
                raise
            raise QBEError(
                f"kv_tokens is {kv_tokens}, but they leave too little memory on {where}: lower it"
            ) from error
        selector = RequestSelector(
            default, policy, self.model, prepared.tokenizer, prepared.name, core.table, core.context,
            open_cache(blueprint_cache, core.table, prepared.name), analysis_tier, cascade, pace, tower,
        )  # fmt: skip
        super().__init__(core, selector, prepared.tokenizer, prepared.name, _sink(records), prepared.store)
        cached = blueprint_cache if isinstance(blueprint_cache, str | Path) else None  # else nobody asked for one
        given = {"max_batch_tokens": max_batch_tokens, "kv_tokens": kv_tokens, "tune": tune or None,
                 "analysis_tier": analysis_tier, "blueprint_cache": cached}  # fmt: skip
        situation = replace(
            self.core.situation, own_tier=default.analysis_tier not in (None, analysis_tier),
            cacheable=default.cache_version is not None,
        )  # fmt: skip
        check_engine([name for name, value in given.items() if value is not None], situation)
        self._host = TunerHost(self._lock, self.core)
        self._tuner = Tuner(self.core.device, self._host) if tune and self.core.device.type == "cuda" else None

    @property
    def memory(self) -> Memory:
        """The bytes of weights, originals, KV cache, recurrent states, graphs and workspace."""
        return of_engine(self.core)

    @property
    def residency(self) -> ResidencyNumbers | None:
        """What of the nested store is on the device and what was moved; None without `device_memory`."""
        return None if self.core.residency is None else self.core.residency.numbers

    @property
    def kernel_cache(self) -> KernelCache:
        """Hits and misses of tuned kernels on this engine's device and what tuning them took, in this process."""
        return kernel_cache(self.core.device) if self._tuner is None else self._tuner.numbers()

    @property
    def blueprint_cache(self) -> CacheNumbers | None:
        """Hits, misses and entries of the blueprint cache; None when it is off."""
        return None if self._selector.cache is None else self._selector.cache.numbers

    def generate(
        self,
        prompt: PromptInput,
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
        prompt: PromptInput,
        n: int,
        params: SamplingParams | None = None,
        *,
        budget: Budget | None = None,
        policy: str | None = None,
    ) -> list[Result]:
        """Writes n answers to one prompt, which goes through the model once; they share its pages.

        Args:
            n: 1 to 1 024; those beyond `max_sequences` wait for the others.
            params: with a seed s the i-th answer, counted from 0, is that of seed s + i.

        Raises:
            QBEError: what `generate` raises, or n out of range.
        """
        if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MOST_ANSWERS:
            raise QBEError(f"n is {n!r}, but must be a whole number, 1 to {MOST_ANSWERS}")
        params = params or SamplingParams()
        request = Request(prompt, params, budget or Budget(), policy)
        ids = [self.submit(request)]
        try:
            while not self.started(ids[0]):
                self.step()
            for i in range(1, n):
                seed = None if params.seed is None else (params.seed + i) % 2**63
                ids.append(self.submit(replace(request, params=replace(params, seed=seed)), fork_parent=ids[0]))
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
        prompt: PromptInput,
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
        prompt: PromptInput,
        params: SamplingParams | None = None,
        *,
        budget: Budget | None = None,
        policy: str | None = None,
    ) -> Explanation:
        """What `generate` would run this prompt at, and why; nothing is generated."""
        return self.choose(Request(prompt, params or SamplingParams(), budget or Budget(), policy))[1]

    def warm(self, traffic: Iterable[LoggedRequest], tick: Callable[[], None] = lambda: None) -> None:
        """Puts the blueprints of past requests (`qbe.cache.traffic.read_traffic`) into the blueprint cache.

        Raises:
            QBEError: a prompt without tokens, a budget that cannot be met (it says which request's), or a policy whose
                blueprints the cache cannot keep.
        """
        cache = self._selector.cache
        if cache is not None:
            self._selector.check_kept()
            with cache.batch():
                for number, asked in enumerate(traffic, 1):
                    try:
                        self._selector.remember(asked)
                    except QBEError as error:
                        raise QBEError(f"request {number}: {error}") from None
                    tick()

    @locked
    def close(self) -> None:
        """Cancels what still runs, ends the tuner and closes the record store."""
        if self._tuner is not None:
            self._tuner.close()
        if self.core.residency is not None:
            self.core.residency.close()
        super().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _sink(records: str | Path | RecordWriter | bool | None) -> RecordStore | RecordWriter | None:
    if records is False or isinstance(records, RecordWriter):
        return records or None
    return RecordStore(Path(records) if isinstance(records, str | Path) else None)
