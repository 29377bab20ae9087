"""`qbe::bounded_attention` written out: what reading pages at few bits can have changed, and the pages read again.

The bound. A query q sees tokens t with keys k and values v; s = f(scaling * q.k) are their scores, f the soft cap or
nothing. Quantised, they are k', v', s' with weights w' = softmax(s'), and nothing but `number_error` is known of them:
|k'_d - k_d| <= eps_d and |v'_d - v_d| <= eps_t. For a page let W be the sum of its w' and

    e = |scaling| * sum_d |q_d| eps_d >= |s' - s|       (f is 1-Lipschitz)
    h = mean over its w' of |v' - v|  <= sqrt(dim) eps_t
    a = mean over its w' of |v|       <= |v'| + sqrt(dim) eps_t

with Euclidean norms; e = h = 0 at 16 bits. Then u = w' exp(s - s') are the true weights up to a factor, and the true
output is o = sum u v / Z, Z = sum u. Read any set of pages again, and let b be u on those, w' on the rest: the answer
is o" = (sum_again u v + sum_rest w' v') / N, N = sum b. Both Z and N are at least L = sum_pages W exp(-e). With
m = sum b v / N, whose norm is at most R = sum_pages W exp(e) a / L:

    |o" - m| = |sum_rest w' (v' - v)| / N               <= sum_rest W h / L
    |o - m|  = |sum (u - b) (v - m)| / Z                (as sum b (v - m) = 0)
             = |sum_rest w' (exp(s - s') - 1) (v - m)| / Z
            <= sum_rest W (exp(e) - 1) (a + R) / L

    |o" - o| <= sum over the pages not read again of B,  B = W (h + (exp(e) - 1) (a + R)) / L

It holds in exact arithmetic; the rounding of sums, which 16-bit pages have too, is not in it. Keys, values and queries
turned by an orthonormal matrix have the same products and norms: q is the query as quantised blocks see it, rotated.
A sink is a token whose score and value, 0, are exact.
Turbo keys have no eps (a bound by their sketch scale is too wide to keep any page), so theirs is infinite.
"""

from __future__ import annotations

import torch

from qbe.format.kv_blocks import FULL_BITS, NO_ORIGINAL, PAGE_SIZE, TURBO, head_layout
from qbe.kernels.reference.kv_pages import LARGEST, error_bound, find, read_pages, write_rows
from qbe.kernels.reference.paged_attention import weights_of
from qbe.kernels.reference.rotation import rotate
from qbe.sites import kv_number_bits

SLACK = 1.001  # for the rounding of the bound itself


def number_error(scale: torch.Tensor, low: torch.Tensor, bits: int) -> torch.Tensor:
    """eps: how far a number may be from its code's, float64; infinite where it may have been cut to float16's range."""
    high = low.double() + scale.double() * (2**bits - 1)
    inside = (low.double().abs() < LARGEST) & (high.abs() < LARGEST)
    return torch.where(inside, error_bound(scale, low, bits), torch.inf)


