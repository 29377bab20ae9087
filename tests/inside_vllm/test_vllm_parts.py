"""The parts of the vLLM plug-in by themselves."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qbe.blueprint import Blueprint
from qbe.errors import QBEError
from qbe.sites import FULL_BITS, Role, Site, SiteTable
from qbe.store.plan import Plan
from qbe.store.shared_rows import SharedRows

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from vllm_serving import split_model

from older_folder import without_provenance
from qbe.vllm import metrics, transfer
from qbe.vllm.blueprint_payload import KEY, BlueprintPayload
from qbe.vllm.cache_salt import MARK, cache_salt, own_salt, resalt_blocks
from qbe.vllm.full_rows import FullRows
from qbe.vllm.loader import scaled
from qbe.vllm.measured import MeasuredLater
from qbe.vllm.request_options import RequestOptions
from qbe.vllm.request_state import RequestState
from qbe.vllm.runner import PlannedRunner
from qbe.vllm.scheduler import PlannedScheduler
from qbe.vllm.served import describe
from qbe.vllm.service_tier import ServiceTier, with_args
from qbe.vllm.takeover import _rows

GEARS = (4, 6, 8, FULL_BITS)


def table(sites: int = 3) -> SiteTable:
    made = tuple(
        Site(f"layers.{i}.up", Role.FFN_UP, i, (64, 64), True, GEARS, {g: g * 512 for g in GEARS}) for i in range(sites)
    )
    return SiteTable(made, "made up", sites)


def payload(bits: tuple[int, ...], of: SiteTable, refresh: bool = False) -> BlueprintPayload:
    return BlueprintPayload(
        policy="uniform", asked_policy="uniform", weight_bits=bytes(bits), activation_bits=bytes([16] * len(bits)),
        digest=of.digest, budget={"bits": None, "tier": "flex", "activation_bits": 16, "refresh": refresh},
        profile={"score": 0.5, "prompt_class": "code", "tier": 1, "features": {}, "cluster": None}, context=9,
        analysis_ms=0.1, policy_ms=0.2,
    )  # fmt: skip


def test_what_a_request_asks_for() -> None:
    asked = RequestOptions.of({"qbe_bits": 5, "service_tier": "priority", "qbe_policy": "uniform", "top": 1})
    assert (asked.budget.bits, asked.budget.tier, asked.policy, asked.text) == (5, "priority", "uniform", None)
    assert RequestOptions.of(None).budget.tier == "default"
    assert RequestOptions.of({"qbe_refresh": True}).budget.refresh


@pytest.mark.parametrize(
    "args",
    [
        {"qbe_bit": 4}, {"qbe_bits": "four"}, {"qbe_bits": 40}, {"service_tier": "gold"}, {"qbe_refresh": 2},
        {"qbe_policy": 4}, {"qbe_activation_bits": 4}, {"qbe_bits": 5, "qbe_refresh": 1}, {"qbe_text": "a\ud800"},
        {"qbe_bits": [4]}, {"qbe_a\nb" + "x" * 999: 1}, {"service_tier": "a\n" + "b" * 999},
        {"qbe_policy": ["x\n" * 999]},
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(args: dict[str, Any]) -> None:
    with pytest.raises(QBEError) as found:
        RequestOptions.of(args)
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 300


def test_a_ticket_is_plain_data_and_belongs_to_one_model() -> None:
    mine = table()
    packed = json.loads(json.dumps(payload((4, 6, 16), mine).pack(), default=list))
    found = BlueprintPayload.find(SimpleNamespace(extra_args={KEY: packed}))
    assert found is not None
    assert found.blueprint(mine).weight_bits == (4, 6, 16)
    with pytest.raises(QBEError, match="another model"):
        found.blueprint(table(4))
    assert BlueprintPayload.find(SimpleNamespace(extra_args=None)) is None


def test_a_salt_keeps_the_callers_and_is_made_once() -> None:
    first = cache_salt("theirs", "a")
    assert first == f"theirs{MARK}a"
    assert cache_salt(first, "b") == f"theirs{MARK}b"
    assert (own_salt(first), own_salt("theirs"), own_salt(None)) == ("theirs", "theirs", "")
    assert cache_salt(None, "a") != cache_salt(None, "b")


def test_blocks_with_tokens_of_a_refresh_have_names_of_their_own() -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)

    def made(salt: str) -> Request:
        params = SamplingParams(max_tokens=9)
        return Request(
            "r", list(range(8)), params, None, cache_salt=salt, block_hasher=get_request_block_hasher(4, sha256)
        )

    def names(request: Request, answer: list[int]) -> list[bytes]:
        request.append_output_token_ids(answer)
        return list(request.block_hashes)

    plain = names(made(cache_salt(None, "a")), [1, 2, 3, 4, 5, 6, 7, 8])
    assert plain == names(made(cache_salt(None, "a")), [1, 2, 3, 4, 5, 6, 7, 8])

    def refreshed(written: int, start: int) -> list[bytes]:
        request = made(cache_salt(None, "a"))
        names(request, [1, 2, 3, 4, 5, 6, 7, 8][:written])
        resalt_blocks(request, start, "b", 4)
        return names(request, [1, 2, 3, 4, 5, 6, 7, 8][written:])

    for written, start, kept in ((0, 8, 2), (2, 9, 2), (4, 11, 2), (4, 12, 3), (5, 12, 3)):
        found = refreshed(written, start)
        assert len(found) == 4
        assert found[:kept] == plain[:kept]
        assert not set(found[kept:]) & set(plain)
    assert refreshed(2, 9)[2] != refreshed(3, 10)[2], "another token was the first"


BITS = st.tuples(st.sampled_from([(4, 16, 8), (16, 16, 16), (6, 6, 6)]), st.sampled_from([8, 16]), st.integers(1, 3))


@given(st.lists(st.lists(BITS), min_size=1, max_size=3))
def test_what_all_rows_of_a_layer_have(steps: list[list[tuple[tuple[int, ...], int, int]]]) -> None:
    full_rows = FullRows()
    for runs in steps:
        full_rows.note([(Blueprint("made up", bits, (16, eight, 16), ()), n) for bits, eight, n in runs])
        for sites in ((0,), (1,), (0, 1, 2)):
            full = {bits[s] == 16 for bits, _, _ in runs for s in sites}
            full_activations = 1 not in sites or all(eight == 16 for _, eight, _ in runs)
            expected = False if True not in full else True if full == {True} and full_activations else None
            assert full_rows.every(sites) is expected


@given(st.lists(st.tuples(st.sampled_from([(4, 16, 8), (16, 16, 16), (6, 6, 6)]), st.integers(1, 3)), min_size=1))
def test_rows_at_16_bits_are_those_of_the_blueprints(runs: list[tuple[tuple[int, ...], int]]) -> None:
    full_rows = FullRows()
    full_rows.note([(Blueprint("made up", bits, (16, 16, 16), ()), n) for bits, n in runs])
    for site in range(3):
        expected = [bits[site] == 16 for bits, n in runs for _ in range(n)]
        found = full_rows.of(site)
        assert (found.tolist() if isinstance(found, torch.Tensor) else [found] * len(expected)) == expected


def test_workers_read_a_step_at_its_highest_bits() -> None:
    """The plan, and what the CPU's layers know of rows at 16 bits, are those of what is read."""
    mine = table(2)
    low, high = (Blueprint.of("x", mine, bits) for bits in ((4, 16), (8, 4)))
    for shared, first, full in ((True, [8, 8, 8], True), (False, [4, 4, 8], torch.tensor([True, True, False]))):
        plan = Plan(mine, 4, torch.device("cpu"), shared=shared)
        worker: Any = SimpleNamespace(plan=plan, _full_rows=(FullRows(), FullRows()))
        PlannedRunner._write(worker, [(low, 2), (high, 1)], [(low, 1), (high, 1)])
        assert plan.precision_words[0, :3].tolist() == first
        assert torch.equal(torch.as_tensor(worker._full_rows[0].of(1)), torch.as_tensor(full))


