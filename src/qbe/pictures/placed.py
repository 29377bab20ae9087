"""Where a prompt's pictures lie among its tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from qbe.errors import QBEError
from qbe.pictures.picture import Picture
from qbe.pictures.tower import PictureTower


@dataclass(eq=False)
class PlacedPicture:
    """A picture of a sequence.

    Attributes:
        places: the positions of its rows, ascending; other tokens may lie between them.
        rows: `[len(places), hidden]` while its prompt is computed, else None.
    """

    picture: Picture
    places: Sequence[int]
    rows: torch.Tensor | None = field(default=None, repr=False)

    def between(self, start: int, end: int) -> slice:
        """Which of its rows have positions in `[start, end)`."""
        return slice(bisect_left(self.places, start), bisect_left(self.places, end))

    def within(self, start: int, end: int) -> bool:
        """Whether any has."""
        found = self.between(start, end)
        return found.start < found.stop


@dataclass(frozen=True)
class RotaryPositions:
    """Positions of three dimensions (M-RoPE): time, height and width, which are one and the same for text.

    Attributes:
        prompt: of its tokens, int64 `[3, tokens]`.
        after: of the token that follows.
    """

    prompt: torch.Tensor
    after: int

    @classmethod
    def of_prompt(cls, prompt: torch.Tensor) -> RotaryPositions:
        """Of a sequence whose prompt has these."""
        return cls(prompt, int(prompt.max()) + 1)

    def of(self, start: int, count: int) -> torch.Tensor:
        """Of the sequence's tokens `[start, start + count)`, int64 `[3, count]`."""
        known, tokens = self.prompt[:, start : start + count], self.prompt.shape[1]
        first = self.after + max(start, tokens) - tokens
        more = torch.arange(first, first + count - known.shape[1])
        return torch.cat([known, more.expand(3, -1)], 1)


def place(pictures: Sequence[Picture], ids: Sequence[int], tower: PictureTower) -> tuple[PlacedPicture, ...]:
    """The pictures of a prompt, in their order.

    Args:
        ids: its tokens, as `spliced` gave them.

    Raises:
        QBEError: they are others.
    """
    token = tower.processor.token_id
    places = [i for i, t in enumerate(ids) if t == token]
    found, first = list[PlacedPicture](), 0
    for picture in pictures:
        count = tower.token_ids(picture).count(token)
        found.append(PlacedPicture(picture, places[first : first + count]))
        first += count
    if first != len(places):
        raise QBEError(f"the prompt has places for {len(places)} rows of pictures, but its pictures have {first}")
    return tuple(found)


def spliced(ids: Sequence[int], pictures: Sequence[Picture], tower: PictureTower, model: str) -> list[int]:
    """A prompt's tokens with all that stands for each picture where the chat template wrote one token.

    Args:
        model: its name, for messages.

    Raises:
        QBEError: the template has not written one token for each picture, or a picture cannot be prepared.
    """
    token = tower.processor.token_id
    written = sum(t == token for t in ids)
    if written != len(pictures):
        raise QBEError(
            f"the chat template of {model} writes {written} places for {len(pictures)} pictures: give as many "
            "as it takes, in messages of the user"
        )
    left, whole = iter(pictures), list[int]()
    for t in ids:
        if t == token:
            whole += tower.token_ids(next(left))
        else:
            whole.append(t)
    return whole
