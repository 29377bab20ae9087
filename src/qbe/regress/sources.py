"""The items of a suite: built-in ones, public data sets and users' own, read as `Task`s; changed files are named."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from qbe.datasets import items as datasets
from qbe.datasets.function_calls import schema_of
from qbe.errors import QBEError
from qbe.regress.grading import call_grader, refusal_grader, schema_grader
from qbe.regress.needles import needles
from qbe.regress.suite import BUILT_IN, Items, Suite
from qbe.regress.task import Task, of_item, read_rows

_BFCL = ("BFCL_v4_simple_python", "BFCL_v4_multiple", "BFCL_v4_parallel", "BFCL_v4_irrelevance")
_CALL_TOKENS, _SCHEMA_TOKENS, _REFUSAL_TOKENS = 128, 192, 48


def read(suite: Suite) -> tuple[list[Task], list[str]]:
    """All items, and a line for each file that is not the one that the suite was made with.

    Raises:
        QBEError: a file is missing or not what the suite says.
    """
    tasks, changed = list[Task](), list[str]()
    for source in suite.items:
        path = _path(source, suite.folder)
        if source.sha256 is not None:
            found = _digest(path)
            if found != source.sha256:
                changed.append(f"{source.path}: sha256 is {found[:12]}…, not {source.sha256[:12]}…, as the suite says")
        found_tasks = _read(source, path)
        if not found_tasks:
            raise QBEError(f"'{path}' has no items of the kind '{source.kind}'")
        tasks += _some(found_tasks, source.limit)
    names = [t.name for t in tasks]
    if twice := next((n for n in names if names.count(n) > 1), None):
        raise QBEError(f"two items of the suite are called '{twice}': give each file of items another name")
    return tasks, changed


def _some(tasks: list[Task], limit: int) -> list[Task]:
    """Critical items first, the others spread over the source; in their order."""
    critical = [t for t in tasks if t.critical][:limit]
    others = [t for t in tasks if not t.critical]
    left = min(limit - len(critical), len(others))
    kept = {t.name for t in critical} | {others[i * len(others) // left].name for i in range(left)}
    return [t for t in tasks if t.name in kept]


def _path(source: Items, folder: Path) -> Path:
    if source.path == BUILT_IN:
        return Path()
    if source.path.startswith(f"{BUILT_IN}:"):
        name = source.path.partition(":")[2]
        path = Path(str(files(__package__).joinpath("suites", f"{name}.jsonl")))
    else:
        path = folder / Path(source.path).expanduser()
    if not path.exists():
        raise QBEError(f"the suite's items in '{path}' are not there; correct the path, which counts from the suite")
    return path


def _digest(path: Path) -> str:
    """Of a file, or of the names and bytes of a folder's files."""
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    whole = hashlib.sha256()
    for file in sorted(p for p in path.iterdir() if p.is_file()):
        whole.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest()


def _read(source: Items, path: Path) -> list[Task]:
    try:
        if source.kind == "rows":
            return read_rows(path, source.domain, source.max_tokens)
        if source.kind == "needles":
            return needles(source.domain, None if source.path == BUILT_IN else path, source.characters)
        return _PARSERS[source.kind](path, source)
    except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError) as error:
        said = " ".join(str(error).split())[:120]
        raise QBEError(f"'{path}' cannot be read as {source.kind} ({type(error).__name__}: {said})") from None


def _dataset(parse: Callable[[Path], list[datasets.Item]]) -> Callable[[Path, Items], list[Task]]:
    return lambda path, source: [of_item(item, source.domain, source.max_tokens) for item in parse(path)]


def _schemas(path: Path, source: Items) -> list[Task]:
    tasks = []
    for file in sorted(path.glob("*.json")):
        schema = json.loads(file.read_text(encoding="utf-8"))
        says = "Write one example of JSON that matches this schema:\n" + json.dumps(schema)[:1500]
        named = {"name": "answer", "schema": schema}
        fields = {"response_format": {"type": "json_schema", "json_schema": named}}
        messages = [{"role": "user", "content": says}]
        tasks.append(Task(
            source.domain, f"schemas/{file.stem}", messages, f"{says}\n", schema_grader(schema, None),
            source.max_tokens or _SCHEMA_TOKENS, (), fields,
        ))  # fmt: skip
    return tasks


def _bfcl(path: Path, source: Items) -> list[Task]:
    """Of all files in turn; questions that no function answers expect no call."""
    tasks: list[Task] = []
    for name in _BFCL:
        if not (path / f"{name}.jsonl").is_file():
            continue
        answered = path / f"{name}.answers.jsonl"
        rows = _json_lines(path / f"{name}.jsonl")
        expected = {row["id"]: row["ground_truth"] for row in _json_lines(answered)} if answered.is_file() else {}
        for row in rows:
            functions = [{**f, "parameters": schema_of(f["parameters"])} for f in row["function"]]
            calls = expected.get(row["id"], [])
            fields = {
                "tools": [{"type": "function", "function": f} for f in functions],
                "tool_choice": "required" if calls else "auto", "parallel_tool_calls": len(calls) > 1,
            }  # fmt: skip
            tasks.append(Task(
                source.domain, f"bfcl/{row['id']}", row["question"][0], None, call_grader(calls),
                source.max_tokens or _CALL_TOKENS, (), fields,
            ))  # fmt: skip
    return tasks


def _xstest(path: Path, source: Items) -> list[Task]:
    """Prompts of the types `contrast_…` are unsafe; the others only sound so."""
    tasks = []
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            refuse, asked = row["type"].startswith("contrast"), row["prompt"]
            tasks.append(Task(
                source.domain, f"xstest/{row['id']}", [{"role": "user", "content": asked}],
                f"Question: {asked}\nAnswer:", refusal_grader(refuse), source.max_tokens or _REFUSAL_TOKENS,
                ("\nQuestion:",), refuse=refuse,
            ))  # fmt: skip
    return tasks


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def _named(name: str) -> Callable[[Path, Items], list[Task]]:
    return _dataset(datasets.DATASETS[name][1])


_PARSERS: dict[str, Callable[[Path, Items], list[Task]]] = {
    "gsm8k": _named("gsm8k"), "bbh": _named("bbh"), "humaneval": _named("humaneval"),
    "schemas": _schemas, "bfcl": _bfcl, "xstest": _xstest,
}  # fmt: skip
