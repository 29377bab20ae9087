"""Data sets as items, answers as right or wrong, and the sandbox around programs that a model wrote."""

from __future__ import annotations

import gzip
import json
import tempfile
import threading
import zlib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import byte_tokenizer
from qbe import QBEError
from qbe.datasets import answers
from qbe.datasets.items import BBH, GSM8K, HUMANEVAL, OPENING, PASSAGE, TEXT, encode, read
from qbe.datasets.sandbox import run

HUMANEVAL_ROW = {
    "task_id": "HumanEval/0", "entry_point": "double",
    "prompt": 'import math\n\n\ndef double(x: float) -> float:\n    """ Twice x. """\n',
    "canonical_solution": "    return math.prod([2, x])\n",
    "test": "def check(candidate):\n    assert candidate(4) == 8\n    assert candidate(-1) == -2\n",
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


def write_data(folder: Path) -> Path:
    """Small data sets of the four kinds."""
    (folder / TEXT).write_text(" ".join(f"In {1800 + i} the {i}th lamp was lit at dusk ." for i in range(200)))
    rows = [
        {"question": f"What is {i} + 1?", "answer": f"It is <<{i}+1={i + 1}>>{i + 1}.\n#### {i + 1}"} for i in range(9)
    ]
    (folder / GSM8K).write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / BBH).mkdir()
    for task, targets in (("letters", "(A) (B) (A)"), ("truth", "valid invalid valid")):
        examples = [{"input": f"{task} {i}?", "target": t} for i, t in enumerate(targets.split())]
        (folder / BBH / f"{task}.json").write_text(json.dumps({"examples": examples}))
    with gzip.open(folder / HUMANEVAL, "wt") as file:
        file.write(json.dumps(HUMANEVAL_ROW) + "\n")
    return folder


def test_items_are_spread_over_their_files(data: Path) -> None:
    items = read(("text", "gsm8k", "bbh", "humaneval"), data, 3)
    names = [i.name for i in items]
    assert names[3:6] == ["gsm8k/0", "gsm8k/3", "gsm8k/6"]
    assert names[6:9] == ["bbh/letters/0", "bbh/letters/1", "bbh/letters/2"]  # of six in turn, every second
    assert names[9:] == ["HumanEval/0"]
    assert "".join(names[:3]) == "text/0text/2text/4"
    whole = (data / TEXT).read_text()
    for item in items[:3]:
        text = item.plain.prompt + item.plain.reference
        assert text in whole
        assert PASSAGE - 20 < len(text) <= PASSAGE
        assert OPENING - 20 < len(item.plain.prompt) <= OPENING
        assert item.right is None
    assert "<<" not in items[3].plain.reference
    assert [i.name for i in read(("bbh",), data, 99)][:2] == ["bbh/letters/0", "bbh/truth/0"]


def test_right_answers_are_right(data: Path) -> None:
    for item in read(("gsm8k", "bbh", "humaneval"), data, 99):
        assert item.right is not None
        assert item.chat is not None
        for form in (item.plain, item.chat):
            assert item.right(form.reference), item.name
        assert not item.right("I do not know.")


def test_models_with_a_template_are_asked_by_message(data: Path) -> None:
    tokenizer = byte_tokenizer()
    (item,) = read(("gsm8k",), data, 1)
    chat = encode(item, tokenizer)
    assert chat.prompt == [{"role": "user", "content": item.chat.prompt}]  # type: ignore[union-attr]
    assert tokenizer.decode(chat.prompt_ids).startswith("user: What is 0 + 1?")
    tokenizer.chat_template = None
    plain = encode(item, tokenizer)
    assert (plain.prompt, plain.stop) == (item.plain.prompt, item.plain.stop)
    assert tokenizer.decode(plain.prompt_ids) == item.plain.prompt


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        (GSM8K, "", "there is no gsm8k in"), (GSM8K, None, "there is no gsm8k in"),
        (GSM8K, '{"question": 1}\n', "cannot be read as gsm8k"), (GSM8K, "{", "cannot be read as gsm8k"),
        (TEXT, "x" * 5000, "there are no words in it"), (TEXT, "short", "there is no text in"),
        (HUMANEVAL, "not gzip", "cannot be read as humaneval"), (BBH, None, "there is no bbh in"),
    ],
)  # fmt: skip
def test_bad_files_are_one_line(file: str, content: str | None, says: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / file).write_text(content)
    _refused_in_one_line(file, says, tmp_path)


