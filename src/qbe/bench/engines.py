"""Whole models that answer the same token ids: QBE's core, transformers, llama.cpp. All of them decode greedily."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from qbe.bench.measure import Failed, Sample
from qbe.blueprint import Blueprint
from qbe.engine.core import Core
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.engine.scheduling.sequence import Sequence
from qbe.models import load_model, pull
from qbe.store.nested_linears import NestedWeightConfig
from qbe.store.nesting import nest_model
from qbe.store.placement import place
from qbe.store.prepare import prepare

PREFILL, STEP = "prefill", "step"


@dataclass(frozen=True)
class DecodeRun:
    """What one sample does.

    Attributes:
        prompt: token ids, read at once.
        steps: decode steps after the token that the prompt gives.
    """

    prompt: list[int]
    steps: int

    @property
    def tokens(self) -> int:
        return len(self.prompt) + self.steps + 1


class Answers(Protocol):
    """A model that reads a prompt and then makes one token a step."""

    def start(self, prompt: list[int]) -> Any: ...

    def step(self) -> Any: ...


def timed(model: Answers, work: DecodeRun) -> Mapping[str, float]:
    """Seconds of the prompt (`PREFILL`) and, when there are any, of one decode step (`STEP`, the mean)."""
    begin = time.perf_counter()
    model.start(work.prompt)
    first = time.perf_counter()
    for _ in range(work.steps):
        model.step()
    end = time.perf_counter()
    return {PREFILL: first - begin} | ({STEP: (end - first) / work.steps} if work.steps else {})


def random_prompt(length: int, vocabulary: int, seed: int = 0) -> list[int]:
    """Token ids from the middle of a vocabulary, where no model keeps its control tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary // 4, vocabulary // 2, (length,), generator=generator).tolist()


def core_of(
    model: str | Path | nn.Module, device: torch.device, tokens: int, progress: bool, sequences: int = 1,
    shared_rows: bool = False,
) -> Core:  # fmt: skip
    """An engine core with room for so many tokens and sequences.

    Args:
        model: what `qbe.pull` takes, or a transformers causal LM in memory, which is nested in place.
        shared_rows: as `Core` takes it.

    Raises:
        QBEError: whatever is wrong with the model.
    """
    if isinstance(model, nn.Module):
        table = nest_model(model.eval().requires_grad_(False), "random", NestedWeightConfig(), progress=progress)
        place(model, device, "device")
    else:
        prepared = prepare(model, device=device, originals="device", need_sensitivity=False, progress=progress)
        model, table = prepared.model, prepared.table
    assert isinstance(model, nn.Module)
    return Core(model, table, kv_tokens=tokens, max_sequences=sequences, device=device, shared_rows=shared_rows)


def blueprint_at(core: Core, average: float) -> Blueprint:
    """Every site at the highest gear below the average, and sites in turn at the next one until it is met."""
    table = core.table
    gears = table.gears()
    low = max(g for g in gears if g <= average)
    high = min((g for g in gears if g > average), default=low)
    bits = [low] * len(table.nested)
    missing = (average - low) * table.nested_parameters
    order = sorted(range(len(bits)), key=lambda i: (i % 7, i))  # spread over the depth of the model
    for i in order:
        more = (high - low) * table.nested[i].parameters
        if 0 < more <= missing:
            bits[i], missing = high, missing - more
    return Blueprint.of("bench", table, tuple(bits))


class QBE:
    """One sequence through `Core.step`, at one blueprint."""

    def __init__(self, core: Core, blueprint: Blueprint, work: DecodeRun) -> None:
        self.core, self.blueprint = core, blueprint
        self.params = SamplingParams(max_tokens=work.steps + 1, ignore_eos=True)
        self.sequence: Sequence | None = None

    def start(self, prompt: list[int]) -> None:
        self.sequence = Sequence("bench", prompt, self.params, self.blueprint)
        self.core.add(self.sequence)
        while not self.sequence.output_ids:
            self.core.step()

    def step(self) -> None:
        made = self.sequence
        assert made is not None
        known = len(made.token_ids)
        while len(made.token_ids) == known and made.finish_reason is None:
            self.core.step()


def ours(core: Core, averages: tuple[float, ...], work: DecodeRun) -> dict[float, Sample]:
    """Average bits -> a sample of QBE at a blueprint with that average."""

    def sample(model: QBE) -> Mapping[str, float]:
        timing = timed(model, work)
        made = model.sequence
        if made is None or made.finish_reason != "length":  # then the steps after its end took no time
            raise RuntimeError(f"the core ended the sequence early: {made and (made.finish_reason, made.error)}")
        return timing

    models = {a: QBE(core, blueprint_at(core, a), work) for a in averages}
    return {a: (lambda m=m: sample(m)) for a, m in models.items()}  # type: ignore[misc]


class Transformers:
    """transformers' own loop: forward, arg max, forward. Its cheapest form; `generate` does more per token."""

    def __init__(self, name: str | Path, device: torch.device, progress: bool) -> None:
        self.model = load_model(name, device=device, progress=progress).model

    @torch.inference_mode()
    def start(self, prompt: list[int]) -> None:
        from transformers import DynamicCache

        self.cache: Any = DynamicCache(config=self.model.config)
        self._forward(torch.tensor([prompt], device=self.model.device))

    @torch.inference_mode()
    def step(self) -> None:
        self._forward(self.token)

    def _forward(self, ids: torch.Tensor) -> None:
        out: Any = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.token = out.logits[:, -1].argmax(-1, keepdim=True)
        self.token.tolist()  # a server needs the token's number in every step


class LlamaCpp:
    """llama.cpp through llama-cpp-python, with as many threads as torch has."""

    def __init__(self, gguf: Path, tokens: int) -> None:
        from llama_cpp import Llama

        threads = torch.get_num_threads()
        self.llm = Llama(
            str(gguf), n_ctx=tokens + 16, n_batch=512, n_threads=threads, n_threads_batch=threads, n_gpu_layers=0,
            verbose=False,
        )  # fmt: skip

    def start(self, prompt: list[int]) -> None:
        self.llm.reset()
        self.llm.eval(prompt)
        self.token = self.llm.sample(temp=0.0)

    def step(self) -> None:
        self.llm.eval([self.token])
        self.token = self.llm.sample(temp=0.0)


def peers_of(name: str | Path, device: torch.device, work: DecodeRun, progress: bool) -> dict[str, Sample | Failed]:
    """The whole-model peers of a model on disk, or why they are missing."""

    def llama_cpp() -> Answers:
        try:
            import llama_cpp  # noqa: F401
        except ImportError:
            raise RuntimeError("llama-cpp-python is not installed") from None
        if (path := _gguf(name)) is None:
            raise RuntimeError("llama.cpp needs the model as a GGUF file")
        return LlamaCpp(path, work.tokens)

    peers: dict[str, Sample | Failed] = {}
    builders: dict[str, Callable[[], Answers]] = {
        "transformers": lambda: Transformers(name, device, progress),
        "llama.cpp": llama_cpp,
    }
    for peer, build in builders.items():
        try:
            model = build()
        except Exception as error:
            peers[peer] = Failed.because(error)
        else:
            peers[peer] = lambda m=model: timed(m, work)  # type: ignore[misc]
    return peers


def peer_notes(name: str | Path) -> dict[str, str]:
    """Peer -> what its rows must say."""
    path = _gguf(name)
    return {"transformers": "16 bits"} | ({"llama.cpp": f"reads {path.name}"} if path else {})


def _gguf(name: str | Path) -> Path | None:
    path = pull(str(name), progress=False)
    return path if path.suffix == ".gguf" else None
