"""The `qbe` command where it cannot go on: one line and exit code 2 for bad input, quiet where nobody reads."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import forked
from cli_process import qbe, refused
from qbe.records import RecordStore
from records_samples import record


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["generate", "hi", "--model", "no/such-model-anywhere"], "no/such-model-anywhere"),
        (["generate", "hi", "--model", "/does/not/exist"], "/does/not/exist"),
        (["generate", ""], "empty"),
        (["generate", b"bad \xff byte"], "UTF-8"),
        (["generate", "hi", "--tier", "gold"], "tier"),
        (["generate", "hi", "--bits", "99"], "out of range"),
        (["generate", "hi", "--bits", "many"], "--bits"),
        (["generate", "hi", "--activation-bits", "4"], "qbe: --activation-bits is 4, but must be 8 or 16"),
        (["chat", "--activation-bits", "12"], "qbe: --activation-bits is 12"),
        (["explain", "hi", "--activation-bits", "few"], "--activation-bits"),
        (["generate", "hi", "--careful-tokens"], "qbe: --high-precision-tokens is for --activation-bits 8"),
        (["generate", "hi", "--max-tokens", "0"], "qbe: --max-tokens is 0"),
        (["generate", "hi", "--top-p", "2"], "qbe: --top-p is 2"),
        (["generate", "hi", "--stop", ""], "qbe: --stop is empty"),
        (["chat", "--repetition-penalty", "0"], "qbe: --repetition-penalty is 0"),
        (["generate", "hi", "--seed", "-1"], "qbe: --seed is -1"),
        (["generate", "hi", "--kv-tokens", "0"], "qbe: --kv-tokens is 0"),
        (["generate", "hi", "--n", "few"], "--n"),
        (["generate", "hi", "--n", "100000"], "--n is 100000, but must be a whole number, 1 to 1024"),
        (["generate", "hi", "--kv-bits", "\uff14"], "qbe: --kv-bits is"),
        (["chat", "--kv-tokens", "many"], "--kv-tokens"),
        (["generate", "hi", "--policy", "nope"], "policy"),
        (["generate"], "argument"),
        (["nonsense"], "nonsense"),
        (["records", "--limit", "0"], "--limit"),
        (["records", "--format", "csv"], "--export FILE"),
    ],
)
def test_bad_input_without_a_model(args: list[str | bytes], says: str, home: Path) -> None:
    assert says.lower() in refused(*args, home=home).lower()


def test_failed_answers_and_outputs_are_one_line(nested: str, home: Path, tmp_path: Path) -> None:
    import shutil

    broken = Path(shutil.copytree(nested, tmp_path / "broken"))
    weights = bytearray((broken / "model.safetensors").read_bytes())
    weights[-4000:] = b"\xff" * 4000
    (broken / "model.safetensors").write_bytes(weights)
    assert "not numbers" in refused(
        "generate", "hi", "--trust", "--model", str(broken), "--max-tokens", "2", home=home, out=b"\n"
    )
    for where, says in (
        ("", "is a folder"),
        (".", "is a folder"),
        ("/etc/passwd/x.html", "cannot be written"),
        ("x" * 300, "cannot be written"),
    ):
        assert says in refused("explain", "hi", "--model", nested, "--html", where, home=home)
    with open("/dev/full", "wb") as full:
        done = forked.run(
            [sys.executable, "-m", "qbe", "pull", nested], stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)


def test_bad_input_with_a_model(nested: str, home: Path, tmp_path: Path, tiny_folder: Path) -> None:
    at = ["--model", nested]
    assert "5 bits" in refused("generate", "hi", *at, "--policy", "uniform", "--bits", "5", home=home)
    assert "lowest average" in refused("generate", "hi", *at, "--bits", "3", home=home)
    assert "context" in refused("generate", "x" * 900, *at, home=home)
    assert "UTF-8" in refused("generate", "-", *at, stdin=b"\xff\xfe", home=home)
    assert "dtype" in refused("generate", "hi", *at, "--dtype", "int3", home=home)
    assert "already exists" in refused("quantize", str(tiny_folder), "-o", nested, home=home)
    assert "slices" in refused("quantize", str(tiny_folder), "-o", str(tmp_path / "a"), "--slices", "x", home=home)
    no_text = ("--calibrate", str(tmp_path / "no.txt"))
    assert "cannot be read" in refused("quantize", str(tiny_folder), "-o", str(tmp_path / "a"), *no_text, home=home)
    assert "group size" in refused(
        "quantize", str(tiny_folder), "-o", str(tmp_path / "a"), "--group-size", "7", home=home
    )
    assert "cannot be written" in refused("explain", "hi", *at, "--html", str(tmp_path / "no" / "x.html"), home=home)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "hello", "--max-tokens", "3"],
        ["chat", "--max-tokens", "3", "--json"],
        ["explain", "hello"],
        ["explain", "hello", "--html", "/dev/stdout"],
        ["info", "--json"],
        ["pull"],
        ["records"],
        ["records", "--export", "-"],
        ["--help"],
    ],
    ids=" ".join,
)
def test_a_closed_pipe_ends_a_command_quietly(nested: str, home: Path, command: list[str]) -> None:
    if command[0] == "pull":
        command = [*command, nested]
    elif command[0] in ("generate", "chat", "explain", "info"):
        command = [*command, "--model", nested]
    RecordStore(home / "records.sqlite").append(record())
    done = qbe(*command, stdin=b"hello\n", home=home, reader=False)
    assert (done.returncode, done.stderr) == (141, b"")


def test_closed_standard_output_is_one_line(nested: str, home: Path) -> None:
    code = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, '-m', 'qbe', 'pull', sys.argv[1]])"
    done = forked.run([sys.executable, "-c", code, nested], stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(b"qbe: standard output is closed")
    assert done.stderr.count(b"\n") == 1


def test_a_terminated_quantize_leaves_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from qbe.cli import main\n"
        "from qbe.store import checkpoint\n"
        "checkpoint.write_nested = lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)\n"
        "main(['quantize', sys.argv[1], '-o', sys.argv[2]])\n"
    )
    command = [sys.executable, "-c", code, str(tiny_folder), str(tmp_path / "out")]
    done = forked.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert list(tmp_path.iterdir()) == []
