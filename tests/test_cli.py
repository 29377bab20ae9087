"""The `qbe` command in a real process: stable options, stable JSON."""

from __future__ import annotations

import importlib
import json
import shutil
import signal
import threading
from pathlib import Path

import pytest

from cli_process import qbe, refused
from older_folder import without_provenance
from qbe import cli


def test_generate_json_has_what_is_promised(nested: str, home: Path) -> None:
    options = ["--model", nested, "--greedy", "--max-tokens", "5", "--json", "--dtype", "float32", "--seed", "1"]
    done = qbe("generate", "hello there", *options, "--bits", "6", "--tier", "default", "--policy", "tiered", home=home)
    assert done.returncode == 0, done.stderr.decode()
    result = json.loads(done.stdout)
    assert len(result["token_ids"]) == 5
    assert {"prompt_tokens", "completion_tokens"} <= set(result["usage"])
    assert {"score", "class", "features"} <= set(result["profile"])
    assert {"policy", "average_weight_bits", "sites"} <= set(result["blueprint"])
    for site in result["blueprint"]["sites"]:
        assert {"name", "role", "weight_bits", "activation_bits", "kv_bits"} <= set(site)
    assert {"analysis_ms", "prefill_ms", "decode_tokens_per_s"} <= set(result["timings"])
    assert result["bytes_per_token"] > 0
    again = json.loads(qbe("generate", "-", *options, "--bits", "6", stdin=b"hello there", home=home).stdout)
    assert again["token_ids"] == result["token_ids"]


def test_explain_json_text_and_page(nested: str, home: Path, tmp_path: Path) -> None:
    page = tmp_path / "why.html"
    done = qbe("explain", "Write <b>code</b>", "--model", nested, "--json", "--html", str(page), home=home)
    described = json.loads(done.stdout)
    assert described["bytes_per_token"] < described["bytes_per_token_16bit"]
    assert "Write &lt;b&gt;code" in page.read_text()
    shown = qbe("explain", "hello", "--model", nested, home=home)
    assert shown.returncode == 0
    assert "bits" in shown.stdout.decode()


def test_activation_bits_are_an_option(nested: str, home: Path, tmp_path: Path) -> None:
    at = ["--model", nested, "--activation-bits", "8", "--kv-bits", "16"]
    page = tmp_path / "why.html"
    described = json.loads(qbe("explain", "hello", *at, "--json", "--html", str(page), home=home).stdout)
    assert described["budget"]["activation_bits"] == 8
    for site in described["blueprint"]["sites"]:
        assert site["activation_bits"] == (16 if site["role"] == "output_head" else 8)
    said = f"8 bits at {len(described['blueprint']['sites']) - 1} sites and 16 at 1, KV cache 16 bits"
    assert f"activations {said}" in " ".join(qbe("explain", "hello", *at, home=home).stdout.decode().split())
    assert f"Activations {said}" in page.read_text()
    described = json.loads(qbe("explain", "hello", *at, "--high-precision-tokens", "--json", home=home).stdout)
    assert described["budget"]["high_precision_tokens"]
    done = qbe("generate", "hello", *at, "--careful-tokens", "--max-tokens", "2", home=home)
    assert "activations 8 bits" in done.stderr.decode()
    (row,) = json.loads(qbe("records", "--limit", "1", "--json", home=home).stdout)
    assert sorted(row["activation_bits"]) == [8] * (len(row["weight_bits"]) - 1) + [16]
    plain = qbe("chat", "--model", nested, "--max-tokens", "2", stdin=b"hello\n", home=home)
    assert "activations" not in plain.stderr.decode()


def test_several_answers_are_a_list_or_follow_each_other(nested: str, home: Path) -> None:
    at = ["generate", "hello there", "--model", nested, "--max-tokens", "3", "--seed", "1"]
    found = json.loads(qbe(*at, "--n", "3", "--json", home=home).stdout)
    assert len(found) == 3
    assert found[0]["token_ids"] == json.loads(qbe(*at, "--json", home=home).stdout)["token_ids"]
    done = qbe(*at, "--n", "2", home=home)
    assert done.returncode == 0
    assert done.stdout.decode().startswith(found[0]["text"] + "\n" + found[1]["text"])
    assert done.stderr.count(b"tok/s") == 2
    assert "--n is 0, but must be a whole number" in refused(*at, "--n", "0", home=home)


def test_a_bound_on_kv_errors_is_an_option(nested: str, home: Path) -> None:
    at = ("--model", nested, "--max-tokens", "3", "--greedy", "--json", "--kv-error", "0")
    usage = json.loads(qbe("generate", "count " * 30, *at, "--kv-bits", "4", home=home).stdout)["usage"]
    assert usage["kv_error"] == 0
    assert usage["kv_pages_raised"] == usage["kv_pages_read"] > 0
    assert usage["kv_host_bytes"] > 0
    assert "--kv-error is -1.0" in refused("generate", "hi", "--model", nested, "--kv-error", "-1", home=home)


def test_state_bits_are_an_option_that_a_model_without_states_names(nested: str, home: Path) -> None:
    at = ("--model", nested, "--max-tokens", "2", "--state-bits")
    usage = json.loads(qbe("generate", "hi", *at, "10", "--json", home=home).stdout)["usage"]
    assert "keep no recurrent state" in usage["ignored"]["state_bits"]
    assert "--state-bits is 9, but must be 8, 10, 16 or 32" in refused("generate", "hi", *at, "9", home=home)


