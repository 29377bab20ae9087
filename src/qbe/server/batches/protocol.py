"""What a batch is, on the wire and on disk."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from pydantic import Field

from qbe.server.fields import Body

_STATES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
OVER = ("completed", "failed", "expired", "cancelled")
_UNITS = {"m": 60, "h": 3600}


class OutputExpiry(Body):
    """When the files of answers and errors are deleted."""

    anchor: str = "created_at"
    seconds: Annotated[int, Field(ge=3600, le=2592000)]


class BatchRequest(Body):
    """Body of `/v1/batches`.

    Attributes:
        input_file_id: a file of purpose `batch`.
        endpoint: where each of its lines would be sent.
        completion_window: after it what is not answered is given up; minutes or hours, up to 30 days.
    """

    input_file_id: Annotated[str, Field(max_length=256)]
    endpoint: Annotated[str, Field(max_length=256)]
    completion_window: Annotated[str, Field(pattern="^[1-9][0-9]{0,4}[mh]$")]
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None
    output_expires_after: OutputExpiry | None = None

    def window_s(self) -> int:
        """Seconds."""
        return int(self.completion_window[:-1]) * _UNITS[self.completion_window[-1]]


@dataclass(frozen=True)
class StoredFile:
    """A file of a key.

    Attributes:
        key: whose it is.
        bytes: of its content.
        expires_at: when it is deleted, in seconds since 1970, as all times here.
    """

    id: str
    key: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int

    def describe(self) -> dict[str, Any]:
        """As OpenAI's file object."""
        fields = {k: v for k, v in asdict(self).items() if k != "key"}
        return fields | {"object": "file", "status": "processed", "status_details": None}


@dataclass(frozen=True)
class Batch:
    """A batch as it is now.

    Attributes:
        key: whose it is.
        keep_s: seconds that its files of answers and errors are kept.
        times: when it came into each state.
        total: requests of its file; 0 until these were read.
        completed, failed: of them, so far.
        usage: tokens of the answers so far.
        errors: why it failed.
        outcome: its state once it is `finalizing` no more.
    """

    id: str
    key: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None
    created_at: int
    expires_at: int
    keep_s: int
    status: str = "validating"
    times: dict[str, int] = field(default_factory=dict)
    output_file_id: str | None = None
    error_file_id: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: dict[str, int] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    outcome: str = "completed"

    @property
    def over(self) -> bool:
        """Whether nothing of it changes any more."""
        return self.status in OVER

    def become(self, status: str, now: int, **more: Any) -> Batch:
        """The same in another state."""
        return replace(self, status=status, times={**self.times, status: now}, **more)

    def describe(self) -> dict[str, Any]:
        """As OpenAI's batch object."""
        usage = {name: self.usage.get(name, 0) for name in ("input_tokens", "output_tokens", "total_tokens")}
        cached = {"cached_tokens": self.usage.get("cached_tokens", 0)}
        errors = {"object": "list", "data": self.errors} if self.errors else None
        return {
            "id": self.id, "object": "batch", "endpoint": self.endpoint, "input_file_id": self.input_file_id,
            "completion_window": self.completion_window, "metadata": self.metadata, "status": self.status,
            "created_at": self.created_at, "expires_at": self.expires_at, "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id, "errors": errors,
            **{f"{state}_at": self.times.get(state) for state in _STATES},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": {**usage, "input_tokens_details": cached, "output_tokens_details": {"reasoning_tokens": 0}},
        }  # fmt: skip
