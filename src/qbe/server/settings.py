"""The TOML file of a server: tiers, prices, limits, keys. Checked whole before it is used, reloaded when it changes."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, Strict, field_validator, model_validator

from qbe.budget import MOST_PACE, TIER_BITS
from qbe.records.ledger import UNIT
from qbe.refresh.thresholds import RUN, WINDOW
from qbe.server.energy import intensity
from qbe.server.health.settings import Health
from qbe.server.rollout.settings import Rollout, check_ceilings
from qbe.server.settings_table import SettingsTable
from qbe.sites import FULL_BITS

TierName = Literal["flex", "default", "priority"]
TIER_NAMES: tuple[TierName, ...] = ("flex", "default", "priority")  # from the lowest to the highest
Bits = Annotated[float, Strict(), Field(ge=1, le=FULL_BITS)]
Positive = Annotated[int, Strict(), Field(ge=1, le=2**40)]
_BOOKED = 2**63 - 1  # the most that fits into the ledger, in its units
_TOKENS = 10**7  # more than one prompt and its answers have; with more, prices in small currencies would be refused
_PATIENCE_S = {"flex": 30.0, "default": 5.0, "priority": 0.0}
_RESERVED = {"priority": 0.125}
_PROMPTS = {"flex": 0.25, "default": 0.5, "priority": 1.0}


class Tier(SettingsTable):
    """What a service tier may be served at.

    Attributes:
        bits: the average bits that the query's score chooses among, lowest and highest.
        floor: under pressure the range sinks to this average ("brownout") before anyone is refused; None: it does not.
        ceiling: the most that a request may ask for by itself.
        activation_bits: of the inputs of linear layers, where a request does not say.
        price: factor on the prices.
        patience_s: how long an answer of the tier lets later ones of higher tiers pass; None: 30 s for flex, 5 for
            default, 0 for priority.
        reserved: part of the batch's places that lower tiers leave free for it, rounded down; None: an eighth for
            priority, nothing for the others.
        prompts: part of a step's tokens that prompts may take where the tier's are among them, because whoever comes
            waits for the step that runs; None: a quarter for flex, half for default, all for priority.
    """

    bits: tuple[Bits, Bits]
    floor: Bits | None = None
    ceiling: Bits = float(FULL_BITS)
    activation_bits: Literal[8, 16] = 16
    price: Annotated[float, Strict(), Field(ge=0)] = 1.0
    patience_s: Annotated[float, Strict(), Field(ge=0)] | None = None
    reserved: Annotated[float, Strict(), Field(ge=0, lt=1)] | None = None
    prompts: Annotated[float, Strict(), Field(gt=0, le=1)] | None = None

    @model_validator(mode="after")
    def _rises(self) -> Self:
        low, high = self.bits
        if not (self.floor or low) <= low <= high <= self.ceiling:
            raise ValueError("floor, the two bits and ceiling must rise in this order")
        return self


class Tiers(SettingsTable):
    """The three tiers of OpenAI's `service_tier`."""

    flex: Tier = Tier(bits=TIER_BITS["flex"], floor=TIER_BITS["flex"][0])
    default: Tier = Tier(bits=TIER_BITS["default"], floor=TIER_BITS["flex"][0])
    priority: Tier = Tier(bits=TIER_BITS["priority"])

    def patience(self, name: str) -> float:
        """Seconds."""
        given: float | None = getattr(self, name).patience_s
        return _PATIENCE_S[name] if given is None else given

    def reserved(self, name: str) -> float:
        """A part of the batch's places."""
        given: float | None = getattr(self, name).reserved
        return _RESERVED.get(name, 0.0) if given is None else given

    def prompts(self, name: str) -> float:
        """A part of a step's tokens."""
        given: float | None = getattr(self, name).prompts
        return _PROMPTS[name] if given is None else given

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, given: Any) -> Any:
        """A table without bits has its tier's own, and their floor."""
        if not isinstance(given, dict):
            return given
        defaults: dict[str, dict[str, Any]] = {name: {"bits": TIER_BITS[name]} for name in TIER_NAMES}
        defaults["flex"]["floor"] = defaults["default"]["floor"] = TIER_BITS["flex"][0]
        return {
            name: {**defaults[name], **table}
            if name in defaults and isinstance(table, dict) and "bits" not in table
            else table
            for name, table in given.items()
        }

    @model_validator(mode="after")
    def _orders(self) -> Self:
        low, middle, high = (self.patience(name) for name in TIER_NAMES)
        if not low >= middle >= high:
            raise ValueError("patience_s must not rise from flex over default to priority")
        if sum(map(self.reserved, TIER_NAMES)) >= 1:
            raise ValueError("the tiers' reserved parts must add up to less than 1")
        return self


