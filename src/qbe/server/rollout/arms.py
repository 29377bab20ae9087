"""Who is in which arm: a hash decides, so that every server of a fleet with the same salt says the same."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from qbe.server.rollout.settings import Candidate, Rollout

if TYPE_CHECKING:
    from qbe.server.contract import Terms
    from qbe.server.keys import Client

ArmName = Literal["stable", "candidate"]
ARMS: tuple[ArmName, ...] = ("stable", "candidate")


@dataclass(frozen=True)
class Arm:
    """What a request was served by.

    Attributes:
        run: number of the rollout and its step that it began in: what it shows counts there only.
    """

    name: ArmName
    run: int


def unit(rollout: Rollout, client: Client, conversation: str | None) -> str:
    """What stays in one arm: the client's key; where there are none, or by `sticky`, its conversation; else its
    address.

    A kind goes before, so that a conversation cannot be named like a key.
    """
    named = "" if client.key is None else f"key {client.name}"
    if conversation is not None and (client.key is None or rollout.sticky == "conversation"):
        return f"{named} conversation {conversation}"
    return named or f"address {client.address}"


def place(salt: str, unit: str) -> float:
    """Where a unit stands between 0 and 100; below the weight is the candidate's arm, so that more weight moves nobody
    out of it."""
    hashed = hashlib.sha256(f"{len(salt)} {salt} {unit}".encode("utf-8", "replace")).digest()
    return 100 * int.from_bytes(hashed[:8]) / 2**64


def takes_part(candidate: Candidate, terms: Terms) -> bool:
    """Whether the candidate would change anything for a request: what it asks for itself it has in any case."""
    contract = terms.contract
    return terms.tier in candidate.tiers and any(
        (
            candidate.bits is not None and contract.bits is None,
            candidate.policy is not None and contract.policy is None,
            candidate.kv_bits is not None and contract.kv_bits is None,
            candidate.activation_bits is not None and contract.activation_bits is None,
        )
    )


def as_candidate(terms: Terms, candidate: Candidate, run: int) -> Terms:
    """The terms with the candidate's bits in place of the tier's; they keep those of the stable arm, for whom they
    cannot be met."""
    tier = terms.tier_settings
    changes: dict[str, object] = {}
    if candidate.bits is not None:
        floor = None if tier.floor is None else min(tier.floor, candidate.bits[0])
        changes |= {"bits": candidate.bits, "floor": floor}
    if candidate.activation_bits is not None:
        changes["activation_bits"] = candidate.activation_bits
    stable = replace(terms, arm=Arm("stable", run))
    return replace(
        terms, arm=Arm("candidate", run), candidate=candidate, stable=stable,
        tier_settings=tier.model_copy(update=changes),
    )  # fmt: skip