def test_records_say_what_was_asked_and_read() -> None:
    """Beside a request without a blueprint, which has the widest bits; its pass over the prompt and a token after."""
    mine = table(2)
    for shared, read, moved in ((True, 16.0, 2 * 2 * 16 * 512), (False, 5.0, 2 * 10 * 512)):
        answer = RequestState(payload((4, 6), mine), mine, 0.0, None)
        seen = SimpleNamespace(num_computed_tokens=0, num_tokens=9)
        scheduler: Any = SimpleNamespace(
            _answers={"a": answer}, requests={"a": seen, "b": seen}, _shared=SharedRows(mine) if shared else None,
            _widest=Blueprint.of("widest", mine, (16, 16)),
        )  # fmt: skip
        for tokens in (5, 4, 1):  # a prompt in two steps, and a token
            seen.num_computed_tokens += tokens
            seen.num_tokens = max(9, seen.num_computed_tokens)
            PlannedScheduler._count(scheduler, {"a": tokens, "b": tokens})
            if seen.num_computed_tokens >= 9:
                answer.wrote(None)
        ended = SimpleNamespace(
            num_prompt_tokens=9, num_output_tokens=2, get_finished_reason=lambda: "stop", status=None
        )  # fmt: skip
        record = answer.record(ended, "made up")
        assert (record.average_weight_bits, record.read_weight_bits) == (5.0, read)
        assert record.bytes_moved == moved


