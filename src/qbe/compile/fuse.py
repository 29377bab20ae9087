"""On a GPU: norms and gates that few rows of nested linears read become ops that quantise for these as well.

What is found is RMS norm, with or without the sum before it, and SwiGLU, as transformers' Llama, Mistral and Qwen write
them. What is written in another way stays as it is, and is quantised by a launch of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.custom_graph_pass import get_hash_for_files
from torch.fx import Graph, Node

from qbe.compile import merge
from qbe.format.layout import SliceLayout
from qbe.kernels.cuda.dispatch import WHOLE_ROW, input_form
from qbe.kernels.ops import fused as fused_ops
from qbe.kernels.ops import merged_linear as merged_ops
from qbe.kernels.ops import nested_linear as ops
from qbe.kernels.triton.linear.tiled.layout import group_size_of, padded_shape

_aten, _convert = torch.ops.aten, torch.ops.prims.convert_element_type.default


Sizes = tuple[int, int, list[Node]]
"""Padded inputs, group and words of the linears, as `qbe.kernels.ops.fused` takes them."""


class FuseRows(merge.MergeLinears):
    """The pass: merges linears, then fuses what makes their input."""

    def __call__(self, graph: Graph) -> None:
        super().__call__(graph)
        fuse(graph)

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__, merge.__file__, fused_ops.__file__, merged_ops.__file__, ops.__file__))


def fuse(graph: Graph, device: str = "cuda") -> None:
    """Of a graph in which linears are merged, those on this device."""
    fused = False
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is torch.ops.qbe.nested_linears.default:
            *arguments, batch_invariant = (*node.args, True)[:9]
            fused |= _fuse(graph, node, arguments, batch_invariant, device)
        elif node.target is torch.ops.qbe.nested_linear.default:
            x, packed, meta, bits, original, bias, slices, exponent, *_ = node.args
            float32_output, batch_invariant = merge.flags(node)
            lists = [packed], [meta], [bits], [original] if original else [], [bias] if bias else []
            fused |= _fuse(graph, node, (x, *lists, slices, [exponent], float32_output), batch_invariant, device)
    if fused:
        graph.eliminate_dead_code()


def _fuse(graph: Graph, node: Node, arguments: Any, batch_invariant: bool, device: str) -> bool:
    """Put the fused op in the place of what makes the input of this linear, if that is known; whether it was."""
    x, packed, meta, bits, _, _, slices, *_ = arguments
    value = x.meta["val"]
    rows = value.numel() // value.shape[-1]
    tiled = all(p.meta["val"].dim() == 1 for p in packed)
    form = input_form(rows, value.dtype, tiled, len(packed), batch_invariant) if isinstance(rows, int) else None
    if form is None:
        return False
    if value.device.type != device or value.dtype not in (torch.float16, torch.bfloat16):
        return False
    if not value.is_contiguous():  # as the ops' results are
        return False
    n, k, layout = meta[0].meta["val"].shape[1], value.shape[-1], SliceLayout.of(slices)
    inputs = padded_shape(n, k, layout)[1]
    if form == "half" and inputs > WHOLE_ROW:
        return False
    words = list(bits) if form == "half" else []
    sizes = inputs, group_size_of(packed[0].meta["val"], n, k, layout), words
    ready = _with_norm(graph, x, sizes) or _with_gate(graph, x, sizes)
    if ready is None:
        return False
    with graph.inserting_before(node):
        given = (*ready, *(*arguments[1:], False)[:8], batch_invariant)
        y = _call(graph, torch.ops.qbe.converted_linears.default, fused_ops.fake_linears, given)
    node.replace_all_uses_with(y)
    graph.erase_node(node)
    return True


def _with_norm(graph: Graph, x: Node, sizes: Sizes) -> tuple[Node, Node] | None:
    """The normed x and its bytes, if x is a norm."""
    norm = _norm(x)
    if norm is None or not norm[0].meta["val"].is_contiguous():
        return None
    h, weight, eps = norm
    order = {node: i for i, node in enumerate(graph.nodes)}
    if not all(merge.hoist(w, x, order) for w in sizes[2]):
        return None
    if _is(h, _aten.add.Tensor) and _alike(*h.args, h) and all(merge.hoist(w, h, order) for w in (weight, *sizes[2])):
        with graph.inserting_before(h):
            outputs = _call(
                graph, torch.ops.qbe.add_norm.default, fused_ops.fake_add_norm, (*h.args, weight, eps, *sizes), 3
            )
        h.replace_all_uses_with(outputs[0])
        normed, quantised = outputs[1:]
    else:
        with graph.inserting_before(x):
            arguments = (h, weight, eps, *sizes)
            normed, quantised = _call(graph, torch.ops.qbe.norm.default, fused_ops.fake_norm, arguments, 2)
    x.replace_all_uses_with(normed)
    return normed, quantised


def _with_gate(graph: Graph, x: Node, sizes: Sizes) -> tuple[Node, Node] | None:
    """The gated x and its bytes, if x is a SwiGLU."""
    gate = _gate(x)
    order = {node: i for i, node in enumerate(graph.nodes)}
    if gate is None or not all(merge.hoist(w, x, order) for w in sizes[2]):
        return None
    with graph.inserting_before(x):
        gated, quantised = _call(graph, torch.ops.qbe.gate.default, fused_ops.fake_gate, (*gate, *sizes), 2)
    x.replace_all_uses_with(gated)
    return gated, quantised


def _norm(x: Node) -> tuple[Node, Node, float] | None:
    """h, weight and eps if x = weight * (h * rsqrt(mean(h**2) + eps)), of which h is rounded from float32."""
    for weight, rounded in _orders(x, _aten.mul.Tensor):
        scaled = _source(rounded, _convert)
        for float32_output, root in _orders(scaled, _aten.mul.Tensor):
            mean_eps = _source(root, _aten.rsqrt.default)
            h = _widened(float32_output)
            if h is None or not _is(mean_eps, _aten.add.Tensor) or not _given(weight):
                continue
            mean, eps = mean_eps.args
            power = _source(mean, _aten.mean.dim)
            if (
                not _is(power, _aten.pow.Tensor_Scalar)
                or power.args != (float32_output, 2)
                or not isinstance(eps, float)
            ):
                continue
            dims, keep = (*mean.args[1:], False)[:2]
            last = h.meta["val"].dim() - 1
            if keep and tuple(dims) in ((-1,), (last,)) and _shaped(weight, h) and _alike(h, rounded):
                return h, weight, eps
    return None


def _gate(x: Node) -> tuple[Node, Node] | None:
    """gate and up if x = silu(gate) * up, of which silu is rounded from float32."""
    for silu, up in _orders(x, _aten.mul.Tensor):
        inner = _source(silu, _convert)
        float32_output = None
        if _is(inner, _aten.div.Tensor):  # g / (exp(-g) + 1)
            float32_output, under = inner.args
            power = under.args[0] if _is(under, _aten.add.Tensor) and under.args[1] == 1 else None
            if _source(_source(power, _aten.exp.default), _aten.neg.default) is not float32_output:
                continue
        for g, sigmoid in _orders(inner, _aten.mul.Tensor):  # g * sigmoid(g)
            if _source(sigmoid, _aten.sigmoid.default) is g:
                float32_output = g
        gate = _widened(float32_output)
        if gate is not None and _alike(gate, up, x):
            return gate, up
    return None


def _given(node: Any) -> bool:
    """Whether it is there before the graph runs: the kernel reads a weight while those before it may still write."""
    return isinstance(node, Node) and node.op in ("placeholder", "get_attr")


def _is(node: Any, target: object) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target is target and not node.kwargs


def _source(node: Any, target: object) -> Any:
    """The first argument of a call of `target`; None of anything else."""
    return node.args[0] if _is(node, target) else None


def _orders(node: Any, target: object) -> list[tuple[Any, Any]]:
    """The two arguments of a call of `target` in both orders; nothing of anything else."""
    return [node.args, node.args[::-1]] if _is(node, target) else []


def _widened(node: Any) -> Node | None:
    """What was converted to float32."""
    source = _source(node, _convert)
    return source if source is not None and node.args[1] is torch.float32 else None


def _alike(*nodes: Any) -> bool:
    """Whether they are tensors of one shape and dtype."""
    if not all(isinstance(n, Node) for n in nodes):
        return False
    values = [n.meta["val"] for n in nodes]
    return all(v.shape == values[0].shape and v.dtype is values[0].dtype for v in values)


def _shaped(weight: Node, x: Node) -> bool:
    """Whether it has a number for each input, in x's dtype."""
    value = weight.meta["val"]
    return value.shape == x.meta["val"].shape[-1:] and value.dtype is x.meta["val"].dtype


def _call(graph: Graph, op: Any, fake: Callable[..., Any], arguments: Any, outputs: int = 0) -> Any:
    """A call of an op with several outputs, or with one (0)."""
    call = graph.call_function(op, tuple(arguments))
    call.meta["val"] = fake(*torch.fx.node.map_arg(tuple(arguments), lambda n: n.meta["val"]))
    if not outputs:
        return call
    parts = [graph.call_function(operator.getitem, (call, i)) for i in range(outputs)]
    for i, part in enumerate(parts):
        part.meta["val"] = call.meta["val"][i]
    return parts
