"""`/v1/files` and `/v1/batches`, through OpenAI's own client."""

from __future__ import annotations

import collections
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from qbe.records.ledger import Ledger
from qbe.server.batches import lines as batch_lines
from qbe.server.batches.protocol import Batch
from qbe.server.batches.store import BatchStore
from qbe.server.batches.upload import Form
from qbe.server.errors import APIError
from qbe.server.keys import ANYONE, Client, digest
from qbe.server.settings import Batches, Key
from server_process import save_tiny, serving
from server_running import LIMIT_S, Running, running, until

CHAT = "/v1/chat/completions"
KEYS = {"one": "qbe-one", "two": "qbe-two"}


def settings(folder: Path) -> str:
    table = [f'[batches]\nfolder = "{folder}"\nfile_bytes = 65536\nkey_bytes = 4194304\n']
    return "".join(table + [f'[keys.{name}]\nsha256 = "{digest(key)}"\n' for name, key in KEYS.items()])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("batches")
    (home / "serve.toml").write_text(settings(home / "files"))
    with running(config=home / "serve.toml", ledger=home / "ledger.sqlite") as found:
        yield found


def client(url: str, name: str = "one") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEYS[name], timeout=LIMIT_S, max_retries=0)


@pytest.fixture(scope="module")
def api(server: Running) -> openai.OpenAI:
    return client(server.url)


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    given = {"messages": [{"role": "user", "content": custom_id}], "max_tokens": 3, "seed": 1} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": given}


def send(api: openai.OpenAI, found: list[Any], endpoint: Any = CHAT) -> Any:
    text = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in found)
    file = api.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    return api.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"})


def over(api: openai.OpenAI, id: str) -> Any:
    def state() -> Any:
        found = api.batches.retrieve(id)
        return found if found.status in ("completed", "failed", "expired", "cancelled") else None

    return until(state, "the batch is over")


def content(api: openai.OpenAI, id: str) -> dict[str, Any]:
    found = [json.loads(one) for one in api.files.content(id).text.splitlines()]
    return {one["custom_id"]: one for one in found}


def test_answers_are_those_of_http_and_are_booked_once(server: Running, api: openai.OpenAI) -> None:
    asked = [line(f"q{i}") for i in range(5)] + [
        line("wrong", max_tokens=0),
        line("model", model="other"),
        line("stream", stream=True),
        line("tier", service_tier="priority"),
    ]
    begun = send(api, asked)
    assert (begun.status, begun.metadata) == ("validating", {"a": "b"})
    found = over(api, begun.id)
    assert (found.status, found.request_counts.total) == ("completed", 9)
    assert (found.request_counts.completed, found.request_counts.failed) == (5, 4)
    assert found.created_at <= found.in_progress_at <= found.finalizing_at <= found.completed_at < found.expires_at
    answers, errors = content(api, found.output_file_id), content(api, found.error_file_id)
    assert set(answers) == {f"q{i}" for i in range(5)}
    assert {k: v["response"]["status_code"] for k, v in errors.items()} == {
        "wrong": 400, "model": 404, "stream": 400, "tier": 400}  # fmt: skip
    assert errors["wrong"]["response"]["body"]["error"]["param"] == "max_tokens"
    for asked_one in asked[:5]:
        body = answers[asked_one["custom_id"]]["response"]["body"]
        same = api.chat.completions.create(model="tiny", **asked_one["body"], service_tier="flex")
        assert (
            body["choices"] == same.model_dump()["choices"]
            or body["choices"][0]["message"]["content"] == same.choices[0].message.content
        )
        assert body["service_tier"] == "flex"
        assert "average_weight_bits" in body["usage"]["qbe"]
    entries = [e for e in Ledger(server.service._ledger.path).entries() if e.request.startswith("batch_req_")]
    assert sorted(e.request for e in entries) == sorted(a["id"] for a in answers.values())
    assert {(e.key, e.tier, e.finish) for e in entries} == {("one", "flex", "length")}
    assert found.usage.output_tokens == 15 == sum(e.completion_tokens for e in entries)
    assert found.usage.input_tokens == sum(e.prompt_tokens for e in entries)


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/completions", {"prompt": "a", "max_tokens": 2}), ("/v1/responses", {"input": "a", "max_output_tokens": 2}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
])  # fmt: skip
def test_every_endpoint(api: openai.OpenAI, path: str, body: dict[str, Any]) -> None:
    greedy = body | {"temperature": 0}  # whose tokens, with this model, are no end
    good, bad = ({"custom_id": i, "method": "POST", "url": path, "body": b} for i, b in (("g", greedy), ("b", {})))
    found = over(api, send(api, [good, bad], path).id)
    assert (found.request_counts.completed, found.request_counts.failed, found.usage.output_tokens) == (1, 1, 2)
    assert "error" in content(api, found.error_file_id)["b"]["response"]["body"]
    assert content(api, found.output_file_id)["g"]["response"]["body"]["usage"]