def test_how_rows_are_read_is_an_option() -> None:
    assert _rows({}) == _rows(None) == "shared"
    assert _rows({"qbe_rows": "exact"}) == "exact"
    with pytest.raises(ValueError, match=r"^--additional-config: qbe_rows is 'both', but must be exact or shared$"):
        _rows({"qbe_rows": "both"})


def test_folds_are_powers_of_two_on_both_sides() -> None:
    torch.manual_seed(0)
    exponents = torch.tensor([1, -2, 0, 3], dtype=torch.int8)
    x, norm, weight = torch.randn(5, 4).bfloat16(), torch.randn(4).bfloat16(), torch.randn(6, 4).bfloat16()
    folded = torch.nn.functional.linear(x * scaled(norm, exponents, None, True), scaled(weight, None, exponents, True))
    assert torch.equal(folded, torch.nn.functional.linear(x * norm, weight))
    assert torch.equal(scaled(weight[:4], exponents, None, True)[1], weight[1] * 4)
    assert scaled(norm, None, exponents, False) is norm  # a consumer's bias


def test_an_output_that_comes_later_still_tells_of_difficulty() -> None:
    inner = SimpleNamespace(get_output=lambda: SimpleNamespace())
    found = MeasuredLater(inner, ["a", "b"], torch.tensor([[1.0, 2.0], [3.0, 4.0]])).get_output()  # type: ignore[arg-type]
    assert found.qbe_difficulties == {"a": (1.0, 3.0), "b": (2.0, 4.0)}
    inner.get_kv_connector_output = lambda: "saved"
    assert MeasuredLater(inner, [], torch.zeros(2, 0)).get_kv_connector_output() == "saved"  # type: ignore[arg-type]