def test_a_damaged_archive_is_one_line(tmp_path: Path) -> None:
    whole = bytearray(gzip.compress(bytes(range(256)) * 200))
    whole[20:60] = bytes(40)
    (tmp_path / HUMANEVAL).write_bytes(whole)
    with pytest.raises(zlib.error):
        gzip.decompress(whole)
    _refused_in_one_line(HUMANEVAL, "cannot be read as humaneval", tmp_path)


def _refused_in_one_line(file: str, says: str, tmp_path: Path) -> None:
    name = {GSM8K: "gsm8k", TEXT: "text", HUMANEVAL: "humaneval", BBH: "bbh"}[file]
    with pytest.raises(QBEError, match=says) as raised:
        read((name,), tmp_path, 5)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 18", 18), ("so 3 and 4 make 7.", 7), ("#### $1,234.50 dollars", 1234.5), ("-3", -3), ("none", None),
        ("It is 5.\n####", 5), ("#### 12 apples and 3 more", 12), ("1 #### 2 #### 3", 3),
    ],
)  # fmt: skip
def test_the_last_number(text: str, number: float | None) -> None:
    assert answers.last_number(text) == number


@given(value=st.integers(-(10**9), 10**9))
def test_numbers_are_read_however_they_are_written(value: int) -> None:
    for form in (f"{value}", f"{value:,}", f"{value}.0"):
        assert answers.same_number(str(value), f"First 17, then {form}.")
        assert not answers.same_number(str(value), f"#### {value + 1}")


@pytest.mark.parametrize(
    ("target", "text", "right"),
    [
        ("(B)", "The answer is (B), not (A).", True), ("(B)", "(A) or (B)", False), ("(B)", "B", True),
        ("(B)", "B. an old car", True), ("(A)", "A man walks", True), ("(B)", "Bob", False), ("(B)", "", False),
    ],
)  # fmt: skip
def test_the_first_choice_counts(target: str, text: str, right: bool) -> None:
    assert answers.first_choice(target, ("(A)", "(B)", "(C)"), text) is right


def test_choices_are_whole_words() -> None:
    assert answers.first_choice("invalid", ("invalid", "valid"), "It is Invalid.")
    assert not answers.first_choice("valid", ("invalid", "valid"), "It is invalid, so not valid.")
    assert answers.first_choice("No", ("No", "Yes"), "Nobody knows. No")


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("    return x + x\n", True), ("    return x\n", False), ("    return x +\n", False), ("", False),
        ("Sure!\n```python\ndef double(x):\n    return 2 * x\n```\nDone.", True),
        ("```\ndef double(x):\n    return math.fsum([x, x])", True), ("    exit(0)\n", False),
        ("    import os\n    os._exit(0)\n", False), ("    raise SystemExit\n", False),
    ],
)  # fmt: skip
def test_programs_must_pass_their_tests(answer: str, right: bool) -> None:
    row = HUMANEVAL_ROW
    assert answers.passes(row["prompt"], row["test"], row["entry_point"], answer) is right


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("import time\ntime.sleep(60)", "time"), ("while True: pass", "time"), ("x = [0] * 10**10", "MemoryError"),
        ("import subprocess\nsubprocess.run(['true'])", "PermissionError"), ("import os\nos.fork()", "PermissionError"),
        ("import torch", "ModuleNotFoundError"), ("import os\nos.kill(os.getppid(), 0)", "PermissionError"),
        ("open('big', 'wb').write(bytes(1 << 22))", "OSError"), ("import os\nassert len(os.environ) < 6", "passed"),
        ("open('small', 'w').write('x')\nassert open('small').read() == 'x'", "passed"),
    ],
)  # fmt: skip
def test_the_sandbox_holds(program: str, says: str) -> None:
    assert run(program, 1.0).said == says


def test_the_sandbox_keeps_files_and_the_network_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folders").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "folders"))
    kept = tmp_path / "kept"
    kept.write_text("mine")
    for attempt in (f"open({str(kept)!r}, 'w')", f"import os; os.remove({str(kept)!r})",
                    f"import os; os.rename({str(kept)!r}, 'stolen')"):  # fmt: skip
        assert run(attempt).said == "PermissionError"
    assert kept.read_text() == "mine"
    asked: list[str] = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)

    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert not run(f"import socket\nsocket.create_connection(('127.0.0.1', {server.server_port}), 1)").passed
    finally:
        server.shutdown()
        server.server_close()
    assert not asked
    assert not list((tmp_path / "folders").iterdir()), "nothing stays behind"
