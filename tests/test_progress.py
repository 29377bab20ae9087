"""What is shown of a long wait: a spinner on a terminal, one line elsewhere, nothing beside JSON."""

from __future__ import annotations

import io
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from qbe import cli, progress
from qbe.cli import console, options
from qbe.engine.execution.runner import Runner


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Standard error as a terminal."""
    shown = io.StringIO()
    err = Console(file=shown, force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr(progress, "Console", lambda **_: err)
    for module in (console, options):
        monkeypatch.setattr(module, "err", err)
    return shown


def asked_of_an_engine(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    """Runs `qbe generate` up to the engine; what that was asked for."""
    asked: dict[str, Any] = {}

    def engine(*_: Any, **given: Any) -> None:
        asked.update(given)
        raise SystemExit(0)

    monkeypatch.setattr("qbe.engine.engine.Engine", engine)
    with pytest.raises(SystemExit):
        cli.main(["generate", "text", *arguments])
    return asked


@pytest.mark.parametrize("show", [True, False])
def test_a_terminal_sees_that_a_step_is_being_compiled(
    terminal: io.StringIO, show: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr("qbe.engine.execution.runner.has_compiler", lambda: True)

    def compile(size: int) -> None:
        sizes.append(size)
        time.sleep(0.3)  # a refresh or two

    runner: Any = SimpleNamespace(device=torch.device("cpu"), decode=SimpleNamespace(compile=compile, largest=2))
    Runner.compile_steps(runner, show, 16)
    assert sizes == [1, 2]
    assert ("compiling steps" in terminal.getvalue()) is show
    assert show or not terminal.getvalue()


@pytest.mark.parametrize(
    ("device", "largest", "several", "expected"),
    [("cpu", 1, 0, [1]), ("cpu", 3, 0, [1, 2, 3]), ("cpu", 64, 8, [1, 2, 4, 8, 16]), ("cuda", 16, 0, [1]),
     ("cuda", 16, 16, [1, 2, 4])],
)  # fmt: skip
def test_steps_are_compiled_where_that_takes_no_minutes(
    device: str, largest: int, several: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    decode = SimpleNamespace(compile=sizes.append, largest=largest, capture=lambda *_: True)
    monkeypatch.setattr("qbe.engine.execution.runner.DecodeStep", lambda *_: decode)
    runner: Any = SimpleNamespace(device=torch.device(device), model=None, cache=None, plan=None, observe=None)
    runner._takes_positions, runner._takes_keep, runner._cache_name = True, False, "cache"
    runner.compile_steps = partial(Runner.compile_steps, runner)
    Runner.prepare_decode(runner, largest, 4, True, False, several)
    assert sizes == expected


def test_without_a_terminal_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = asked_of_an_engine(monkeypatch, "--compile")
    assert capsys.readouterr().err == "qbe: --compile takes a minute or more now, less once it is cached\n"
    assert (asked["compile"], asked["progress"]) == (True, False)
    asked_of_an_engine(monkeypatch)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_progress_and_not_the_line(terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked_of_an_engine(monkeypatch, "--compile")["progress"] is True
    assert terminal.getvalue() == ""


def test_beside_json_nothing_is_shown(
    terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked_of_an_engine(monkeypatch, "--compile", "--json")["progress"] is False
    monkeypatch.undo()
    assert asked_of_an_engine(monkeypatch, "--compile", "--json")["progress"] is False
    assert terminal.getvalue() == capsys.readouterr().err == ""
