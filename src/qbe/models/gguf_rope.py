"""Rotary embeddings of a GGUF file: base, scaling in the metadata, scaling in tensors.

llama.cpp divides each frequency by the file's factor for it: `rope_freqs.weight`, or, for LongRoPE,
`rope_factors_short.weight` up to the original context and `rope_factors_long.weight` beyond. Its converter writes the
first for Llama 3.1's rule, whose parameters are found again here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from qbe.errors import QBEError
from qbe.models.gguf_data import read_rows
from qbe.models.gguf_keys import Keys

_FREQS, _SHORT, _LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
TENSORS = frozenset({_FREQS, _SHORT, _LONG})  # in the config, not in the model's weights
_THETA = 10000.0  # of a file that does not say
_EXACT = 2e-6  # of two frequencies that went through float32: the same


def rope_parameters(keys: Keys, rotary: int, theta: float | None = None) -> dict[str, Any]:
    """What transformers calls `rope_parameters`, without `partial_rotary_factor`.

    Args:
        keys: of the file.
        rotary: dimensions of a head that are rotated.
        theta: the base, instead of that in `rope.freq_base`.

    Raises:
        QBEError: scaling that cannot be expressed there, or that contradicts itself.
    """
    base = float(keys.number("rope.freq_base", _THETA)) if theta is None else theta
    if base <= 0:
        keys.refuse("rope.freq_base", "but must be positive")
    scaling = _scaling(keys)
    found = TENSORS & keys.header.tensors.keys()
    if not found:
        if scaling["rope_type"] == "longrope":
            keys.refuse("rope.scaling.type", f"but the file has no {_SHORT}")
        return {"rope_theta": base} | scaling
    if scaling["rope_type"] not in ("default", "longrope"):
        keys.refuse("rope.scaling.type", f"but the file has {min(found)} too")
    if found == {_FREQS}:
        return {"rope_theta": base} | _from_factors(keys, _factors(keys, _FREQS, rotary), base)
    if found != {_SHORT, _LONG}:
        raise QBEError(f"{keys.header.path}: {', '.join(sorted(found))} without its counterpart; download it again")
    return {"rope_theta": base} | _longrope(keys, rotary)


def _scaling(keys: Keys) -> dict[str, Any]:
    """The scaling that the metadata describes."""
    kind = keys.get("rope.scaling.type")
    factor = keys.number("rope.scaling.factor", 0.0) or keys.number("rope.scale_linear", 0.0)
    if kind is None:  # llama.cpp's rule
        kind = "linear" if factor not in (0, 1) else "none"
    if kind not in ("none", "linear", "yarn", "longrope"):
        keys.refuse("rope.scaling.type", "which QBE does not read")
    if kind in ("linear", "yarn") and factor <= 0:
        raise QBEError(f"{keys.header.path}: rope.scaling.type is {kind}, but there is no rope.scaling.factor")
    if kind == "longrope" and factor not in (0, 1):
        keys.refuse("rope.scaling.factor", "but LongRoPE has factors of its own")
    keys.get("rope.scaling.original_context_length")  # says nothing without scaling
    if kind != "longrope" and not keys.header.tensors.keys() & {_SHORT, _LONG}:
        keys.same("rope.scaling.attn_factor", 1.0)
    keys.same("rope.scaling.yarn_log_multiplier", 0.0)
    if kind != "yarn":
        for name in ("ext_factor", "beta_fast", "beta_slow"):
            keys.get(f"rope.scaling.yarn_{name}")
        keys.same("rope.scaling.yarn_attn_factor", 1.0)
        if kind == "linear" and factor != 1:
            return {"rope_type": "linear", "factor": float(factor)}
        return {"rope_type": "longrope" if kind == "longrope" else "default"}
    if "rope.scaling.original_context_length" not in keys:
        raise QBEError(f"{keys.header.path}: YaRN scaling without rope.scaling.original_context_length")
    if keys.number("rope.scaling.yarn_ext_factor", 1.0) not in (1, -1):  # -1: as the type says
        keys.refuse("rope.scaling.yarn_ext_factor", "but only 1 is read")
    yarn = {
        "rope_type": "yarn",
        "factor": float(factor),
        "original_max_position_embeddings": keys.count("rope.scaling.original_context_length"),
        "beta_fast": float(keys.number("rope.scaling.yarn_beta_fast", 32.0)),
        "beta_slow": float(keys.number("rope.scaling.yarn_beta_slow", 1.0)),
    }
    if "rope.scaling.yarn_attn_factor" in keys:  # the converter writes `attention_factor` there
        yarn["attention_factor"] = float(keys.number("rope.scaling.yarn_attn_factor"))
    return yarn


def _factors(keys: Keys, name: str, rotary: int) -> np.ndarray:
    tensor = keys.header.tensors[name]
    if tensor.shape != (rotary // 2,):
        raise QBEError(f"{keys.header.path}: {name} has shape {tensor.shape}, but {rotary} dimensions are rotated")
    factors = read_rows(tensor, 0, 1)[0].astype(np.float64)
    if not np.isfinite(factors).all() or (factors <= 0).any():
        raise QBEError(f"{keys.header.path} is corrupt: {name} has factors that are no positive numbers")
    return factors


def _longrope(keys: Keys, rotary: int) -> dict[str, Any]:
    original = keys.count("rope.scaling.original_context_length")
    parameters: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": _factors(keys, _SHORT, rotary).tolist(),
        "long_factor": _factors(keys, _LONG, rotary).tolist(),
        "original_max_position_embeddings": original,
    }
    if "rope.scaling.attn_factor" in keys:
        parameters["attention_factor"] = float(keys.number("rope.scaling.attn_factor"))
    return parameters


def _from_factors(keys: Keys, factors: np.ndarray, base: float) -> dict[str, Any]:
    """Parameters whose frequencies are the plain ones over these factors."""
    if (factors == 1).all():
        return {"rope_type": "default"}
    if np.ptp(factors) == 0:
        return {"rope_type": "linear", "factor": float(factors[0])}
    rounded = round(float(factors.max()), 3)  # what it was before float32
    factor = rounded if math.isclose(rounded, factors.max(), rel_tol=_EXACT) else float(factors.max())
    for original, high in _guesses(factors, base):
        if np.allclose(_llama3(len(factors), base, factor, original, high), factors, rtol=_EXACT, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    return {
        "rope_type": "longrope",  # of one set of factors, whatever the length
        "short_factor": factors.tolist(),
        "long_factor": factors.tolist(),
        "original_max_position_embeddings": keys.count("context_length"),
        "attention_factor": 1.0,
    }


def _guesses(factors: np.ndarray, base: float) -> list[tuple[int, float]]:
    """(original context, high_freq_factor) that may have made the factors; low_freq_factor is 1, as only ratios count.

    Between its ends the rule is linear in the frequency: 1/factor = (1 - s)/max + s, s = (turns - 1)/(high - 1) with
    the turns that a frequency makes in the original context.
    """
    guesses = [(1 << k, 4.0) for k in (13, *range(5, 13), *range(14, 21))]
    frequencies = base ** (-np.arange(len(factors)) / len(factors)) / (2 * math.pi)
    smooth = (1 / factors - 1 / factors.max()) / (1 - 1 / factors.max())
    between = (smooth > 1e-4) & (smooth < 1 - 1e-4)
    if between.sum() >= 2:
        slope, offset = np.polyfit(frequencies[between], smooth[between], 1)
        if offset < 0 < slope:
            guesses.insert(0, (max(1, round(-slope / offset)), round(float(1 - 1 / offset), 3)))
    return guesses


def _llama3(count: int, base: float, factor: float, original: int, high: float) -> np.ndarray:
    """Llama 3.1's factors."""
    turns = original * base ** (-np.arange(count) / count) / (2 * math.pi)
    smooth = np.clip((turns - 1) / (high - 1), 0, 1) if high > 1 else (turns > 1).astype(float)
    return 1 / ((1 - smooth) / factor + smooth)