def test_files_belong_to_their_key(server: Running, api: openai.OpenAI) -> None:
    mine = api.files.create(file=("a.jsonl", b"{}\n"), purpose="batch")
    assert (mine.filename, mine.bytes, mine.purpose) == ("a.jsonl", 3, "batch")
    assert api.files.content(mine.id).text == "{}\n"
    assert mine.id in [f.id for f in api.files.list(limit=2)]
    other = client(server.url, "two")
    assert mine.id not in [f.id for f in other.files.list()]
    for refused in (other.files.retrieve, other.files.content, other.files.delete):
        with pytest.raises(openai.NotFoundError):
            refused(mine.id)
    with pytest.raises(openai.NotFoundError):
        other.batches.create(input_file_id=mine.id, endpoint=CHAT, completion_window="24h")
    batch = send(api, [line("x")])
    with pytest.raises(openai.NotFoundError):
        other.batches.cancel(batch.id)
    assert batch.id in [b.id for b in api.batches.list()]
    assert batch.id not in [b.id for b in other.batches.list()]
    over(api, batch.id)
    assert api.files.delete(mine.id).deleted
    with pytest.raises(openai.NotFoundError):
        api.files.retrieve(mine.id)


def test_what_is_wrong_is_said(server: Running, api: openai.OpenAI) -> None:
    wrong = ["not json", "[]", {**line("a"), "url": "/v1/completions"}, line("b"), line("b"), {**line("c"), "body": 1},
             {**line("d"), "method": "GET"}, {"body": {}}]  # fmt: skip
    found = over(api, send(api, wrong).id)
    assert found.status == "failed"
    assert [(e.line, e.code) for e in found.errors.data] == [
        (1, "invalid_json_line"), (2, "invalid_json_line"), (3, "invalid_url"), (5, "duplicate_custom_id"),
        (6, "missing_required_parameter"), (7, "invalid_method"), (8, "missing_required_parameter"),
    ]  # fmt: skip
    assert over(api, send(api, [""]).id).errors.data[0].code == "empty_file"
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        send(api, [line("a")], "/v1/embeddings")
    with pytest.raises(openai.BadRequestError, match="purpose"):
        api.files.create(file=("a", b"x"), purpose="fine-tune")
    with pytest.raises(openai.APIStatusError, match=r"larger than|bytes") as large:
        api.files.create(file=("a", b"x" * 200_000), purpose="batch")
    assert large.value.status_code == 413
    headers = {"Authorization": f"Bearer {KEYS['one']}"}
    for kind, body in (("text/plain", b"x"), ("multipart/form-data; boundary=x", b"--y\r\n"),
                       ("multipart/form-data; boundary=x", b"--x\r\nContent-Disposition: form-data; name=\"purpose\""
                        b"\r\n\r\nbatch\r\n--x--\r\n")):  # fmt: skip
        answer = httpx2.post(f"{server.url}/v1/files", content=body, headers=headers | {"Content-Type": kind})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_form")
    assert httpx2.post(f"{server.url}/v1/files", content=b"x").status_code == 401
    assert not list(
        server.service.settings.batches.folder and Path(server.service.settings.batches.folder).glob("*.partial")
    )


def test_a_batch_is_cancelled_and_keeps_what_it_has(api: openai.OpenAI) -> None:
    batch = send(api, [line(f"c{i}", max_tokens=200, ignore_eos=True) for i in range(50)])
    until(lambda: api.batches.retrieve(batch.id).request_counts.completed, "some are answered")
    assert api.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    found = over(api, batch.id)
    assert (found.status, found.request_counts.total) == ("cancelled", 50)
    assert 0 < found.request_counts.completed < 50
    assert len(content(api, found.output_file_id)) == found.request_counts.completed
    with pytest.raises(openai.APIStatusError) as late:
        api.batches.cancel(batch.id)
    assert late.value.status_code == 409


def test_live_requests_find_places(server: Running, api: openai.OpenAI) -> None:
    batch = send(api, [line(f"l{i}", max_tokens=300, ignore_eos=True) for i in range(40)])
    admission = server.service.admission
    assert admission is not None
    until(lambda: admission.inside, "it has begun")
    for _ in range(20):
        assert admission.inside <= admission.running // 2
        time.sleep(0.01)
    assert api.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=2)
    api.batches.cancel(batch.id)
    over(api, batch.id)


def test_it_stands_behind_everybody_in_the_cheapest_tier(server: Running) -> None:
    queues = server.service._queues
    assert queues is not None
    live, waiting = Client("one", None), Client("one", None, "batch_req_1", 3600.0)
    assert queues.priority("flex", client=waiting).rank > queues.priority("flex", client=live).rank + 3000
    assert queues.priority("flex", client=waiting).key != queues.priority("flex", client=live).key
    dear = Client("one", Key(sha256="0" * 64, tiers=("priority", "default")), "batch_req_1")
    assert dear.tier("auto") == "default"
    with pytest.raises(APIError, match="cheapest tier"):
        dear.tier("priority")
    assert ANYONE.tier("priority") == "priority"


