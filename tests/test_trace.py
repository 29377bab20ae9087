"""How an answer's precision moved: what is kept of it, as JSON, as a picture and on a terminal."""

from __future__ import annotations

import io
import json
import statistics
from pathlib import Path

import pytest
from rich.console import Console

import qbe
from cli_process import qbe as command
from conftest import byte_tokenizer, tiny_llama
from qbe.budget import Budget
from qbe.cli.live import watch
from qbe.explain import trace_picture
from qbe.explain.live import LiveView
from qbe.explain.palette import colour
from qbe.explain.trace import Trace, grouped
from qbe.records import RecordStore
from routing_samples import keep_cascade


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A tiny model whose cascade moves most tokens."""
    monkeypatch.setenv("QBE_CACHE", str(tmp_path / "cache"))

    def made() -> qbe.Engine:
        return qbe.Engine(tiny_llama(num_hidden_layers=3), tokenizer=byte_tokenizer(), policy="uniform", device="cpu",
                          records=tmp_path / "r.sqlite")  # fmt: skip

    with made() as first:
        with pytest.raises(qbe.QBEError, match="qbe train cascade"):
            first.generate("a b c", budget=Budget(bits=6, cascade=True))
        keep_cascade(first.table)
    with made() as second:
        yield second


def test_a_trace_is_what_the_tokens_had_and_results_count_it(engine: qbe.Engine, tmp_path: Path) -> None:
    params = qbe.SamplingParams(max_tokens=90, ignore_eos=True)
    result, trace = watch(engine, "a b c d", params, Budget(bits=6, cascade=True))
    assert len(trace.bits) == len(trace.average) == len(trace.entropy) == len(trace.texts) == 90
    assert trace.cascade[0] == 0
    assert trace.average[0] == 6  # the prompt gave the first token, and nobody moves that
    moved = [i for i, shift in enumerate(trace.cascade) if shift]
    assert len(moved) > 45
    assert result.raised_tokens == sum(shift > 0 for shift in trace.cascade)
    assert result.lowered_tokens == sum(shift < 0 for shift in trace.cascade)
    for i in range(90):
        assert trace.bits[i][0] == 6  # nothing lies before the first layer that could move it
        assert trace.average[i] == pytest.approx(6 + trace.cascade[i])
    passes = [6.0] * result.prompt_tokens + trace.average[1:]
    assert result.average_weight_bits == pytest.approx(statistics.fmean(passes))
    assert sum(result.tokens_by_bits.values()) == pytest.approx(result.computed_tokens, abs=2)
    assert result.describe()["usage"]["average_weight_bits"] == round(result.average_weight_bits, 4)
    told = RecordStore(tmp_path / "r.sqlite").get(result.id)
    assert told.average_weight_bits == result.average_weight_bits
    described = json.loads(json.dumps(trace.describe()))
    assert [t["cascade"] for t in described["tokens"]] == [round(c, 4) for c in trace.cascade]
    plain = engine.generate("a b c d", params, budget=Budget(bits=6))
    assert plain.raised_tokens == plain.lowered_tokens == 0


def sample(layers: int = 5, tokens: int = 40) -> Trace:
    t = Trace(layers)
    for i in range(tokens):
        t.bits.append(tuple(None if j == 1 else (4.0, 6.0, 8.0)[(i + j) % 3] for j in range(layers)))
        t.average.append(6.0)
        t.cascade.append((0.0, 0.5, -0.25)[i % 3])
        t.entropy.append(i / 10)
        t.margin.append(20.0 - i)
    t.refreshes = [{"token": tokens // 2, "kind": "hard", "bits_before": 5.0, "bits": 6.0}]
    return t


@pytest.mark.parametrize(("width", "height"), [(20, 10), (60, 24), (200, 70)])
@pytest.mark.parametrize("layers", [1, 5, 90])
def test_a_terminal_of_any_size_shows_it(width: int, height: int, layers: int) -> None:
    file = io.StringIO()
    console = Console(file=file, width=width, height=height, force_terminal=True, color_system="truecolor")
    view = LiveView(sample(layers), (4, 6, 8, 16))
    view.text = "some words of an answer " * 40
    console.print(view)
    plain = Console(file=io.StringIO(), width=width, height=height)
    lines = [line.rstrip() for line in _shown(view, plain).splitlines()]
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("layer 0")
    marks = next(line for line in lines if line.startswith("moved"))
    columns = min(40, width - 8)
    assert marks[8:] == "".join("R" if i == 20 else " ▲▼"[i % 3] for i in range(40))[-columns:].rstrip()
    above = colour(sum(b for b in grouped(sample(layers).bits[-1], 2 * max(2, height - 12))[:1] if b is not None))
    red, green, blue = (int(above[i : i + 2], 16) for i in (1, 3, 5))
    assert f"38;2;{red};{green};{blue}" in file.getvalue()


def _shown(view: LiveView, console: Console) -> str:
    with console.capture() as found:
        console.print(view)
    return found.get()


def test_before_the_first_token_there_is_a_frame() -> None:
    assert "not measured" in _shown(LiveView(Trace(4), (4, 8)), Console(file=io.StringIO(), width=50, height=20))


def test_layers_are_taken_together_where_lines_are_few() -> None:
    assert grouped([4.0, 6.0, 8.0, None], 2) == [5.0, 8.0]
    assert grouped([4.0, 6.0, 8.0], 9) == [4.0, 6.0, 8.0]
    assert grouped([None, None], 1) == [None]


@pytest.mark.parametrize("trace", [sample(), sample(30, 300), Trace(3)])
def test_pictures_and_json(trace: Trace, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace_picture.write(trace, tmp_path / "t.png")
    trace_picture.write(trace, tmp_path / "t.json")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "t.json").read_text()) == json.loads(json.dumps(trace.describe()))
    with pytest.raises(qbe.QBEError, match=r"\.png or \.json"):
        trace_picture.write(trace, tmp_path / "t.svg")


def test_the_commands(nested: str, home: Path, tmp_path: Path) -> None:
    where = tmp_path / "t.json"
    done = command("explain", "a b c", "--model", nested, "--policy", "uniform", "--bits", "6", "--max-tokens", "9",
                   "--trace", str(where), "--json", home=home)  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(where.read_text())
    assert all(t["average_bits"] == 6 for t in found["tokens"])
    for options, said in (
        (("explain", "a", "--trace", "t.gif"), ".png or .json"), (("chat", "--live", "--json"), "--live draws"),
        (("generate", "a", "--model", nested, "--cascade"), "qbe train cascade"),
    ):  # fmt: skip
        done = command(*options, home=home)
        assert (done.returncode, said in done.stderr.decode()) == (2, True), done.stderr.decode()
