"""A suite: what is asked, how much may be lost, and how either side is served. A TOML file, or a built-in one."""

from __future__ import annotations

import hashlib
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from qbe.errors import QBEError
from qbe.files import reason

DEFAULT, QUICK = "default", "quick"
BUILT_IN = "built-in"  # in place of a path: text that comes with the package
DOMAINS = ("logic", "schema", "tools", "retrieval", "safety", "own")
Domain = Literal["logic", "schema", "tools", "retrieval", "safety", "own"]
Kind = Literal["rows", "gsm8k", "bbh", "humaneval", "schemas", "bfcl", "xstest", "needles"]
Share = Annotated[float, Field(gt=0, le=1)]
Factor = Annotated[float, Field(ge=1)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Sampling(_Table):
    """How answers are drawn.

    Attributes:
        temperature: 0 is greedy.
        seeds: of the baseline's and the candidate's answers, where they are drawn.
    """

    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    seeds: tuple[int, int] = (0, 0)


class Side(_Table):
    """How the baseline or the candidate is asked and, where it is a folder, served.

    Attributes:
        request: fields of every request, such as `qbe = {kv_bits = 4, speculate = true}`. Of a baseline that is served
            here they are `qbe = {bits = 16, kv_bits = 16}` where nothing is said.
        options: more options of `qbe serve`.
    """

    request: dict[str, Any] | None = None
    options: tuple[str, ...] = ()


class Limits(_Table):
    """How far the candidate may be from the baseline.

    Attributes:
        flips: share of the items whose answers become right or wrong; where answers are greedy.
        divergence: nats a token between the two next-token distributions, on text of some hundred tokens.
        long_divergence: the same on the long text, of which most is in the KV cache.
        first_token, per_token: seconds over the baseline's.
        memory: of the server after all answers, over the baseline's.
        cost: per item that is answered right, over the baseline's.
        coverage: share of a domain's items that the baseline must get right, for the domain to say anything.
        gain: in the share of right answers, from which on it is too good to be true.
        unended: loss in the share of answers that end by themselves. Wording alone moves some past a short limit of
            tokens; an end that is not recognised loses nearly all.
    """

    flips: Share = 0.1
    divergence: Annotated[float, Field(gt=0)] = 0.05
    long_divergence: Annotated[float, Field(gt=0)] = 0.03
    first_token: Factor = 2.0
    per_token: Factor = 2.0
    memory: Factor = 1.25
    cost: Factor = 1.25
    coverage: Annotated[float, Field(ge=0, le=1)] = 0.05
    gain: Share = 0.1
    unended: Share = 0.2


class Probes(_Table):
    """What is asked beside the items.

    Attributes:
        passages: texts whose likelihoods are compared; 0: none.
        long_characters: of the long one; 0: none.
        prompts: that are answered under each law of the sampler; 0: none.
        weights: whether the weights of folders are compared.
    """

    passages: Annotated[int, Field(ge=0)] = 8
    long_characters: Annotated[int, Field(ge=0)] = 4000
    prompts: Annotated[int, Field(ge=0)] = 4
    weights: bool = True


class Items(_Table):
    """Items of one source.

    Attributes:
        domain: whose gates they count in.
        kind: what the file is: `rows` (QBE's JSON lines, docs/regress.md), `gsm8k`, `bbh`, `humaneval`, `schemas`,
            `bfcl`, `xstest`, or `needles`, whose path is a text or folder of texts, or "built-in".
        path: of the file or folder, from the folder of the suite; "built-in:NAME" is one that comes with the package.
        limit: items at most, spread over the source.
        sha256: of the file; items that are not those of this digest make the verdict anomalous.
        characters: lengths of the texts that needles are hidden in.
        max_tokens: of an answer, where another number is wanted than the kind's.
    """

    domain: Domain
    kind: Kind
    path: str
    limit: Annotated[int, Field(ge=1)] = 1 << 30
    sha256: str | None = None
    characters: tuple[Annotated[int, Field(ge=200)], ...] = (3000,)
    max_tokens: Annotated[int, Field(ge=1)] | None = None


class Suite(_Table):
    """All of it.

    Attributes:
        name: in the verdict.
        alpha: error rate: bounds have the confidence 1 - alpha, and a loss is one if it is as unlikely by chance,
            divided by the number of comparisons.
        together: requests at once.
        margins: domain -> the loss in the share of right answers that is accepted.
        device: of the servers.
    """

    name: str = "suite"
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    together: Annotated[int, Field(ge=1, le=256)] = 8
    device: Literal["auto", "cpu", "cuda"] = "auto"
    sampling: Sampling = Sampling()
    baseline: Side = Side()
    candidate: Side = Side()
    margins: dict[Domain, Share] = Field(default_factory=dict)
    limits: Limits = Limits()
    probes: Probes = Probes()
    items: tuple[Items, ...] = ()
    folder: Path = Path()
    digest: str = ""

    @model_validator(mode="after")
    def _has_margins(self) -> Suite:
        if missing := sorted({i.domain for i in self.items} - self.margins.keys()):
            raise ValueError(f"margins.{missing[0]}: items of this domain need a margin")
        return self


def load(path: Path | None, quick: bool = False) -> Suite:
    """A suite.

    Args:
        path: its file; None takes the built-in one, `quick` or not.

    Raises:
        QBEError: it cannot be read, is no TOML or holds something that does not fit, in one line with the place.
    """
    name = QUICK if quick else DEFAULT
    where = Path(str(files(__package__).joinpath("suites", f"{name}.toml"))) if path is None else path
    try:
        content = where.read_bytes()
        given = tomllib.loads(content.decode())
    except OSError as error:
        raise QBEError(f"--suite {where} cannot be read: {reason(error)}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise QBEError(f"--suite {where} is not TOML: {error}") from None
    if taken := {"folder", "digest"} & given.keys():
        raise QBEError(f"--suite {where}: {taken.pop()}: there is no such setting")
    own = {"folder": where.absolute().parent, "digest": hashlib.sha256(content).hexdigest()}
    try:
        return Suite.model_validate({"name": where.stem, **given, **own})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        said = "there is no such setting" if first["type"] == "extra_forbidden" else first["msg"]
        parts = [str(where), place, said.removeprefix("Value error, ")]
        raise QBEError(f"--suite {': '.join(p for p in parts if p)}") from None