def test_info_and_records(nested: str, home: Path, tmp_path: Path) -> None:
    described = json.loads(qbe("info", "--model", nested, "--verify", "--json", home=home).stdout)
    assert described["unknown"] == []
    assert described["store"]["checksums_verified"]
    assert "output_head" in qbe("info", "--model", nested, home=home).stdout.decode()
    done = qbe("generate", "hi", "--model", nested, "--max-tokens", "2", home=home)
    assert done.returncode == 0
    assert done.stderr.count(b"\n") == 1  # the summary is one line, however wide
    rows = json.loads(qbe("records", "--json", home=home).stdout)
    assert rows[0]["completion_tokens"] == 2
    assert "records" in qbe("records", home=home).stdout.decode()
    for name in ("out.jsonl", "out.parquet"):
        form = name.split(".")[1]
        assert qbe("records", "--export", str(tmp_path / name), "--format", form, home=home).returncode == 0
        assert (tmp_path / name).stat().st_size > 100
    lines = qbe("records", "--export", "-", home=home).stdout.decode().splitlines()
    assert json.loads(lines[0])["id"]


def test_chat_answers_and_survives_bad_lines(nested: str, home: Path) -> None:
    said = b"hello\n\n" + b"x" * 900 + b"\nbad \xff\n/clear\nagain\n/exit\n"
    done = qbe("chat", "--model", nested, "--max-tokens", "4", "--greedy", stdin=said, home=home)
    assert done.returncode == 0, done.stderr.decode()
    assert "context" in done.stderr.decode()
    assert "not valid UTF-8" in done.stderr.decode()
    assert len(done.stdout.decode().splitlines()) >= 2


def test_a_model_without_a_template_cannot_chat_and_says_so_at_once(nested: str, home: Path, tmp_path: Path) -> None:
    folder = without_provenance(Path(shutil.copytree(nested, tmp_path / "plain")))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    done = qbe("chat", "--model", str(folder), stdin=b"", home=home)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"has no chat template" in done.stderr


def test_chat_json_is_one_object_a_line(nested: str, home: Path) -> None:
    done = qbe("chat", "--model", nested, "--max-tokens", "2", "--json", stdin=b"hello\nagain\n", home=home)
    lines = [json.loads(line) for line in done.stdout.decode().splitlines()]
    assert [len(a["token_ids"]) for a in lines] == [2, 2]
    assert lines[1]["usage"]["prompt_tokens"] > lines[0]["usage"]["prompt_tokens"]


def test_pull_prints_where_a_folder_is(tiny_folder: Path, home: Path) -> None:
    assert qbe("pull", str(tiny_folder), home=home).stdout.decode().strip() == str(tiny_folder)


def test_devices_and_links_are_written_through_not_replaced(nested: str, home: Path, tmp_path: Path) -> None:
    link, target = tmp_path / "link.html", tmp_path / "target.html"
    target.write_text("old")
    link.symlink_to(target)
    assert qbe("explain", "hi", "--model", nested, "--html", str(link), home=home).returncode == 0
    assert link.is_symlink()
    assert "<html" in target.read_text()
    page = qbe("explain", "hi", "--model", nested, "--html", "/dev/stdout", home=home)
    assert b"<html" in page.stdout


def test_the_size_of_the_kv_cache_is_an_option(nested: str, home: Path) -> None:
    at = ["--model", nested, "--max-tokens", "60"]
    message = refused("generate", "hello there", *at, "--kv-tokens", "64", home=home)
    assert "KV cache, which holds 64 tokens" in message
    assert "lower --max-tokens or raise --kv-tokens" in message
    assert qbe("generate", "hello there", *at, "--kv-tokens", "128", home=home).returncode == 0
    done = qbe("generate", "hi", "--model", nested, "--max-tokens", "50", "--kv-tokens", "64", "--json", home=home)
    usage = json.loads(done.stdout)["usage"]
    assert usage["average_kv_bits"] == 16, "so small a cache holds no frame beside pages of fewer bits"
    (row,) = json.loads(qbe("records", "--limit", "1", "--json", home=home).stdout)
    assert set(row["kv_bits"]) == {16}
    said = qbe("chat", *at, "--kv-tokens", "64", stdin=b"hello\n", home=home)
    assert "raise --kv-tokens" in said.stderr.decode()
    assert "free on cpu hold at most" in refused("generate", "hi", *at, "--kv-tokens", str(10**11), home=home)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_within_an_op_of_torch_ends_the_command(monkeypatch: pytest.MonkeyPatch, sent: int, code: int) -> None:
    """torch makes another error of an exit in Python code that C++ has called."""

    def end(*_: object, **__: object) -> None:
        try:
            signal.raise_signal(sent)
        except (SystemExit, KeyboardInterrupt) as error:
            raise RuntimeError("torch_call_dispatcher(...) API call failed at ops.cpp, line 140") from error

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a defect")

    module = importlib.import_module("qbe.cli.main")  # `qbe.cli.main` is its function
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores them
    for name in ("_told_to_end", "_was_interrupted"):
        monkeypatch.setattr(module, name, threading.Event())
    try:
        monkeypatch.setattr(module, "_root", lambda: fail)
        with pytest.raises(RuntimeError, match="a defect"):
            cli.main([])
        monkeypatch.setattr(module, "_root", lambda: end)
        with pytest.raises(SystemExit) as ended:
            cli.main([])
        assert ended.value.code == code
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
