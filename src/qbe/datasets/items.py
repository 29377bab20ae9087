"""What `qbe eval` asks: held-out text, GSM8K, BIG-Bench Hard and HumanEval, from files."""

from __future__ import annotations

import ast
import gzip
import json
import os
import re
import sysconfig
import textwrap
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from qbe.datasets import answers
from qbe.datasets.haystack import DATA
from qbe.errors import QBEError

TEXT, GSM8K, BBH, HUMANEVAL = "wikitext2_test.txt", "gsm8k_test500.jsonl", "bbh", "HumanEval.jsonl.gz"
CODE = "code"  # what functions of Python's library are called as a data set
PASSAGE, OPENING = 1024, 256  # characters of a passage of text, and of its opening, which is its query


@dataclass(frozen=True)
class Form:
    """A question as one kind of model is asked it.

    Attributes:
        prompt: what it reads.
        reference: a right answer; teacher forcing runs it after the prompt.
        stop: what ends an answer.
    """

    prompt: str
    reference: str
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Item:
    """One query.

    Attributes:
        dataset, name: where it comes from.
        plain: for models that continue text.
        chat: the prompt as a message, for models with a chat template; None asks them as the others.
        right: whether an answer is right; None where nothing is asked.
        max_tokens: of an answer.
    """

    dataset: str
    name: str
    plain: Form
    chat: Form | None = None
    right: Callable[[str], bool] | None = None
    max_tokens: int = 0


def read(datasets: tuple[str, ...], data: Path | None, limit: int, hint: str = ", or --datasets others") -> list[Item]:
    """`limit` items of each of these data sets at most, spread over its file.

    Args:
        datasets: of `DATASETS`.
        data: the folder that holds the files; None takes $QBE_DATA, else ../shared/data.
        hint: what else may be done where one is missing.

    Raises:
        QBEError: a file is missing, or not what its name says.
    """
    folder = data or Path(os.environ.get("QBE_DATA") or DATA)
    return [item for name in datasets for item in _some(name, folder, limit, DATASETS, hint)]


def read_training(data: Path | None, limit: int, datasets: tuple[str, ...] | None = None) -> list[Item]:
    """The same of data that no comparison asks: what policies are trained on. No answers are asked for.

    Code is that of Python's standard library, left out where Python comes without its source.

    Args:
        datasets: of `TRAINING` and "code"; None takes all.

    Raises:
        QBEError: a file is missing, or not what its name says.
    """
    folder = data or Path(os.environ.get("QBE_DATA") or DATA)
    items: list[Item] = []
    for name in datasets or (*TRAINING, CODE):
        if name == CODE:
            items += _spread(_library(Path(sysconfig.get_paths()["stdlib"])), limit)
        else:
            items += _some(name, folder, limit, TRAINING, "")
    return [replace(item, right=None) for item in items]


def _some(dataset: str, folder: Path, limit: int, of: Datasets, hint: str) -> list[Item]:
    file, parse = of[dataset]
    try:
        items = parse(folder / file)
    except FileNotFoundError:
        items = []
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise QBEError(f"'{folder / file}' cannot be read as {dataset} ({_said(error)}); give --data another") from None
    if not items:
        raise QBEError(f"there is no {dataset} in '{folder}'; give --data the folder that holds '{file}'{hint}")
    return _spread(items, limit)


