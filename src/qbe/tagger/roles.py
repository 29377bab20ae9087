"""The role of one module inside its block: well-known attribute names, checked against shapes and siblings."""

from __future__ import annotations

from torch import nn
from transformers.pytorch_utils import Conv1D

from qbe.sites import Role


def _table(entries: dict[Role, str]) -> dict[str, Role]:
    return {name: role for role, names in entries.items() for name in names.split()}


# Multi-head latent attention (DeepSeek): the two halves of the query projection are both `q`; the compression of
# keys and values and its expansion each hold both, so they count as fused.
ATTENTION_NAMES = _table(
    {
        Role.ATTENTION_Q: "q_proj query wq q_lin q q_a_proj q_b_proj",
        Role.ATTENTION_K: "k_proj key wk k_lin k",
        Role.ATTENTION_V: "v_proj value wv v_lin v",
        Role.ATTENTION_QKV: "qkv_proj qkv c_attn query_key_value Wqkv W_pack kv_proj kv_a_proj_with_mqa kv_b_proj",
        Role.ATTENTION_O: "o_proj out_proj dense c_proj wo Wo proj out_lin o",
    }
)
FFN_NAMES = _table(
    {
        Role.FFN_GATE: "gate_proj wi_0",
        Role.FFN_UP: "up_proj w1 w3 wi wi_1 Wi fc1 fc_in c_fc dense_h_to_4h linear_fc1 lin1 input_linear",
        Role.FFN_GATE_UP: "gate_up_proj",
        Role.FFN_DOWN: "down_proj w2 wo Wo fc2 fc_out c_proj dense_4h_to_h linear_fc2 lin2 output_linear",
    }
)
# The gate projections make step sizes, decays and the like from the mixer's input. They are small and steer the
# recurrence, so their error accumulates with it.
_SSM_NAMES = _table(
    {
        Role.SSM_GATE: "x_proj dt_proj in_proj_ba in_proj_a in_proj_b a_proj b_proj f_proj "
        "f_a_proj f_b_proj g_a_proj g_b_proj",
        Role.SSM_IN: "in_proj in_proj_qkvz in_proj_qkv in_proj_z linear_x linear_y "
        "q_proj k_proj v_proj g_proj qkv_proj",
        Role.SSM_OUT: "out_proj linear_out o_proj",
    }
)
SSM_OUT_NAMES = frozenset(name for name, role in _SSM_NAMES.items() if role is Role.SSM_OUT)

# Parameters of the recurrence itself: decay, skip and step-size bias; RecurrentGemma's decay.
STATE_PARAMETERS = frozenset({"A_log", "D", "dt_bias", "recurrent_param"})


def matrix_features(module: nn.Module) -> tuple[int, int] | None:
    """`(out_features, in_features)` of a module that multiplies by one matrix; None for every other module."""
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 2 or isinstance(module, nn.Embedding):
        return None
    out_features, in_features = weight.shape
    if isinstance(module, Conv1D):  # GPT-2's linear stores its weight transposed
        return in_features, out_features
    return out_features, in_features


def is_norm(module: nn.Module) -> bool:
    """Whether the module is a normalisation layer with a learned scale."""
    return "norm" in type(module).__name__.lower() and not isinstance(module, nn.Linear)


def attention_role(name: str) -> Role:
    """Role of a matrix with this attribute name in an attention block."""
    return ATTENTION_NAMES.get(name, Role.UNKNOWN)


def ffn_role(name: str, module: nn.Module, block: nn.Module) -> Role:
    """Role of a matrix with this attribute name in the feed-forward block `block`."""
    role = FFN_NAMES.get(name, Role.UNKNOWN)
    siblings = dict(block.named_children())
    if name == "w1" and "w3" in siblings:  # Meta's names: w2(act(w1 x) * w3 x)
        return Role.FFN_GATE
    if role is Role.FFN_UP:
        features = matrix_features(module)
        down = [matrix_features(m) for n, m in siblings.items() if FFN_NAMES.get(n) is Role.FFN_DOWN]
        # Twice as many outputs as the down projection reads: gate and up stored as one.
        if features and any(d is not None and features[0] == 2 * d[1] for d in down):
            return Role.FFN_GATE_UP
    return role


def mixer_role(name: str, module: nn.Module) -> Role:
    """Role of a module with this attribute name in a state-space or convolution mixer (220d)."""
    if isinstance(module, nn.Conv1d):
        return Role.SSM_CONV
    if is_norm(module):
        return Role.SSM_GATE if "gated" in type(module).__name__.lower() else Role.NORM
    return _SSM_NAMES.get(name, Role.UNKNOWN)