def test_kill_and_restart_lose_nothing_and_bill_nothing_twice(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    options = ("--model", str(model), "--policy", "uniform", "--max-sequences", "2")
    with serving(*options, home=tmp_path) as (process, url):
        api = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0)
        batch = send(api, [line(f"k{i}", max_tokens=60, ignore_eos=True) for i in range(12)])
        until(lambda: api.batches.retrieve(batch.id).request_counts.completed >= 2, "some are answered")
        process.kill()
        process.wait(LIMIT_S)
    output = next((tmp_path / "batches").glob("*.output.jsonl"))
    with open(output, "ab") as file:
        file.write(b'{"id": "a line that was cut')
    with serving(*options, home=tmp_path) as (_, url):
        api = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0)
        found = over(api, batch.id)
        assert (found.status, found.request_counts.completed, found.request_counts.failed) == ("completed", 12, 0)
        lines = api.files.content(found.output_file_id).text.splitlines()
        assert sorted(json.loads(one)["custom_id"] for one in lines) == sorted(f"k{i}" for i in range(12))
    entries = Ledger(tmp_path / "ledger.sqlite").entries()
    assert sorted(e.request for e in entries) == sorted(json.loads(one)["id"] for one in lines)
    assert {e.completion_tokens for e in entries} == {60}


def store(folder: Path, clock: list[float], **given: Any) -> BatchStore:
    return BatchStore(folder, lambda: Batches(**given), lambda: clock[0])


def test_the_store_is_one_servers_and_forgets(tmp_path: Path) -> None:
    clock = [1000.0]
    first, second = store(tmp_path / "f", clock, days=2), store(tmp_path / "f", clock)
    second.open(make=False)
    assert not second.is_open
    first.open()
    with pytest.raises(APIError, match="another server"):
        second.open()
    path = first.partial()
    path.write_bytes(b"x")
    file = first.add("one", path, "a.jsonl", "batch")
    first.put(Batch("batch_1", "one", CHAT, file.id, "24h", None, 1000, 2000, 5))
    with pytest.raises(APIError, match="cancel that first"):
        first.delete("one", file.id)
    first.partial().write_bytes(b"cut off")
    (tmp_path / "f" / "file-odd.json").write_text("{")
    first.close()
    second.open()
    assert (second.file("one", file.id), second.batch("one", "batch_1").status) == (file, "validating")
    assert not list((tmp_path / "f").glob("*.partial"))
    second.put(second.batches["batch_1"].become("completed", 1000))
    clock[0] += 2 * 86400
    second.sweep()
    assert second.batches  # for as long as its settings say
    assert not second.files  # for as long as was said when it came
    second.close()
    first.files, first.batches = {}, {}
    first.open()
    first.sweep()
    assert not first.files
    assert not first.batches
    assert not list((tmp_path / "f").glob("batch_*"))


def test_a_key_keeps_so_many_bytes(tmp_path: Path) -> None:
    kept = store(tmp_path, [0.0], key_bytes=100)
    kept.open()
    path = kept.partial()
    path.write_bytes(b"x" * 60)
    kept.add("one", path, "a", "batch")
    assert (kept.room("one"), kept.room("two")) == (40, 100)
    kept.put(Batch("batch_1", "one", CHAT, "f", "24h", None, 0, 9, 5))
    kept.content("batch_1.output").write_bytes(b"y" * 40)
    with pytest.raises(APIError, match="100 of the 100"):
        kept.room("one")


def test_long_lines_and_many_lines_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(json.dumps(line(f"a{i}")) for i in range(5)))
    assert batch_lines.check(path, CHAT, 5, 1000) == (5, [])
    assert batch_lines.check(path, CHAT, 4, 1000)[1][0]["code"] == "too_many_requests"
    assert batch_lines.check(path, CHAT, 5, 40)[1][0]["code"] == "line_too_long"


@pytest.mark.parametrize(
    "part", [b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nb\r\n', b"--x\r\nA: " + b"b" * 70_000 + b"\r\n"]
)
def test_what_stands_beside_a_file_is_bounded(part: bytes, tmp_path: Path) -> None:
    form = Form(b"x", tmp_path / "file", 1 << 20)
    parts = iter([part] * 2000)
    with pytest.raises(APIError) as refusal:
        collections.deque(map(form.write, parts), maxlen=0)
    assert refusal.value.status in (400, 413)
    assert len(form.fields) < 2


def test_a_file_counts_by_itself(tmp_path: Path) -> None:
    form = Form(b"x", tmp_path / "file", 1 << 20)
    form.write(b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n')
    for _ in range(10):
        form.write(b"a" * 100_000)
    form.write(b"\r\n--x--\r\n")
    form.close()
    assert form.ended
    assert (tmp_path / "file").stat().st_size == 1_000_000
