"""Keys and values that another server computed: which of vLLM's connectors keep precisions apart, and what the server
that computed a prompt tells the one that writes the answer.

A connector moves a request's own blocks, or names blocks as vLLM's prefix cache does, by hashes that start with the
request's salt. One that names blocks by their tokens alone would give a request the keys of another precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from qbe.errors import QBEError
from qbe.sites import SiteTable
from qbe.vllm import QUANTIZATION
from qbe.vllm.blueprint_payload import KEY, BlueprintPayload

MOVE = ("NixlConnector", "NixlPullConnector")
NAME_BY_HASH = ("OffloadingConnector", "SimpleCPUOffloadConnector")
REMOTE = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")
AGAIN = f"serve both halves with --quantization {QUANTIZATION} and send them the same request"


def check(config: Any) -> bool:
    """Whether a `VllmConfig` has a connector that brings requests the keys and values of their prompts.

    Raises:
        ValueError: one that QBE does not know to keep precisions apart, in one line.
    """
    names = list(_connectors(config))
    for name in names:
        if name not in MOVE + NAME_BY_HASH:
            raise ValueError(
                f"--quantization {QUANTIZATION} does not go with the KV connector {name}, which may reuse a prefix "
                f"that was computed at another precision; take one of {', '.join(MOVE + NAME_BY_HASH)}"
            )
    return any(name in MOVE for name in names)


def _connectors(config: Any) -> Iterator[str]:
    cache, given = config.cache_config, config.kv_transfer_config
    if cache.kv_offloading_size is not None and cache.kv_offloading_backend != "native":
        yield str(cache.kv_offloading_backend)  # vLLM makes a connector of it later
    if given is None or given.kv_connector is None:
        return
    outer = {"kv_connector": given.kv_connector, "kv_connector_module_path": given.kv_connector_module_path}
    several = given.kv_connector == "MultiConnector" and not given.kv_connector_module_path
    for each in given.kv_connector_extra_config.get("connectors", []) if several else [outer]:
        module = each.get("kv_connector_module_path")  # vLLM takes it from there, whatever its name is
        yield f"{module}.{each.get('kv_connector')}" if module else str(each.get("kv_connector"))


def told(payload: BlueprintPayload) -> dict[str, Any]:
    """What a prompt was computed at, and for which wishes, as a part of the response's `kv_transfer_params`."""
    return {
        "weight_bits": payload.weight_bits.hex(), "activation_bits": payload.activation_bits.hex(),
        "digest": payload.digest, "asked": _asked(payload),
    }  # fmt: skip


def taken(payload: BlueprintPayload, params: Mapping[str, Any] | None, table: SiteTable) -> BlueprintPayload:
    """The payload of a request whose prompt another server computed: with the blueprint that was chosen there.

    Args:
        payload: that this server would serve it with.
        params: the request's `kv_transfer_params`.

    Raises:
        QBEError: a prompt computed for other wishes, by another model's table, or by a server without QBE.
    """
    if not isinstance(params, Mapping) or not (params.get("do_remote_prefill") or params.get("remote_block_ids")):
        return payload
    sent = params.get(KEY)
    if not isinstance(sent, Mapping):
        raise QBEError(
            f"the prompt was computed by a server without QBE, or has parts of an answer that was refreshed: {AGAIN}"
        )
    if sent.get("digest") != payload.digest:
        raise QBEError(f"the prompt was computed by a server with another model or another store: {AGAIN}")
    if sent.get("asked") != _asked(payload):
        raise QBEError(f"the prompt was computed for other wishes than {_asked(payload)}: {AGAIN}")
    try:
        weights, activations = bytes.fromhex(sent["weight_bits"]), bytes.fromhex(sent["activation_bits"])
        fits = all(b in s.gears for b, s in zip(weights, table.nested, strict=True))
        fits = fits and all(a in s.activation_gears for a, s in zip(activations, table.nested, strict=True))
    except (KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        raise QBEError(f"kv_transfer_params have no blueprint of this model under '{KEY}': pass on what came back")
    return replace(payload, weight_bits=weights, activation_bits=activations)


def can_be_rejected(params: Mapping[str, Any]) -> bool:
    """Whether vLLM 0.32 can give the blocks of a rejected request back: parameters that lack a part end its engine."""
    return not params.get("do_remote_prefill") or all(name in params for name in REMOTE)


def _asked(payload: BlueprintPayload) -> dict[str, Any]:
    return {"policy": payload.asked_policy, **payload.budget}
