"""Whether an answer has run into a loop of tokens."""

from __future__ import annotations

from collections.abc import Sequence

LEAST = 8  # times that a piece is there one after the other
LONGEST = 64  # tokens of a piece
SPAN = 48  # tokens that the loop has at least, so that "------" and a short list are none


def ends_in_loop(token_ids: Sequence[int]) -> bool:
    """Whether the answer's last tokens are one piece again and again."""
    n = len(token_ids)
    for period in range(1, min(LONGEST, n // LEAST) + 1):
        same = 0
        while same + period < n and token_ids[n - 1 - same] == token_ids[n - 1 - same - period]:
            same += 1
        if same + period >= max(LEAST * period, SPAN):
            return True
    return False