def page_bounds(
    query: torch.Tensor,
    weights: torch.Tensor,
    values: torch.Tensor,
    key_errors: torch.Tensor,
    value_errors: torch.Tensor,
    pages: torch.Tensor,
    scaling: float,
    at_sink: torch.Tensor,
) -> torch.Tensor:
    """B of every page and query head, `[heads, P]`.

    Args:
        query: `[heads, key_dim]`.
        weights: w', `[heads, tokens]`.
        values: v', `[heads, tokens, value_dim]`, those of each query head's key head; likewise the errors.
        key_errors, value_errors: eps `[heads, P, key_dim]` and `[heads, tokens]`, 0 at 16 bits.
        pages: int64 `[tokens]`, the page of each token.
        at_sink: `[heads]`, the weight of each head's sink, 0 where it has none.
    """
    count = key_errors.shape[1]

    def by_page(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(x.shape[0], count).index_add_(1, pages, x)

    e = abs(scaling) * torch.einsum("hd,hpd->hp", rotate(query).abs(), key_errors)
    moved = value_errors * values.shape[2] ** 0.5
    share = by_page(weights)
    h, a = by_page(weights * moved), by_page(weights * (values.norm(dim=2) + moved))  # times the page's share
    least = (share * torch.exp(-e)).sum(1, keepdim=True) + at_sink[:, None]
    centre = (a * torch.exp(e)).sum(1, keepdim=True) / least
    return (h + torch.expm1(e) * (a + share * centre)) / least


def pages_to_raise(bounds: torch.Tensor, allowed: float) -> torch.Tensor:
    """bool `[P]`: the pages to read again, so that the bounds of the rest add up to at most `allowed`.

    All above the largest of allowed / 1, 2, 4, ... that does; what is not a number is above.
    """
    highest = allowed
    while float(bounds[bounds <= highest].sum()) > allowed:
        highest /= 2
    return ~(bounds <= highest)


def bounded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    memory: torch.Tensor,
    head_offsets: torch.Tensor,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    entropy: torch.Tensor,
    originals: torch.Tensor,
    limits: torch.Tensor,
    counts: torch.Tensor,
    scaling: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Arguments and result as those of `qbe.kernels.ops.bounded_attention.bounded_attention`. It waits for the
    device."""
    write_rows(key, value, memory, head_offsets, slots)
    heads, shape, dtype = query.shape[1], (key.shape[1], key.shape[2], value.shape[2]), key.dtype
    repeat, full = heads // shape[0], head_layout(FULL_BITS, *shape[1:], dtype.itemsize)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = []
    for row, (q, length) in enumerate(zip(query.to(wide), lengths.tolist(), strict=True)):
        first = max(0, length - window) if window else 0
        begin, end = first // PAGE_SIZE, -(-length // PAGE_SIZE)
        seen = slice(first - begin * PAGE_SIZE, length - begin * PAGE_SIZE)
        block_ids = block_tables[row, begin:end]
        keys, values = read_pages(memory, head_offsets, block_ids, shape, dtype, wide)

        def attend(q: torch.Tensor = q, seen: slice = seen) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            k, v = (t[:, seen].repeat_interleave(repeat, 0) for t in (keys, values))  # noqa: B023
            scores = torch.einsum("hd,hkd->hk", q, k) * scaling
            scores = torch.tanh(scores / softcap) * softcap if softcap else scores
            weights = weights_of(scores, sinks)
            return weights, v, torch.einsum("hk,hkd->hd", weights[:, : k.shape[1]], v)

        weights, v, y = attend()
        limit, kept = float(limits[row]), originals[row, begin:end].tolist()
        if limit < torch.inf:
            errors = [_errors(memory, head_offsets, e, shape, dtype) for e in block_ids.tolist()]
            key_errors = torch.stack([k for k, _ in errors], 1).to(wide).repeat_interleave(repeat, 0)
            value_errors = torch.cat([v for _, v in errors], 1).to(wide)[:, seen].repeat_interleave(repeat, 0)
            pages = (torch.arange(first, length, device=q.device) // PAGE_SIZE) - begin
            own, at_sink = weights[:, : len(pages)], weights[:, len(pages) :].sum(1)
            bounds = SLACK * page_bounds(q, own, v, key_errors, value_errors, pages, scaling, at_sink)
            for head in range(shape[0]):
                lowered = torch.tensor([
                    find(head_offsets, block_id, head)[0] != FULL_BITS and original != NO_ORIGINAL
                    for block_id, original in zip(block_ids.tolist(), kept, strict=True)
                ])  # fmt: skip
                raised = torch.zeros_like(lowered)
                for query_head in range(head * repeat, (head + 1) * repeat):
                    head_bounds = torch.where(lowered, bounds[query_head].cpu(), 0.0)
                    raised |= lowered & pages_to_raise(head_bounds, limit * float(y[query_head].norm()))
                for page in raised.nonzero().flatten().tolist():
                    original_at = torch.tensor([kept[page]], device=memory.device)
                    rows = slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
                    again = read_pages(memory, head_offsets, original_at, shape, dtype, wide)
                    keys[head, rows], values[head, rows] = again[0][head], again[1][head]
                number = int(raised.sum())
                counts[row] += torch.tensor([int(lowered.sum()), number, number * full.nbytes], device=counts.device)
            weights, v, y = attend()
        entropy[row, :heads] = -torch.special.xlogy(weights, weights).sum(-1)
        out.append(y)
    return torch.stack(out).to(query.dtype)


def _errors(
    memory: torch.Tensor, head_offsets: torch.Tensor, block_id: int, shape: tuple[int, int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """eps of a page's channels `[kv_heads, key_dim]` and tokens `[kv_heads, PAGE_SIZE]`, float64."""
    kv_heads, key_dim, value_dim = shape
    keys = torch.zeros(kv_heads, key_dim, dtype=torch.float64, device=memory.device)
    values = torch.zeros(kv_heads, PAGE_SIZE, dtype=torch.float64, device=memory.device)
    for head in range(kv_heads):
        kind, address = find(head_offsets, block_id, head)
        if kind != FULL_BITS:
            layout, bits = head_layout(kind, key_dim, value_dim, dtype.itemsize), kv_number_bits(kind)
            scale, low = memory[address + layout.value_scales :][: 4 * PAGE_SIZE].view(torch.float16).view(2, PAGE_SIZE)
            values[head] = number_error(scale, low, bits)
            if kind > TURBO:
                keys[head] = torch.inf
                continue
            scale, low = memory[address + layout.key_scales :][: 4 * key_dim].view(torch.float16).view(2, key_dim)
            keys[head] = number_error(scale, low, bits)
    return keys, values
