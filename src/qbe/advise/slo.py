"""A service level objective: the bounds that a server shall keep."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, Strict, ValidationError, model_validator

from qbe.errors import QBEError
from qbe.files import reason
from qbe.server.settings_table import SettingsTable

_Positive = Annotated[float, Strict(), Field(gt=0)]
_Share = Annotated[float, Strict(), Field(gt=0, le=1)]


class SLO(SettingsTable):
    """The table `[slo]`; what is left out is not bounded.

    Attributes:
        quantile: of the times.
        ttft_ms: from a request's arrival to its first token.
        itl_ms: between two tokens of an answer.
        memory_gb: of weights, originals, KV cache, states, graphs and workspace, in 10^9 bytes.
        cost_per_success: of what clients told of, in the server's currency.
        success_rate: least share of rated answers that succeeded.
        live_kl: divergence from the widest gear, nats a token.
    """

    quantile: Annotated[float, Strict(), Field(gt=0, lt=1)] = 0.95
    ttft_ms: _Positive | None = None
    itl_ms: _Positive | None = None
    memory_gb: _Positive | None = None
    cost_per_success: _Positive | None = None
    success_rate: _Share | None = None
    live_kl: _Positive | None = None

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if not self.model_dump(exclude_none=True, exclude={"quantile"}):
            raise ValueError("no bound is given: give at least one, such as ttft_ms")
        return self


class _File(SettingsTable):
    slo: SLO


def load(path: Path) -> SLO:
    """The file's. Raises QBEError, in one line with the place."""
    try:
        return _File.model_validate(tomllib.loads(path.read_text("utf-8"))).slo
    except OSError as error:
        raise QBEError(f"--slo {path} cannot be read: {reason(error)}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["loc"] == ("slo",) and first["type"] == "missing":
            raise QBEError(f"--slo {path}: there is no table [slo]: put the bounds into one") from None
        where = ".".join(map(str, first["loc"])) or "the file"
        said = "there is no such bound" if first["type"] == "extra_forbidden" else first["msg"]
        raise QBEError(f"--slo {path}: {where}: {said.removeprefix('Value error, ')}") from None
    except ValueError as error:  # TOML and UTF-8
        raise QBEError(f"--slo {path} is not TOML: {error}") from None
