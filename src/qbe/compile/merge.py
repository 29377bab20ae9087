"""Merges calls of `qbe::nested_linear` that read the same input into calls of `qbe::nested_linears`."""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from qbe.kernels.ops import merged_linear as merged_ops
from qbe.kernels.ops import nested_linear as ops

_aten = torch.ops.aten
# Nodes that only look at their input: they can be moved to where it is.
_VIEWS = {
    _aten.slice.Tensor, _aten.as_strided.default, _aten.view.default, _aten.expand.default, _aten.select.int,
    _aten.alias.default, _aten.detach.default, _aten.reshape.default, operator.getitem,
}  # fmt: skip


class MergeLinears(CustomGraphPass):
    """The pass, for a graph without mutations (Inductor's `post_grad_custom_pre_pass`).

    Linears are merged when they have the same input and slices, all of them an original (a bias) or none, and results
    in the input's dtype.
    """

    def __call__(self, graph: Graph) -> None:
        groups: dict[tuple[object, ...], list[Node]] = defaultdict(list)
        for node in graph.nodes:
            if node.op == "call_function" and node.target is torch.ops.qbe.nested_linear.default:
                x, _, _, _, original, bias, slices, *_ = node.args
                float32_output, batch_invariant = flags(node)
                if not float32_output:
                    groups[x, tuple(slices), original is None, bias is None, batch_invariant].append(node)
        for group in groups.values():
            if len(group) > 1:
                _merge(graph, group)

    def uuid(self) -> bytes:
        """What Inductor's cache knows this pass by."""
        return get_hash_for_files((__file__, merged_ops.__file__, ops.__file__))


def flags(node: Node) -> tuple[bool, bool]:
    """`float32_output` and `batch_invariant` of a call of `qbe::nested_linear`."""
    given = node.args[8:]
    return bool(given[0]) if given else False, bool(given[1]) if len(given) > 1 else True


def _merge(graph: Graph, group: list[Node]) -> None:
    """Put one call where the first of the group is, for as many of the group as can have their arguments there."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    first = group[0]
    group = [first, *(n for n in group[1:] if all(hoist(a, first, order) for a in n.all_input_nodes))]
    if len(group) == 1:
        return
    x, _, _, _, original, bias, slices, *_ = first.args
    packed, meta, bits, originals, biases, exponents = (
        [n.args[i] for n in group] for i in (1, 2, 3, 4, 5, 7)
    )  # fmt: skip
    last = x.meta["val"].dim() - 1  # type: ignore[union-attr]
    with graph.inserting_before(first):
        arguments = (x, packed, meta, bits, originals if original is not None else [],
                     biases if bias is not None else [], slices, exponents, flags(first)[1])  # fmt: skip
        merged = graph.call_function(torch.ops.qbe.nested_linears.default, arguments)
        values: Any = torch.fx.node.map_arg(arguments, lambda n: n.meta["val"])
        merged.meta["val"] = merged_ops.fake(*values)
        start = 0
        for node in group:
            width = node.meta["val"].shape[-1]
            part = graph.call_function(_aten.slice.Tensor, (merged, last, start, start + width))
            part.meta["val"] = _aten.slice.Tensor(merged.meta["val"], last, start, start + width)
            node.replace_all_uses_with(part)
            start += width
    for node in group:
        graph.erase_node(node)


def hoist(node: Node, before: Node, order: dict[Node, int]) -> bool:
    """Make `node` come before another; whether that could be done. Views of what comes before it are moved."""
    if order[node] < order[before]:
        return True
    if node.op != "get_attr" and not (node.op == "call_function" and node.target in _VIEWS):
        return False
    if not all(hoist(a, before, order) for a in node.all_input_nodes):
        return False
    before.prepend(node)
    order[node] = order[before] - 1
    return True