class Queues(SettingsTable):
    """How tiers share the batch.

    Attributes:
        apart: whether a batch has answers of one tier only, rather than all together. It then runs dry before another
            tier's turn comes.
        thin: with `apart`, answers of a tier that wait; with fewer, adjacent tiers fill its batch.
    """

    apart: bool = False
    thin: Annotated[int, Strict(), Field(ge=0)] = 4


class Prices(SettingsTable):
    """Per million tokens computed at 16 bits; a token at b bits costs b/16 of that, times its tier's factor."""

    currency: str = "USD"
    input: Annotated[float, Strict(), Field(ge=0)] = 0.0
    cached_input: Annotated[float, Strict(), Field(ge=0)] = 0.0
    output: Annotated[float, Strict(), Field(ge=0)] = 0.0

    @field_validator("currency")
    @classmethod
    def _word(cls, given: str) -> str:
        """It stands in the ledger, in metrics and in lines of text."""
        if not 1 <= len(given) <= 16 or not given.isprintable() or " " in given:
            raise ValueError("a currency is a word of up to 16 printable characters, such as USD")
        return given


class Limits(SettingsTable):
    """What one request and all of them may take.

    Attributes:
        queue: answers of each key in each tier that may wait beside those that are written; one more is refused.
        brownout: part of `queue` at which tiers with a floor begin to sink, if so much waits of them and of dearer
            ones; at all of it they have reached it.
        timeout_s: seconds a request may take in all.
        drain_s: seconds that running requests have to end after SIGTERM.
        answer_tokens: tokens of a chat answer whose request does not say.
        choices: answers of one request.
        connections: open ones, idle ones too.
        header_s: seconds that a request's headers may take to arrive.
        body_bytes, body_s: a request's body, and the seconds it may take to arrive.
        grammar_bytes, grammar_s: a schema or grammar, and the seconds its check may take.
    """

    queue: Positive = 64
    brownout: Annotated[float, Strict(), Field(ge=0, lt=1)] = 0.5
    timeout_s: Annotated[float, Strict(), Field(gt=0)] = 600.0
    drain_s: Annotated[int, Strict(), Field(ge=1)] = 60
    answer_tokens: Positive = 1024
    choices: Positive = 128
    connections: Positive = 4096
    header_s: Annotated[float, Strict(), Field(gt=0)] = 10.0
    body_bytes: Positive = 4 * 1024 * 1024
    body_s: Annotated[float, Strict(), Field(gt=0)] = 30.0
    grammar_bytes: Positive = 64 * 1024
    grammar_s: Annotated[float, Strict(), Field(gt=0)] = 5.0


class Weights(SettingsTable):
    """Which weights the server loads and how steps read them; read as it starts, and its command line goes first.

    Attributes:
        originals: where the 16-bit weights of nested sites live; None: nowhere on a GPU, else on the host.
        most_bits: the widest precision of the store that is loaded; None: all of it.
        device_memory: bytes of weights and KV cache on the device, as a number or as in "12GiB"; None: all weights fit.
        miss: what a row does whose slice is not there: read what is (`lower`), or `wait`.
        rows: what requests of one step read: `shared`, each site at the highest bits that any of them has there, or
            `exact`, each its own.
    """

    originals: Literal["none", "host", "device"] | None = None
    most_bits: Annotated[int, Strict(), Field(ge=1, le=8)] | None = None
    device_memory: Annotated[int, Strict()] | str | None = None
    miss: Literal["lower", "wait"] | None = None
    rows: Literal["exact", "shared"] = "shared"


class Refresh(SettingsTable):
    """Of requests with `refresh` that do not say themselves; read as the server starts.

    Attributes:
        interval: tokens after which an answer is looked at.
        count: looks in a row that must find it hard, or easy, for other bits.
    """

    interval: Annotated[int, Strict(), Field(ge=1, le=MOST_PACE)] = WINDOW
    count: Annotated[int, Strict(), Field(ge=1, le=MOST_PACE)] = RUN


class Energy(SettingsTable):
    """Budgets of power and carbon, which shift the default tier between its floor and its high end.

    Attributes:
        watts: power of the busy machine, assumed where nothing measures it; None: 5 a core, 300 for a GPU.
        power_w: average power that shall not be exceeded.
        carbon_g_per_h: grams of CO2 an hour that shall not be exceeded; needs `intensity`.
        intensity: of carbon, grams a kilowatt-hour: a number, a file or an http(s) URL.
        intensity_field: where in their JSON it is, as in `data.0.intensity.actual`; empty: they are the number.
        window_s: over which power is averaged before the tier is shifted by a quarter of the way.
        refresh_s: after which the intensity is asked for again.
    """

    watts: Annotated[float, Strict(), Field(gt=0)] | None = None
    power_w: Annotated[float, Strict(), Field(gt=0)] | None = None
    carbon_g_per_h: Annotated[float, Strict(), Field(gt=0)] | None = None
    intensity: Annotated[float, Strict(), Field(ge=0)] | str | None = None
    intensity_field: str = ""
    window_s: Annotated[float, Strict(), Field(gt=0)] = 30.0
    refresh_s: Annotated[float, Strict(), Field(gt=0)] = 300.0

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.carbon_g_per_h is not None and self.intensity is None:
            raise ValueError("carbon_g_per_h needs an intensity")
        if isinstance(self.intensity, str):
            intensity.check(self.intensity, self.intensity_field)
        return self


