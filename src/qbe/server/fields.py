"""What the fields of requests' bodies are made of: numbers with bounds, lists with limits, what is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from qbe.budget import MOST_PACE, check_kv_bits
from qbe.errors import QBEError
from qbe.server.messages import without_nulls
from qbe.sites import FULL_BITS, KV_BITS

ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]
Bits = Annotated[float, Field(ge=1, le=FULL_BITS)]


def _kv_bits(value: Any) -> Any:
    try:
        check_kv_bits(value)
    except QBEError as error:
        raise ValueError(str(error)) from None
    return value


KVBits = Annotated[
    Annotated[float, Field(ge=KV_BITS[0], le=FULL_BITS)] | Literal["turbo2", "turbo4"], BeforeValidator(_kv_bits)
]
Pace = Annotated[int, Field(strict=True, ge=1, le=MOST_PACE)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(min_length=1, max_length=1024)]
Name = Annotated[str, Field(pattern="^[A-Za-z0-9_.-]{1,128}$")]
Tokens = Annotated[list[Token], Field(min_length=1, max_length=2**20, fail_fast=True)]
MOST_PROMPTS = MOST_BIASES = 1024


def few(most: int) -> BeforeValidator:
    """So many members at most, which is checked before they are; pydantic checks all members of an object first."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"there are {len(value)} members, but at most {most} are taken")
        return value

    return BeforeValidator(check)


def _refuse(value: Any) -> Any:
    raise ValueError("this server cannot do that: leave it out (functions are given as 'tools')")


Refused = Annotated[None, BeforeValidator(_refuse)]


class Body(BaseModel):
    """Part of a request."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return without_nulls(data)