def test_the_tier_of_a_body_reaches_the_arguments() -> None:
    chat = {"service_tier": "flex", "messages": [{"role": "user", "content": "why?"}, {"role": "user", "content": " "}]}
    assert json.loads(with_args(json.dumps(chat).encode()))["vllm_xargs"] == {
        "service_tier": "flex",
        "qbe_text": "why?",
    }
    own = {"service_tier": "flex", "vllm_xargs": {"service_tier": "priority"}}
    assert json.loads(with_args(json.dumps(own).encode()))["vllm_xargs"] == {"service_tier": "priority"}
    deep = (b"[" * 100_000, b'{"a":' * 20_000)
    for body in (b"{", b"[1]", b'{"prompt": "x"}', b'{"vllm_xargs": 3, "service_tier": "flex"}', *deep):
        assert with_args(body) == body


@pytest.mark.parametrize("tier", [3, True, ["flex"], {}, "", "gold"])
def test_a_tier_that_is_none_is_refused(tier: object) -> None:
    args = json.loads(with_args(json.dumps({"service_tier": tier}).encode()))["vllm_xargs"]
    with pytest.raises(QBEError, match="tier"):
        RequestOptions.of(args)


def config_with(
    name: str | None, *inner: str, offload: str | None = None, module: str | None = None
) -> SimpleNamespace:
    each = {"connectors": [{"kv_connector": n, "kv_connector_module_path": module} for n in inner]}
    given = SimpleNamespace(
        kv_connector=name, kv_connector_extra_config=each, kv_connector_module_path=None if inner else module
    )
    return SimpleNamespace(
        kv_transfer_config=name and given,
        cache_config=SimpleNamespace(kv_offloading_size=offload and 1, kv_offloading_backend=offload or "native"),
    )


def test_connectors_that_name_blocks_by_tokens_alone_are_refused() -> None:
    for fetches, config in (
        (False, config_with(None)), (True, config_with("NixlConnector")), (False, config_with("OffloadingConnector")),
        (True, config_with("MultiConnector", "NixlConnector", "OffloadingConnector")),
        (False, config_with(None, offload="native")),
    ):  # fmt: skip
        assert transfer.check(config) == fetches
    for config in (
        config_with("ExampleConnector"), config_with("MultiConnector", "NixlConnector", "LMCacheConnectorV1"),
        config_with("MultiConnector", "MultiConnector"), config_with(None, offload="lmcache"),
        config_with("NixlConnector", module="mine"), config_with("MultiConnector", "NixlConnector", module="mine"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="another precision"):
            transfer.check(config)


def test_what_vllm_can_reject() -> None:
    whole = dict.fromkeys(transfer.REMOTE, 1) | {"do_remote_prefill": True}
    assert transfer.can_be_rejected(whole)
    assert transfer.can_be_rejected({"do_remote_decode": True})
    assert not any(transfer.can_be_rejected({k: v for k, v in whole.items() if k != lost}) for lost in transfer.REMOTE)


def test_a_prompt_from_another_server_keeps_its_blueprint() -> None:
    mine = table()
    there, here = payload((4, 6, 16), mine), payload((4, 4, 4), mine)
    moved = json.loads(json.dumps({"do_remote_prefill": True, KEY: transfer.told(there)}))
    found = transfer.taken(here, moved, mine)
    assert found == there
    assert transfer.taken(here, {"do_remote_decode": True, "do_remote_prefill": False}, mine) == here
    assert transfer.taken(here, None, mine) == here


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"digest": "x"}, "another model"), ({"asked": {"tier": "priority"}}, "was computed for"),
        ({"weight_bits": "0406"}, "no blueprint"), ({"weight_bits": "040607"}, "no blueprint"),
        ({"weight_bits": 3}, "no blueprint"), ({"weight_bits": "zz"}, "no blueprint"),
        ({"activation_bits": "010101"}, "no blueprint"), ({"activation_bits": None}, "no blueprint"),
    ],
)  # fmt: skip
def test_a_prompt_that_does_not_fit_is_refused(change: dict[str, Any], says: str) -> None:
    mine = table()
    told = transfer.told(payload((4, 6, 16), mine)) | change
    for moved in ({"do_remote_prefill": True}, {"remote_block_ids": [[1]]}):
        with pytest.raises(QBEError, match=says):
            transfer.taken(payload((4, 4, 4), mine), moved | {KEY: told}, mine)
        with pytest.raises(QBEError, match="without QBE"):
            transfer.taken(payload((4, 4, 4), mine), moved, mine)


