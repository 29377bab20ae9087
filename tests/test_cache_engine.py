"""The blueprint cache in an engine, traffic logs, and `qbe cache`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from conftest import byte_tokenizer, tiny_llama
from engine_models import ARITHMETIC, CODE, FACT
from qbe import Budget, Engine, QBEError, SamplingParams
from qbe.cache.traffic import LoggedRequest, read_lengths, read_traffic
from qbe.cli.main import app, main
from qbe.records import RecordStore, export

FEW = SamplingParams(max_tokens=2)


def engine_at(folder: Path, **options: object) -> Engine:
    return Engine(tiny_llama(), tokenizer=byte_tokenizer(), device="cpu", kv_tokens=512,
                  records=folder / "records.sqlite", **options)  # fmt: skip


def test_an_engine_finds_what_another_one_chose(tmp_path: Path) -> None:
    file = tmp_path / "b.sqlite"
    with engine_at(tmp_path, blueprint_cache=file) as first:
        chosen = [first.explain(p, FEW) for p in (FACT, ARITHMETIC, CODE)]
        assert [e.cache for e in chosen] == ["miss"] * 3
        assert first.explain(FACT, FEW).cache == "exact"
    with engine_at(tmp_path, blueprint_cache=file) as second:
        again = [second.explain(p, FEW) for p in (FACT, ARITHMETIC, CODE)]
        assert [e.cache for e in again] == ["exact"] * 3
        assert [e.blueprint for e in again] == [e.blueprint for e in chosen]
        assert again[0].describe()["cache"] == "exact"
        second.generate(FACT, FEW)
        numbers = second.blueprint_cache
        assert numbers is not None
        assert (numbers.exact, numbers.misses) == (4, 0)
    assert RecordStore(tmp_path / "records.sqlite").list()[0].cache == "exact"


def test_the_cache_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_at(tmp_path, blueprint_cache=False) as engine:
        assert [engine.explain(FACT).cache for _ in range(2)] == [None, None]
        assert engine.blueprint_cache is None
        engine.warm([LoggedRequest(FACT)])
    monkeypatch.setenv("QBE_BLUEPRINTS", "off")
    with engine_at(tmp_path) as engine:
        assert engine.blueprint_cache is None
    monkeypatch.setenv("QBE_BLUEPRINTS", str(tmp_path / "b.sqlite"))
    with engine_at(tmp_path) as engine:
        engine.explain(FACT)
    assert (tmp_path / "b.sqlite").exists()


def test_analysis_tier_three_reaches_explanation_and_record(tmp_path: Path) -> None:
    with engine_at(tmp_path, analysis_tier=3) as engine:
        found = engine.explain(FACT)
        result = engine.generate(FACT, FEW)
    assert found.profile.tier == 3
    assert result.profile.cluster == found.profile.cluster is not None
    record = RecordStore(tmp_path / "records.sqlite").list()[0]
    assert (record.analysis_tier, record.cluster) == (3, found.profile.cluster)
    with pytest.raises(QBEError, match="no analysis tier 5"):
        engine_at(tmp_path, analysis_tier=5)


def test_warming_makes_hits_and_records_serve_as_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with engine_at(tmp_path, blueprint_cache=False, analysis_tier=3) as engine:
        for prompt in (FACT, CODE):
            engine.generate(prompt, FEW, budget=Budget(tier="flex"))
    export(RecordStore(tmp_path / "records.sqlite"), log, "jsonl")
    traffic = read_traffic(log)
    assert {a.text for a in traffic} == {None}
    with engine_at(tmp_path, blueprint_cache=tmp_path / "b.sqlite", analysis_tier=3) as engine:
        engine.warm([*traffic, LoggedRequest(ARITHMETIC)])
        assert [engine.explain(p, FEW, budget=Budget(tier="flex")).cache for p in (FACT, CODE)] == ["exact"] * 2
        assert engine.explain(ARITHMETIC).cache == "exact"
        assert engine.explain(FACT, FEW).cache == "miss"  # another budget


def test_lines_of_a_log(tmp_path: Path) -> None:
    lines = [
        '"a text"', "", '{"prompt": "p", "max_tokens": 7, "tier": "flex"}',
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "service_tier": "auto"}',
        '{"prompt": "p", "bits": 5.5, "activation_bits": 8, "kv_bits": 4}',
        '{"messages": [{"content": [{"type": "text", "text": "a b"}, {"type": "image_url", "image_url": {}}]}],'
        ' "max_tokens": null}',
    ]  # fmt: skip
    log, trace = tmp_path / "log.jsonl", tmp_path / "trace.csv"
    log.write_text("\n".join(lines), encoding="utf-8")
    asked = read_traffic(log)
    assert [a.text for a in asked] == ["a text", "p", "u", "p", "a\u2028b"]
    assert [a.max_tokens for a in asked] == [128, 7, 128, 128, 128]
    assert asked[1].budget == Budget(tier="flex")
    assert asked[2].budget == Budget(tier="auto")
    assert asked[3].budget == Budget(5.5, "default", 8, 4)
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nx,10,3\nx,20,4\n")
    assert read_lengths(trace) == [(10, 3), (20, 4)]
    assert [(a.text, a.context, a.max_tokens) for a in read_traffic(log, trace)] == [
        ("a text", 13, 3), ("p", 24, 4), ("u", 13, 3), ("p", 24, 4), ("a\u2028b", 13, 3)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("no json", "not a prompt"), ("[]", "not a prompt"), ("3", "not a prompt"), ("{}", "not a prompt"),
        ('{"prompt": ""}', "empty"), ('{"prompt": 3}', "no text"), ('"\\ud800"', "not a prompt"),
        ('{"messages": []}', "not a prompt"), ('{"prompt": "p", "tier": "gold"}', "unknown tier"),
        ('{"prompt": "p", "bits": 99}', "out of range"), ('{"prompt": "p", "max_tokens": 0}', "max_tokens is 0"),
        ('{"features": {}}', "not a prompt"), ("[" * 100_000, "not a prompt"),
        ('{"features": "x", "activation_bits": [], "budget_bits": null, "tier": "flex", "analysis_tier": 2,'
         ' "prompt_class": "code"}', "not a prompt"),
        ('{"features": {}, "activation_bits": [], "budget_bits": null, "tier": "flex", "analysis_tier": 2,'
         ' "prompt_class": "code"}', "another version"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(f'"good"\n{line}\n')
    with pytest.raises(QBEError, match=f"line 2: .*{said}"):
        read_traffic(log)


def test_bad_files_are_named(tmp_path: Path) -> None:
    empty, trace = tmp_path / "empty", tmp_path / "trace"
    empty.write_text("\n")
    with pytest.raises(QBEError, match="has no requests"):
        read_traffic(empty)
    with pytest.raises(QBEError, match="cannot be read"):
        read_traffic(tmp_path / "missing")
    for text in ("a,b\n1,2\n", "ContextTokens,GeneratedTokens\n", "ContextTokens,GeneratedTokens\n1,x\n",
                 "ContextTokens,GeneratedTokens\n-1,2\n"):  # fmt: skip
        trace.write_text(text)
        with pytest.raises(QBEError, match="no trace of lengths"):
            read_lengths(trace)


def test_the_command(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("QBE_BLUEPRINTS", str(tmp_path / "b.sqlite"))
    monkeypatch.setenv("QBE_CACHE", str(tmp_path / "cache"))
    log = tmp_path / "log.jsonl"
    log.write_text(f"{json.dumps(FACT)}\n{json.dumps(FACT)}\n{json.dumps(CODE)}\n")

    def asked(*arguments: str) -> dict:
        result = CliRunner().invoke(app, ["cache", *arguments, "--json"])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    warmed = asked("warm", str(log), "--model", str(tiny_folder), "--policy", "uniform")
    assert (warmed["requests"], warmed["misses"], warmed["exact"]) == (3, 2, 1)
    (version,) = asked("info")["versions"]
    assert (version["policy"], version["entries"]) == ("uniform", 2)
    for arguments, said in (
        (["--policy", "random"], "keeps nothing of what the policy 'random' chooses"),
        (["--policy", "tiered"], "request 2: "),
    ):
        log.write_text('"x"\n{"prompt": "x", "bits": 3}\n')
        with pytest.raises(SystemExit) as ended:
            main(["cache", "warm", str(log), "--model", str(tiny_folder), *arguments])
        assert ended.value.code == 2
        assert said in " ".join(capsys.readouterr().err.split())
    assert asked("clear")["deleted"] == 3
    assert asked("info")["versions"] == []
    monkeypatch.setenv("QBE_BLUEPRINTS", "off")
    for command in (["info"], ["clear"], ["warm", str(log), "--model", str(tiny_folder), "--policy", "uniform"]):
        with pytest.raises(SystemExit) as ended:
            main(["cache", *command])
        assert ended.value.code == 2
        assert "the blueprint cache is off" in capsys.readouterr().err