class Logs(SettingsTable):
    """Lines on standard error.

    Attributes:
        format: `text` or `json`, an object a line.
        prompts: whether a request's line has its prompt and its answers.
    """

    format: Literal["text", "json"] = "text"
    prompts: bool = False


class Http(SettingsTable):
    """Who may reach the server by which way.

    Attributes:
        private: whether `/metrics` and `/openapi.json` want an operator's key.
        cors_origins: sites whose pages may use the API, such as `https://example.org`; `*` is all of them.
    """

    private: bool = False
    cors_origins: tuple[str, ...] = ()


class Key(SettingsTable):
    """A client's key; only its hash is kept. What is None has no limit.

    Attributes:
        sha256: of the key, in hex.
        tiers: those it may use; `auto` is `default` where it may, else the first of them.
        operator: whether the console shows it everybody's requests, rather than its own.
        weight: its share of its tier's tokens beside other keys that have answers waiting.
        shared_prefixes: whether it finds cached prefixes of other such keys, and they its own.
        concurrent: its answers that run or wait at the same time.
        requests_per_minute, tokens_per_minute: prompt tokens and `max_tokens` count.
        tokens_per_day, tokens_per_month: of prompts and answers, since midnight or the first of the month, UTC.
        cost_per_day, cost_per_month: likewise, in the currency of `prices`.
    """

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    tiers: Annotated[tuple[TierName, ...], Field(min_length=1)] = ("flex", "default", "priority")
    operator: bool = False
    weight: Annotated[float, Strict(), Field(gt=0, le=1000)] = 1.0
    shared_prefixes: bool = False
    concurrent: Positive | None = None
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    tokens_per_day: Positive | None = None
    tokens_per_month: Positive | None = None
    cost_per_day: Annotated[float, Strict(), Field(gt=0)] | None = None
    cost_per_month: Annotated[float, Strict(), Field(gt=0)] | None = None


class Batches(SettingsTable):
    """Files of requests (`/v1/files`, `/v1/batches`), which are answered in places that nobody else wants.

    Attributes:
        folder: where files and batches are kept, by one server at a time; empty: `batches` in the cache folder. Read as
            the server starts.
        places: part of the batch's places that they may take, one at least.
        file_bytes, key_bytes: of one file, and of all that a key keeps, answers too.
        requests: of one file.
        upload_s: seconds that a file may take to arrive.
        days: after which files and batches are deleted.
    """

    folder: str = ""
    places: Annotated[float, Strict(), Field(gt=0, le=1)] = 0.5
    file_bytes: Positive = 64 * 1024 * 1024
    key_bytes: Positive = 512 * 1024 * 1024
    requests: Positive = 50_000
    upload_s: Annotated[float, Strict(), Field(gt=0)] = 600.0
    days: Annotated[int, Strict(), Field(ge=1, le=3650)] = 30


class Settings(SettingsTable):
    """The whole file. Every part has a default; without keys a server listens on the loopback interface only."""

    tiers: Tiers = Tiers()
    prices: Prices = Prices()
    limits: Limits = Limits()
    queues: Queues = Queues()
    logs: Logs = Logs()
    weights: Weights = Weights()
    refresh: Refresh = Refresh()
    energy: Energy = Energy()
    health: Health = Health()
    rollout: Rollout | None = None
    http: Http = Http()
    batches: Batches = Batches()
    keys: dict[str, Key] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if len({k.sha256 for k in self.keys.values()}) < len(self.keys):
            raise ValueError("keys: two of them have the same sha256")
        return self

    @model_validator(mode="after")
    def _candidate(self) -> Self:
        check_ceilings(self.rollout, self.tiers)
        return self

    @model_validator(mode="after")
    def _bookable(self) -> Self:
        """Whatever one row of the ledger may come to, fits."""
        tier = max(TIER_NAMES, key=lambda name: getattr(self.tiers, name).price)
        factor: float = getattr(self.tiers, tier).price
        for name in ("input", "cached_input", "output"):
            price: float = getattr(self.prices, name)
            if price * factor * (_TOKENS / 1e6) * UNIT > _BOOKED:
                most = _BOOKED / UNIT / (_TOKENS / 1e6)
                more = "" if factor == 1 else f" times {factor:g} (tiers.{tier}.price)"
                raise ValueError(
                    f"prices.{name}: {price:g}{more} is more than the {most:.0f} that can be booked: count in a larger "
                    "unit of the currency"
                )
        return self
