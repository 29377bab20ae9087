"""Which blueprint a conversation has, so that its next turn keeps it: only then can that go on from its cached prefix.

A prompt goes on with a conversation when it begins with the whole of an earlier one. (Requests with one system prompt
do not: their prompts part where the users' messages begin, and each has the blueprint of its own score.) What a chat
template writes for the answer to come may be missing from the history, as Qwen's empty thoughts are: the earlier
prompt's last tokens may also stand at the end of the new one.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from qbe.analysis import QueryProfile
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.policies.allocate import TOLERANCE
from qbe.policies.kv import same_contexts
from qbe.sites import SiteTable

ENTRIES = 65_536  # about 200 bytes each
TAIL = 8  # tokens of a prompt that a template may leave out of the history
_FACTOR = 0x9E3779B97F4A7C15  # of a polynomial modulo 2^64; what it finds is compared by a digest

Tokens = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Turn:
    """A prompt that ran.

    Attributes:
        blueprint: that it had.
        tier: of its budget.
        context: tokens of the prompt and of the longest answer.
        own_kv: whether its KV bits were left to the policy.
    """

    blueprint: Blueprint
    tier: str
    context: int
    own_kv: bool = True

    def kept(self, asked: Blueprint, budget: Budget, profile: QueryProfile, table: SiteTable) -> Blueprint:
        """What the next turn has: this one's bits where its budget allows them, those of `asked` otherwise.

        The weights' bits must be within the range that the budget leaves to the score, of the same tier and policy, and
        at least `profile.least_bits` where the range has so many. The KV bits stay until the context has become long
        enough for fewer, so that only the score's part of them is kept.

        Args:
            asked: what the next turn's own score gives.
            profile: of the next turn.
        """
        before = self.blueprint
        if budget.plain_tier != self.tier or asked.policy != before.policy or asked.dynamic_precision is not None:
            return asked
        found = asked
        low, high = budget.range
        low = max(low, min(profile.least_bits, budget.average_for(1.0)))
        if (
            budget.bits is None
            and before.activation_bits == asked.activation_bits
            and low - TOLERANCE <= before.average_weight_bits(table) <= high + 1e-9
        ):
            found = replace(found, weight_bits=before.weight_bits)
        if self.own_kv and budget.kv_bits is None and found.weight_bits == before.weight_bits:
            _, longest = same_contexts(self.context, budget, table, before.bytes_per_token(table))
            if profile.context <= longest:
                found = replace(found, kv_bits=before.kv_bits, first_kv_bits=before.first_kv_bits)
        return asked if found.key == asked.key else found


@dataclass(frozen=True)
class _Entry:
    """A turn under all of its prompt but the tokens `tail`; `digest` is of the others."""

    digest: bytes
    tail: tuple[int, ...]
    turn: Turn


class Conversations:
    """The prompts that ran lately, of one model. Threads may share it.

    Args:
        entries: at most; those used least recently go first. A prompt has up to `TAIL` + 1.
    """

    def __init__(self, entries: int = ENTRIES) -> None:
        self._most = entries
        self._entries: OrderedDict[tuple[bytes, int, int], _Entry] = OrderedDict()
        self._lock = threading.Lock()

    def began(self, salt: bytes, token_ids: Sequence[int], turn: Turn) -> None:
        """A prompt runs.

        Args:
            salt: whose; nobody else's prompts go on with it.
        """
        tokens, count = np.asarray(token_ids, np.uint64), len(token_ids)
        hashes = _prefix_hashes(tokens)
        with self._lock:
            for tail in range(min(TAIL + 1, count)):
                length = count - tail
                key = salt, length, int(hashes[length - 1])
                self._entries[key] = _Entry(_digest(tokens[:length]), tuple(token_ids[length:]), turn)
                self._entries.move_to_end(key)
            while len(self._entries) > self._most:
                self._entries.popitem(last=False)

    def find(self, salt: bytes, token_ids: Sequence[int]) -> Turn | None:
        """The longest prompt with which these tokens go on."""
        if not self._entries:
            return None
        tokens = np.asarray(token_ids, np.uint64)
        hashes = _prefix_hashes(tokens).tolist()
        with self._lock:
            for length in range(len(token_ids), 0, -1):
                entry = self._entries.get((salt, length, hashes[length - 1]))
                if entry is None or tuple(token_ids[len(token_ids) - len(entry.tail) :]) != entry.tail:
                    continue
                if entry.digest == _digest(tokens[:length]):
                    return entry.turn
        return None


def _prefix_hashes(tokens: Tokens) -> Tokens:
    """uint64 [n]: a number for the first token, for the first two, and so on."""
    powers = np.cumprod(np.full(len(tokens), _FACTOR, np.uint64))
    return np.cumsum((tokens + np.uint64(1)) * powers)


def _digest(tokens: Tokens) -> bytes:
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()
