"""The memory of the KV cache: pages of 16, 8, 4 and 2 bits side by side (layout: `qbe.format.kv_blocks`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from qbe.errors import QBEError
from qbe.format.kv_blocks import FORMATS, FULL_BITS, KV_BITS, PAGE_SIZE, head_layout, quantised_pages
from qbe.kernels.ops.kv_pages import quantise_pages, read_pages
from qbe.kvcache.allocator import Page, PageFormat
from qbe.sites import TURBO_KINDS, KVBits, kv_number_bits


def pages_for(tokens: int) -> int:
    """Pages that `tokens` tokens need."""
    return -(-tokens // PAGE_SIZE)


def block_ids_of(pages: Sequence[Page], quantised: int) -> list[int]:
    """What a block table says of pages of which the first `quantised` are looked at as they are quantised."""
    return [p.quantised_block_id for p in pages[:quantised]] + [p.block_id for p in pages[quantised:]]


def newly_quantised(pages: Sequence[Page], start: int, end: int) -> Sequence[Page]:
    """Of a sequence's pages those that are to be quantised when its tokens `[start, end)` have been written."""
    return pages[quantised_pages(start // PAGE_SIZE) : quantised_pages(end // PAGE_SIZE)]


def in_runs(pages: Sequence[Page], quantised: int, slides: bool) -> list[Page]:
    """A sequence's pages as a decode step reads them: of the `quantised` ones, those of one format after the other.

    Attention is a sum over pages in any order, and a walk is faster the seldomer their format changes. A window is told
    by positions, so that where one slides in any layer pages stay in order.
    """
    if slides:
        return list(pages)
    return [*sorted(pages[:quantised], key=lambda p: p.format.number), *pages[quantised:]]


@dataclass(frozen=True)
class KVShape:
    """What one layer stores for a token: `kv_heads` keys of `key_dim` and values of `value_dim` numbers.

    latent: one latent in the key's place and the rotary part of the keys in the value's (`qbe.kvcache.latent`).
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    latent: bool = False

    @property
    def numbers(self) -> int:
        """Numbers stored for a token."""
        return self.kv_heads * (self.key_dim + self.value_dim)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The three, as kernels take them."""
        return self.kv_heads, self.key_dim, self.value_dim


def page_bytes(shapes: Sequence[KVShape | None], dtype: torch.dtype) -> int:
    """Bytes of a page of 16 bits."""
    return sum(s.kv_heads * head_layout(FULL_BITS, s.key_dim, s.value_dim, dtype.itemsize).nbytes for s in shapes if s)


def most_pages(shapes: Sequence[KVShape | None], dtype: torch.dtype, num_pages: int) -> int:
    """Pages of the fewest bits that fit in the memory of `num_pages` pages of 16 bits."""
    least = sum(
        s.kv_heads * head_layout(KV_BITS[0], s.key_dim, s.value_dim, dtype.itemsize).nbytes for s in shapes if s
    )
    return num_pages * page_bytes(shapes, dtype) // max(1, least)


class PagePool:
    """The pages' memory, allocated once, and the formats they have.

    Attributes:
        memory: uint8 `[(num_pages + 1) * page_bytes]`.
        page_bytes: of a page of 16 bits.
        head_offsets: per layer int32 `[FORMATS, kv_heads]`, where a format has each head's block and with how many
            bits. With the pages' block ids this is what the KV bits of a batch's blueprints become.
        spare: address of one page more, which no sequence owns: rows that pad a batch write there.
    """

    def __init__(
        self, shapes: Sequence[KVShape | None], num_pages: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shapes, self.num_pages, self.dtype, self.device = list(shapes), num_pages, dtype, device
        self.page_bytes = page_bytes(shapes, dtype)
        self.spare = num_pages * self.page_bytes
        self.memory = torch.zeros((num_pages + 1) * self.page_bytes, dtype=torch.uint8, device=device)
        # Layers of one shape are quantised in one launch; their head offsets lie in one tensor.
        self._alike: dict[KVShape, list[int]] = {}
        for layer, shape in enumerate(self.shapes):
            if shape is not None:
                self._alike.setdefault(shape, []).append(layer)
        self._head_offsets = {
            s: torch.zeros(len(layers), FORMATS, s.kv_heads, dtype=torch.int32, device=device)
            for s, layers in self._alike.items()
        }
        self.head_offsets = [
            None if s is None else self._head_offsets[s][self._alike[s].index(i)] for i, s in enumerate(self.shapes)
        ]
        self._numbers: dict[tuple[tuple[int, ...], ...], PageFormat] = {}
        self._asked: dict[tuple[KVBits, ...], PageFormat] = {}  # the same, by what was asked for
        self.full = self.format((), Counter())

    @property
    def latent(self) -> bool:
        """Whether any layer's pages hold latents."""
        return any(s is not None and s.latent for s in self.shapes)

    def alike(self) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Layers of one shape, and their head offsets int32 `[layers, FORMATS, kv_heads]`."""
        for shape, layers in self._alike.items():
            yield layers, self._head_offsets[shape]

    def has_number(self, kv_bits: Sequence[KVBits], uses: Counter[int]) -> bool:
        """Whether `format` would find or make the one with these bits."""
        known = tuple(kv_bits) in self._asked or len(self._numbers) < FORMATS
        return known or any(f.number and not uses[f.number] for f in self._numbers.values())

    def format(self, kv_bits: Sequence[KVBits], uses: Counter[int]) -> PageFormat:
        """The format with these bits, known to the device from now on.

        Args:
            kv_bits: one for each layer; layers past its end have 16. Those without attention are not looked at.
            uses: number of a format -> pages of it; others may lose their number when all are taken.

        Raises:
            QBEError: bits that there are not, or more formats than numbers.
        """
        asked = tuple(kv_bits)
        if asked in self._asked:
            return self._asked[asked]
        bits = tuple(self._heads_bits(layer, asked) for layer in range(len(self.shapes)))
        if bits in self._numbers:
            self._asked[asked] = self._numbers[bits]
            return self._asked[asked]
        number = len(self._numbers)
        if number == FORMATS:
            unused = next((b for b, f in self._numbers.items() if f.number and not uses[f.number]), None)
            if unused is None:
                raise QBEError(f"more than {FORMATS} KV precisions are in use at once: choose fewer different ones")
            number = self._numbers.pop(unused).number
            self._asked.clear()
        offset = 0
        for layer, (shape, heads) in enumerate(zip(self.shapes, bits, strict=True)):
            row = []
            for b in heads:
                assert shape is not None
                row.append(offset | b)
                offset += head_layout(b, shape.key_dim, shape.value_dim, self.dtype.itemsize).nbytes
            head_offsets = self.head_offsets[layer]
            if head_offsets is not None:
                head_offsets[number].copy_(torch.tensor(row, dtype=torch.int32), non_blocking=True)
        self._numbers[bits] = self._asked[asked] = PageFormat(number, offset, bits, self._average(bits))
        return self._numbers[bits]

    def to_quantise(self, pages: Sequence[Page]) -> torch.Tensor | None:
        """int64 `[2, n]` on the device: of those pages that have a staging_page to leave, what `quantise` needs; None
        for none."""
        pages = [p for p in pages if p.staging_page is not None]
        if not pages:
            return None
        return torch.tensor([[p.staging_page for p in pages], [p.quantised_block_id for p in pages]]).to(self.device)

    def quantise(self, pages: torch.Tensor | None, layer: int | None = None) -> None:
        """Bring the numbers of full pages (from `to_quantise`) from their staging_pages to their own bytes.

        At one layer, or at all of them: then in one launch for all layers of a shape.
        """
        if pages is None:
            return
        for shape, layers in self._alike.items():
            if layer is None or layer in layers:
                head_offsets = (
                    self._head_offsets[shape] if layer is None else self._head_offsets[shape][layers.index(layer), None]
                )
                quantise_pages(self.memory, head_offsets, pages[0], pages[1], shape.sizes, self.dtype)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy staging pages, by their addresses, to others."""
        staging_pages = self.memory.view(self.num_pages + 1, self.page_bytes)
        for source, target in pairs:
            staging_pages[target // self.page_bytes] = staging_pages[source // self.page_bytes]

    def read(self, layer: int, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[1, kv_heads, P * PAGE_SIZE, dim]` of pages at a layer; entries int64 `[P]`."""
        shape, head_offsets = self.shapes[layer], self.head_offsets[layer]
        assert shape is not None
        assert head_offsets is not None
        keys, values = read_pages(self.memory, head_offsets, block_ids, shape.sizes, self.dtype)
        return keys[None], values[None]

    def not_numbers(self, pages: Sequence[Page], tokens: int) -> str | None:
        """Where a sequence's keys or values first are NaN or infinite, in words, if anywhere. It waits for the device.

        Args:
            pages: of the sequence.
            tokens: how many are in them.
        """
        block_ids = torch.tensor([p.block_id for p in pages[: pages_for(tokens)]], device=self.device)
        for layer, shape in enumerate(self.shapes):
            if shape is None or not len(block_ids):
                continue
            for name, numbers in zip(("keys", "values"), self.read(layer, block_ids), strict=True):
                bad = ~numbers[0, :, :tokens].isfinite().all(-1)  # [kv_heads, tokens]
                if bad.any():
                    head = int(bad.any(1).nonzero()[0])
                    first = int(bad[head].nonzero()[0]) // PAGE_SIZE * PAGE_SIZE
                    last = min(first + PAGE_SIZE, tokens) - 1
                    return f"the {name} of layer {layer}, key head {head} in the page of tokens {first} to {last}"
        return None

    def _heads_bits(self, layer: int, kv_bits: Sequence[KVBits]) -> tuple[int, ...]:
        shape = self.shapes[layer]
        if shape is None:
            return ()
        asked = kv_bits[layer] if layer < len(kv_bits) else FULL_BITS
        heads = asked if isinstance(asked, tuple) else (asked,) * shape.kv_heads
        kinds = (*KV_BITS, *TURBO_KINDS.values())
        if len(heads) != shape.kv_heads or any(b not in kinds for b in heads):
            raise QBEError(
                f"KV bits of layer {layer} are {asked}, but must be one of {', '.join(map(str, kinds))}, for all of "
                f"its {shape.kv_heads} key heads or for each"
            )
        return heads

    def _average(self, bits: Sequence[tuple[int, ...]]) -> float:
        """Bits of a number of a page with these bits of heads."""
        sizes = [s.numbers // s.kv_heads if s else 0 for s in self.shapes]
        numbers = sum(n * len(heads) for n, heads in zip(sizes, bits, strict=True))
        total = sum(n * sum(map(kv_number_bits, heads)) for n, heads in zip(sizes, bits, strict=True))
        return total / numbers if numbers else float(FULL_BITS)


def average_bits(shapes: Sequence[KVShape | None], kv_bits: Sequence[KVBits]) -> float:
    """Mean bits of a number in the cache, scales not counted; 16 for a model without attention."""
    total = count = 0.0
    for layer, shape in enumerate(shapes):
        if shape is not None:
            bits = kv_bits[layer] if layer < len(kv_bits) else FULL_BITS
            heads = bits if isinstance(bits, tuple) else (bits,)
            mean = sum(map(kv_number_bits, heads)) / len(heads)
            total, count = total + mean * shape.numbers, count + shape.numbers
    return total / count if count else float(FULL_BITS)
