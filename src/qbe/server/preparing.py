"""What is made of a prompt beside the steps: its pictures, its tokens, its blueprint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from qbe.engine.engine import Engine
from qbe.engine.prompt_pictures import pictured
from qbe.engine.result import PromptInput, Request

T = TypeVar("T")


class Preparing:
    """Two threads: prompts of text do not wait for others' pictures."""

    def __init__(self) -> None:
        self._prompts = ThreadPoolExecutor(1, "qbe-prepare")
        self._pictures = ThreadPoolExecutor(1, "qbe-pictures")

    async def run(self, call: Callable[..., T], *args: Any) -> T:
        """What `call` returns, in the thread that tokenizes, analyses and allocates."""
        return await asyncio.get_running_loop().run_in_executor(self._prompts, call, *args)

    async def read_pictures(self, engine: Engine, prompt: PromptInput) -> PromptInput:
        """A prompt whose pictures are decoded and prepared. Raises QBEError."""
        if not pictured(prompt):
            return prompt
        return await asyncio.get_running_loop().run_in_executor(self._pictures, engine.read_pictures, prompt)

    async def count_tokens(self, engine: Engine, prompt: PromptInput, **more: Any) -> int:
        """Tokens of a prompt. Raises QBEError.

        Args:
            more: fields of `qbe.engine.result.Request`.
        """
        return await self.run(engine.count_tokens, Request(await self.read_pictures(engine, prompt), **more))

    def close(self) -> None:
        """End the threads, without waiting for them."""
        for threads in (self._prompts, self._pictures):
            threads.shutdown(wait=False, cancel_futures=True)