def _spread(items: list[Item], limit: int) -> list[Item]:
    return items if limit >= len(items) else [items[i * len(items) // limit] for i in range(limit)]


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def _text(path: Path) -> list[Item]:
    """Passages, cut between words."""
    text, start, items = path.read_text(encoding="utf-8").strip(), 0, list[Item]()
    while len(text) - start >= PASSAGE:
        end = text.rfind(" ", start + OPENING, start + PASSAGE)
        middle = text.rfind(" ", start + 1, start + OPENING)
        if not start < middle < end:
            raise ValueError("there are no words in it")
        items.append(Item("text", f"text/{len(items)}", Form(text[start:middle], text[middle:end])))
        start = end + 1
    return items


def _lines(path: Path) -> list[str]:
    """Of JSON, which may hold what `str.splitlines` takes for ends of lines."""
    return [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def _gsm8k(path: Path) -> list[Item]:
    items = []
    for i, row in enumerate(map(json.loads, _lines(path))):
        question, answer = row["question"], re.sub(r"<<.*?>>", "", row["answer"])
        target = answer.rpartition("####")[2].strip()
        items.append(Item(
            "gsm8k", f"gsm8k/{i}", Form(f"Question: {question}\nAnswer:", f" {answer}", ("\nQuestion:",)),
            Form(f"{question}\nThink step by step. End with '####' and the number.", answer),
            partial(answers.same_number, target), 256,
        ))  # fmt: skip
    return items


def _bbh(path: Path) -> list[Item]:
    """Of all tasks in turn."""
    tasks = []
    for file in sorted(path.glob("*.json")):
        rows = json.loads(file.read_text(encoding="utf-8"))["examples"]
        choices = tuple(sorted({row["target"] for row in rows}))
        tasks.append([
            Item(
                "bbh", f"bbh/{file.stem}/{i}", Form(f"{row['input']}\nAnswer:", f" {row['target']}", ("\n",)),
                Form(f"{row['input']}\nGive the answer alone.", row["target"]),
                partial(answers.first_choice, row["target"], choices), 32,
            )
            for i, row in enumerate(rows)
        ])  # fmt: skip
    return [item for item in chain.from_iterable(zip_longest(*tasks)) if item is not None]


def _humaneval(path: Path) -> list[Item]:
    items = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            prompt = row["prompt"]
            plain, chat = _function(prompt, row["canonical_solution"])
            right = partial(answers.passes, prompt, row["test"], row["entry_point"])
            items.append(Item("humaneval", row["task_id"], plain, chat, right, 256))
    return items


def _function(head: str, body: str) -> tuple[Form, Form]:
    """Asks for the body of a Python function of which signature and docstring are given."""
    message = f"Complete this Python function. Give the whole function in a code block.\n```python\n{head}```"
    return (
        Form(head, body, ("\ndef ", "\nclass ", "\nif ", "\nprint(", "\n#", "\n@")),
        Form(message, f"```python\n{head}{body}```"),
    )


@cache
def _library(folder: Path) -> list[Item]:
    """Functions with a docstring in the modules of a folder."""
    items = []
    for path in sorted(folder.glob("*.py")):
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (OSError, ValueError, SyntaxError):
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or not ast.get_docstring(node) or len(node.body) < 2:
                continue
            whole = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])) + "\n"
            parts = whole.splitlines(keepends=True)
            body_line = node.body[1].lineno - node.lineno
            plain, chat = _function("".join(parts[:body_line]), "".join(parts[body_line:]))
            items.append(Item(CODE, f"{path.stem}.{node.name}", plain, chat))
    return items


def _alpaca(path: Path) -> list[Item]:
    items = []
    for line in _lines(path):
        task = json.loads(line)
        for i, case in enumerate(task["instances"]):
            asked = f"{task['instruction']}\n{case['input']}".strip()
            form = Form(f"{asked}\nAnswer:", f" {case['output']}")
            items.append(Item("alpaca", f"{task['id']}/{i}", form, Form(asked, case["output"])))
    return items


Datasets = dict[str, tuple[str, Callable[[Path], list[Item]]]]
DATASETS: Datasets = {
    "text": (TEXT, _text), "gsm8k": (GSM8K, _gsm8k), "bbh": (BBH, _bbh), "humaneval": (HUMANEVAL, _humaneval),
}  # fmt: skip
"""name -> file or folder in the data folder, and what reads it."""
TRAINING: Datasets = {
    "text": ("wikitext2_valid.txt", _text), "gsm8k": ("gsm8k_train4000.jsonl", _gsm8k),
    "alpaca": ("alpaca_seed_tasks.jsonl", _alpaca),
}  # fmt: skip


@dataclass(frozen=True)
class Encoded:
    """An item for one model.

    Attributes:
        prompt: as an engine takes it: text, or messages.
        prompt_ids, reference_ids: what teacher forcing runs.
        stop: what ends an answer.
    """

    prompt: str | list[dict[str, str]]
    prompt_ids: list[int]
    reference_ids: list[int]
    stop: tuple[str, ...]


def encode(item: Item, tokenizer: Any) -> Encoded:
    """The item as a message where the model has a chat template, else as plain text."""
    prompt: str | list[dict[str, str]]
    if item.chat is not None and getattr(tokenizer, "chat_template", None):
        form, prompt = item.chat, [{"role": "user", "content": item.chat.prompt}]
        whole = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        prompt_ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    else:
        form, prompt = item.plain, item.plain.prompt
        prompt_ids = tokenizer(prompt)["input_ids"]
    reference_ids = tokenizer(form.reference, add_special_tokens=False)["input_ids"]
    return Encoded(prompt, list(prompt_ids), list(reference_ids), form.stop)