def test_seeds_make_no_series_of_their_own() -> None:
    for seed in range(3):
        asked = replace(payload((4, 4, 4), table()), policy=f"random:{seed}")
        metrics.admitted(asked, asked.blueprint(table()), table())
    labels = {s.labels.get("policy") for m in metrics.REQUESTS.collect() for s in m.samples}
    assert "random" in labels
    assert not [name for name in labels if name and ":" in name]


def test_a_folder_is_checked_before_it_is_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = without_provenance(split_model(tmp_path))
    assert describe(str(folder)).table.measured
    assert not caplog.records
    sensitivities = folder / "sensitivity.json"
    whole = sensitivities.read_text()
    sensitivities.write_text(json.dumps({"kl": {}}))
    with pytest.raises(QBEError, match=r"the sensitivities in .* lack"):
        describe(str(folder))
    sensitivities.write_text(whole[:100])
    with pytest.raises(QBEError, match="damaged"):
        describe(str(folder))
    sensitivities.unlink()
    assert not describe(str(folder)).table.measured
    assert "has no sensitivity.json" in caplog.text
    with next(folder.glob("nested-*")).open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(QBEError, match="checksum differs"):
        describe(str(folder))


@pytest.mark.parametrize(("lost", "says"), [("model.safetensors", "no model.safetensors"), ("qbe.json", "no qbe.json")])
def test_a_folder_that_lost_a_file_is_not_served(lost: str, says: str, tmp_path: Path) -> None:
    folder = without_provenance(split_model(tmp_path))
    (folder / lost).unlink()
    with pytest.raises(QBEError, match=says):
        describe(str(folder))


def test_the_middleware_hands_on_one_whole_body() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, _send: Any) -> None:
        seen.append((dict(scope["headers"]), await receive()))

    parts = [{"type": "http.request", "body": b'{"service_', "more_body": True},
             {"type": "http.request", "body": b'tier": "flex"}'}]  # fmt: skip

    async def receive() -> Any:
        return parts.pop(0)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [(b"content-length", b"24")]}
    asyncio.run(ServiceTier(app)(scope, receive, None))
    headers, message = seen[0]
    assert json.loads(message["body"])["vllm_xargs"] == {"service_tier": "flex"}
    assert headers[b"content-length"] == str(len(message["body"])).encode()


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        ({"use_beam_search": True, "service_tier": "flex"}, True),
        ({"use_beam_search": True, "vllm_xargs": {"qbe_bits": 4}}, True),
        ({"use_beam_search": True, "service_tier": "auto", "messages": [{"role": "user", "content": "x"}]}, False),
        ({"use_beam_search": True}, False),
        ({"service_tier": "flex"}, False),
    ],
)
def test_beams_have_no_precision(body: dict[str, Any], refused: bool) -> None:
    reached, sent = list[Any](), list[Any]()

    async def app(_scope: Any, receive: Any, _send: Any) -> None:
        reached.append(await receive())

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(body).encode()}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    asyncio.run(ServiceTier(app)(scope, receive, send))
    assert (len(reached), len(sent)) == ((0, 2) if refused else (1, 0))
    if refused:
        assert sent[0]["status"] == 400
        assert "beam search" in json.loads(sent[1]["body"])["error"]["message"]


def test_another_version_of_vllm_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from qbe.vllm import versions

    assert versions.refusal() is None
    monkeypatch.setattr("vllm.__version__", "0.34.0")
    message = versions.refusal()
    assert message is not None
    assert "0.34.0" in message
    with pytest.raises(ValueError, match=r"0\.34\.0"):
        versions.refused(message).from_config({})
