"""The plan: the device tensors that a batch of blueprints becomes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from qbe.blueprint import Blueprint
from qbe.hardware import detect
from qbe.kernels.cuda.dispatch import UNIFORM_ROWS
from qbe.kernels.reference.activations import EIGHT_IN_BYTE
from qbe.kernels.reference.eight_bit_rows import DTYPES
from qbe.sites import FULL_BITS, Role, SiteTable
from qbe.store.expert_counter import ExpertCounter
from qbe.store.nested_experts import NestedExperts
from qbe.store.nested_tensor import NestedTensor
from qbe.store.read_limits import ReadLimits
from qbe.store.shared_rows import SharedRows

_CACHED_BLUEPRINTS = 256  # columns kept on the device; more than sequences ever run in one step


class Plan:
    """Precision of every nested site for every row of a step. Kernels read it; `write` changes a few bytes of it.

    Attributes:
        precision_words: int32 `[nested sites but experts, max_rows]`: the weight's bits in the lowest byte, the
            activations' in the next one (`qbe.kernels.reference.activations`).
        expert_bytes: uint8 `[columns, expert sites]`: of each blueprint a byte for every expert's matrix. Experts are
            thousands, so that rows do not have them each, but the number of their blueprint's column:
        row_columns: int32 `[max_rows]`.
        dynamic_precision: int32 `[max_rows]`: who may move a row's words while a step runs
            (`DynamicPrecision.code`); 0: nobody. An op that does so writes to `precision_words`, whose next
            step begins with the blueprint's bits again.
        head_dynamic_precision: likewise, of the rows that the output head sees.
        shared: raises the rows of a step to the highest bits of any; None: each reads its own.
        limits: lowers rows to what is resident; None: everything is.
        use: counts the experts that steps use; None: the model has none that are nested.

    The plan's `kv_bits` belong to the pages and are in `qbe.kvcache.pages.PagePool`.

    Args:
        table: whose nested sites, in order, are the rows.
        max_rows: tokens of the largest step; 1 when every forward has one sequence, whose single column then serves
            all its tokens.
        device: where the kernels run.
        head_sees_kept: whether the output head sees only the rows whose logits are kept, rather than every token.
        shared: whether the rows of a step share what they read; in a plan of one row there is nothing to share.
    """

    def __init__(
        self, table: SiteTable, max_rows: int, device: torch.device, head_sees_kept: bool = True, shared: bool = False
    ) -> None:
        self.table, self.max_rows, self.device = table, max_rows, device
        self.shared = SharedRows(table) if shared and max_rows > 1 else None
        self.limits: ReadLimits | None = None
        self._plain = [i for i, s in enumerate(table.nested) if s.expert is None]
        self._plain_places = np.array(self._plain, np.intp)
        self._experts = [i for i, s in enumerate(table.nested) if s.expert is not None]
        sites = len(self._plain)
        self._rows = torch.zeros(sites + 2, max_rows, dtype=torch.int32, device=device)
        self.precision_words, self.dynamic_precision, self.head_dynamic_precision = (
            self._rows[:sites],
            self._rows[sites],
            self._rows[sites + 1],
        )
        # Valid from the start: whoever runs the model before a write reads the least.
        lowest = [s.gears[0] for s in table.nested]
        self.precision_words.copy_(torch.tensor([lowest[i] for i in self._plain], dtype=torch.int32)[:, None])
        heads = [at for at, i in enumerate(self._plain) if table.nested[i].role is Role.OUTPUT_HEAD and head_sees_kept]
        self._of_kept = [*heads, sites + 1] if heads else []
        capacity = max(_CACHED_BLUEPRINTS, max_rows)
        self._columns = torch.zeros(capacity, sites + 2, dtype=torch.int32, device=device)
        least = torch.tensor([lowest[i] for i in self._experts], dtype=torch.uint8)
        self.expert_bytes = least.repeat(capacity, 1).to(device)
        self.row_columns = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._column_of: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self.use: ExpertCounter | None = None
        self._weights: list[NestedTensor] = []
        self._told = False  # whether any weight holds a `uniform`
        self._written: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def share(self, shared: SharedRows | None) -> None:
        """From the next step on rows share what they read, or (None) each reads its own bits. Steps that were captured
        or compiled keep the kernels that they have."""
        self.shared = shared
        for weight in self._weights:
            weight.batch_invariant = shared is None

    @property
    def nbytes(self) -> int:
        """Bytes on its device."""
        return self._rows.nbytes + self._columns.nbytes + self.expert_bytes.nbytes + self.row_columns.nbytes

    def bind(self, model: nn.Module) -> None:
        """Let every nested linear layer of `model` read its words here: `weight.bits` becomes a view of its row. Nested
        experts likewise read their bytes.

        It is told, too, whether it multiplies long prompts in the device's own 8-bit format, and to give logits as they
        are.
        """
        form = detect(self.device).prompt_format
        sites = [self.table.nested[i] for i in self._plain]
        self._weights = [model.get_submodule(site.name).weight for site in sites]  # type: ignore[misc]
        able = dict(zip(self._plain, (w.multiplies_natively for w in self._weights), strict=True))
        self.use = ExpertCounter(model, self.device) if self._experts else None
        natives = self.table.native(form, [able.get(i, False) for i in range(len(self.table.nested))])
        for at, i in enumerate(self._experts):
            site = self.table.nested[i]
            if site.expert == 0:
                matrices = model.get_submodule(site.name.rpartition(".")[0])
                assert isinstance(matrices, NestedExperts)
                matrices.precision, matrices.rows = self.expert_bytes[:, at : at + len(matrices)], self.row_columns
        for site, weight, precision_words, native in zip(
            sites, self._weights, self.precision_words, (natives[i] for i in self._plain), strict=True
        ):
            weight.bits, weight.native = precision_words, DTYPES[form] if form and native else None
            weight.float32_output = site.role is Role.OUTPUT_HEAD
            weight.batch_invariant = self.shared is None

    def write(self, rows: Sequence[tuple[Blueprint, int]], kept: Sequence[Blueprint]) -> None:
        """Set the plan for one forward.

        No weight is touched and the device is not waited for: at most two small index tensors go to it, and nothing at
        all when the rows are those of the step before.

        Args:
            rows: in the order of the step's tokens, a blueprint and how many tokens in a row have it.
            kept: the blueprints of the rows whose logits are kept, which are the rows that the output head sees.

        Raises:
            ValueError: more rows than `max_rows`, or different blueprints in a plan of one row.
        """
        if not len(self.table.nested):
            return
        if self.use is not None:
            # A compiled step with prompts is made for any number of rows, and so adds them.
            self.use.keep(self.max_rows == 1 and sum(n for _, n in rows) <= self.use.rows)
        read = self.read([*(b for b, _ in rows), *kept])
        tokens = rows = [(b, n) for b, (_, n) in zip(read, rows, strict=False)]
        kept = read[len(rows) :]
        if self.max_rows == 1:
            if len({b.linear_key for b, _ in rows}) > 1:
                raise ValueError("a plan of one row cannot hold two blueprints")
            rows, kept = [(rows[0][0], 1)], []
        owners = tuple(c for blueprint, n in rows for c in [self._column(blueprint)] * n)
        if len(owners) > self.max_rows:
            raise ValueError(f"{len(owners)} rows do not fit a plan of {self.max_rows}")
        kept_owners = tuple(self._column(b) for b in kept)
        if self._written == (owners, kept_owners):
            return
        self._tell([b for b, _ in tokens], sum(n for _, n in tokens))
        index = torch.tensor(owners + kept_owners).to(self.device, non_blocking=True)
        self._rows[:, : len(owners)] = self._columns.index_select(0, index[: len(owners)]).T
        if self._experts:
            self.row_columns[: len(owners)] = index[: len(owners)]
        if kept_owners:
            columns = self._columns.index_select(0, index[len(owners) :])
            for row in self._of_kept:
                self._rows[row, : len(kept_owners)] = columns[:, row]
        steered = any(b.dynamic_precision is not None for b, _ in tokens)
        self._written = None if steered else (owners, kept_owners)  # what is steered does not stay as written

    def columns(self, blueprints: Sequence[Blueprint]) -> list[int]:
        """The number of the column that each row of a step at fixed shapes reads, for `gather`; a new one goes to the
        device."""
        if self.use is not None:
            self.use.keep(True)
        return [self._column(b) for b in self.read(blueprints)] if len(self.table.nested) else [0] * len(blueprints)

    def read(self, blueprints: Sequence[Blueprint]) -> list[Blueprint]:
        """What the rows of a step with these blueprints read: the same ones, unless they share it or lack a slice."""
        wanted = self.wanted(blueprints)
        return wanted if self.limits is None else [self.limits.of(b) for b in wanted]

    def wanted(self, blueprints: Sequence[Blueprint]) -> list[Blueprint]:
        """What they would read if everything were resident."""
        if self.shared is None:
            return list(blueprints)
        read = self.shared.of(blueprints)
        return [read[b.linear_key].blueprint for b in blueprints]

    def gather(self, columns: torch.Tensor) -> None:
        """Set the first rows to these columns: one launch that a CUDA graph can hold, for rows that all keep logits.

        Args:
            columns: int64 `[rows]` on the plan's device.
        """
        if len(self.table.nested):
            self._rows[:, : columns.shape[0]] = self._columns.index_select(0, columns).T
            if self._experts:
                self.row_columns[: columns.shape[0]] = columns

    def forget(self) -> None:
        """What the rows hold is not what `write` wrote last."""
        self._written = None
        self._tell([], 0)

    def _tell(self, blueprints: Sequence[Blueprint], tokens: int) -> None:
        """Let the weights know which of them every row of a long step reads at the same word.

        Where they share it, whatever their activations: a long product of 16-bit ones is as fast, and closer.
        """
        if tokens < UNIFORM_ROWS and not self._told:
            return
        self._told = tokens >= UNIFORM_ROWS
        columns = {b.linear_key: self._precision_words(b).tolist() for b in blueprints}.values() if self._told else ()
        steered = any(b.dynamic_precision is not None for b in blueprints)
        for i, weight in enumerate(self._weights):
            precision_words = {column[i] for column in columns}
            alike = len(precision_words) == 1 or (bool(precision_words) and self.shared is not None)
            weight.uniform = min(precision_words) if alike and not steered else None  # the least has 16-bit activations

    def _column(self, blueprint: Blueprint) -> int:
        """Where the blueprint's column is on the device; it is copied there when it is new."""
        key = blueprint.linear_key
        if key in self._column_of:
            self._column_of.move_to_end(key)
            return self._column_of[key]
        if len(self._column_of) < len(self._columns):
            column = len(self._column_of)
        else:
            _, column = self._column_of.popitem(last=False)
            self._written = None  # the column may be the one that was written
        words = torch.from_numpy(self._precision_words(blueprint))
        self._columns[column].copy_(words, non_blocking=True)
        if self._experts:
            gears = np.array([blueprint.weight_bits, blueprint.activation_bits])[:, self._experts]
            eight = np.where(gears[1] < FULL_BITS, EIGHT_IN_BYTE, 0)
            self.expert_bytes[column].copy_(torch.from_numpy((gears[0] + eight).astype(np.uint8)), non_blocking=True)
        self._column_of[key] = column
        return column

    def _precision_words(self, blueprint: Blueprint) -> np.ndarray:
        """The blueprint's column, int32: a word for each site but experts; its dynamic precision, of layers and of
        head."""
        weights, activations = (
            np.frombuffer(bytes(bits), np.uint8).astype(np.int32)[self._plain_places]
            for bits in (blueprint.weight_bits, blueprint.activation_bits)
        )
        words = np.empty(len(self._plain) + 2, np.int32)
        words[:-2] = np.where(activations < FULL_BITS, weights | activations << 8, weights)  # `precision_word`
        words[-2:] = 0 if blueprint.dynamic_precision is None else blueprint.dynamic_precision.code
        return words
