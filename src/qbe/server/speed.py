"""How long an answer at so many bits will take, learned from those that ended."""

from __future__ import annotations

_FADE = 0.95  # weight of what is known at each new answer: about the last twenty count
_SPREAD = 0.01  # bits squared; with less variance there is no slope to see


class Speed:
    """Milliseconds per prompt token, and per answer token as a line over average bits, by least squares."""

    def __init__(self) -> None:
        self._prompt = 0.0
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def learn(self, prompt_tokens: int, prefill_ms: float, tokens: int, decode_ms: float, bits: float) -> None:
        """An answer has ended. Of `tokens` the first one belongs to the prefill."""
        per_token = prefill_ms / max(1, prompt_tokens)
        self._prompt = per_token if not self._prompt else _FADE * self._prompt + (1 - _FADE) * per_token
        if tokens < 2:
            return
        self._n, self._x, self._y = (_FADE * s for s in (self._n, self._x, self._y))
        self._xx, self._xy = _FADE * self._xx, _FADE * self._xy
        y = decode_ms / (tokens - 1)
        self._n, self._x, self._y = self._n + 1, self._x + bits, self._y + y
        self._xx, self._xy = self._xx + bits * bits, self._xy + bits * y

    def foreseen(self, prompt_tokens: int, tokens: int, bits: float) -> float | None:
        """Milliseconds that so long an answer is foreseen to take; None while nothing is known."""
        if not self._n:
            return None
        per_token = self._mean + self._slope * (bits - self._x / self._n)
        return prompt_tokens * self._prompt + max(0, tokens - 1) * per_token

    @property
    def _mean(self) -> float:
        return self._y / self._n

    @property
    def _slope(self) -> float:
        """Milliseconds per token and bit; 0 where there is none to see."""
        mean_bits = self._x / self._n
        variance = self._xx / self._n - mean_bits**2
        return max(0.0, (self._xy / self._n - mean_bits * self._mean) / variance) if variance > _SPREAD else 0.0

    def most_bits(self, latency_ms: float, prompt_tokens: int, tokens: int) -> float | None:
        """The highest average at which so long an answer is foreseen to take at most `latency_ms`.

        None while nothing is known. It may lie outside of what there is.
        """
        if not self._n:
            return None
        allowed = (latency_ms - prompt_tokens * self._prompt) / max(1, tokens - 1)
        if not self._slope:  # more bits are not seen to be slower
            return float("inf") if allowed >= self._mean else 0.0
        return self._x / self._n + (allowed - self._mean) / self._slope
