"""The training set of the query analysis: (prompt, reference answer, class) from the data folder and from templates."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import analysis_prompts as P


@dataclass(frozen=True)
class Pair:
    """One prompt. `answer` None: the 16-bit model's own greedy answer is used. `measure`: gets a damage label."""

    prompt: str
    answer: str | None
    prompt_class: str
    source: str
    held_out: bool
    measure: bool = True

    @property
    def key(self) -> str:
        """Identifies the pair in the file of labels."""
        return f"{self.source}|{self.prompt}|{self.answer or ''}"


def _lines(path: Path) -> list[dict]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as f:
        return [json.loads(line) for line in f if line.strip()]


def _facts() -> Iterator[Pair]:
    rows = [(f"What is the capital of {c}?", f"The capital of {c} is {t}.") for c, t in P.CAPITALS.items()]
    rows += [(f"Who wrote {b}?", f"{b} was written by {a}.") for b, a in P.AUTHORS.items()]
    rows += [
        (f"What is the chemical symbol for {e}?", f"The chemical symbol for {e} is {s}.") for e, s in P.SYMBOLS.items()
    ]
    rows += [(f"When did {e}?", f"In {y}.") for e, y in P.YEARS.items()]
    for q, a in rows:
        yield Pair(q, a, "question_answering", "facts", False)
    for q, a in P.FACTS_HELD:
        yield Pair(q, a, "question_answering", "facts", True)


def _explain() -> Iterator[Pair]:
    for held, templates in ((False, P.EXPLAIN), (True, P.EXPLAIN_HELD)):
        for i, topic in enumerate(P.TOPICS):
            if (i % 4 == 3) == held:
                for j, t in enumerate(templates):
                    yield Pair(t.format(topic), None, "question_answering", "explain", held, held or (i + j) % 5 == 0)


def _dialogue() -> Iterator[Pair]:
    for held, prompts in ((False, P.DIALOGUE), (True, P.DIALOGUE_HELD)):
        for p in prompts:
            yield Pair(p, None, "dialogue", "dialogue", held)


def _mathematics(data: Path, rng: random.Random) -> Iterator[Pair]:
    for held, name, n, measured in ((False, "gsm8k_train4000", 400, 90), (True, "gsm8k_test500", 100, 40)):
        for i, r in enumerate(rng.sample(_lines(data / f"{name}.jsonl"), n)):
            answer = re.sub(r"<<.*?>>", "", r["answer"]).replace("####", "The answer is")
            yield Pair(r["question"], answer, "mathematics", "gsm8k", held, i < measured)
    for i in range(60):
        a, b, c = rng.randint(2, 20), rng.randint(2, 60), rng.randint(2, 30)
        v = dict(a=a, b=b, c=c, add=a + b, mul=a * b, mulsub=a * b - c, ax=a * c, lin=a * c + b, bc=b + c)
        q, t = P.MATH_TEMPLATES[i % len(P.MATH_TEMPLATES)]
        yield Pair(q.format(**v), t.format(**v), "mathematics", "arithmetic", False, i < 36)
    for q, t in P.MATH_HELD:
        yield Pair(q, t, "mathematics", "arithmetic", True)


def _code(data: Path, rng: random.Random) -> Iterator[Pair]:
    for i, r in enumerate(_lines(data / "HumanEval.jsonl.gz")):
        held, name = i >= 124, r["entry_point"]
        start = r["prompt"].index(f"def {name}")
        signature = r["prompt"][start : r["prompt"].index("\n", start) + 1]
        answer = f"```python\n{signature}{r['canonical_solution'].rstrip()}\n```"
        yield Pair(f"Complete this function:\n\n{r['prompt']}", answer, "code", "humaneval", held, i % 3 != 1)
        doc = re.search(r'("""|\'\'\')\s*(.+?)(?:\n\s*\n|>>>|\1)', r["prompt"][start:], re.S)
        if doc:
            text = re.sub(r"\s+", " ", doc.group(2)).strip()
            yield Pair(
                f"Write a Python function `{name}`. {text}", answer, "code", "humaneval-request", held, i % 3 == 1
            )
    for i, lang in enumerate(P.CODE_LANGUAGES):
        for j, task in enumerate(P.CODE_TASKS):
            t = P.CODE_TEMPLATES[(i + j) % len(P.CODE_TEMPLATES)]
            yield Pair(t.format(lang=lang, task=task), None, "code", "code-request", False, (3 * i + j) % 4 == 0)
    for p in P.CODE_HELD:
        yield Pair(p, None, "code", "code-request", True)


def _bbh(data: Path, rng: random.Random) -> Iterator[Pair]:
    for i, path in enumerate(sorted((data / "bbh").glob("*.json"))):
        items = rng.sample(json.loads(path.read_text())["examples"], 22)
        held = i % 4 == 2  # whole tasks are held out
        for j, r in enumerate(items):
            yield Pair(r["input"], r["target"], "question_answering", "bbh", held, j < (6 if held else 5))


def _alpaca(data: Path) -> Iterator[Pair]:
    classes = {i: c for c, ids in P.ALPACA.items() for i in ids}
    for i, r in enumerate(_lines(data / "alpaca_seed_tasks.jsonl")):
        one = r["instances"][0]
        prompt = r["instruction"] + ("\n" + one["input"] if one["input"] else "")
        c = classes.get(i, "question_answering")
        yield Pair(prompt, one["output"], c, "alpaca", i % 3 == 0, i % 2 == 0 and len(prompt) < 400)


def _articles(path: Path) -> list[tuple[str, list[str]]]:
    """(title, paragraphs) of a WikiText file, its tokenisation undone."""
    text = path.read_text(encoding="utf-8").replace(" @-@ ", "-").replace(" @.@ ", ".").replace(" @,@ ", ",")
    text = re.sub(r" ([.,;:)!?'%])", r"\1", text.replace("( ", "("))
    parts = re.split(r"^ = ([^=\n]+) = $", text, flags=re.M)
    bodies = [
        [q.strip().replace("<unk>", "it") for q in b.split("\n") if len(q) > 250 and " = " not in q[:4]]
        for b in parts[2::2]
    ]
    return [(t.strip(), b) for t, b in zip(parts[1::2], bodies, strict=True) if b]


def _wikitext(data: Path, rng: random.Random) -> Iterator[Pair]:
    for held, name, templates in ((False, "valid", P.SUMMARISE), (True, "test", P.SUMMARISE_HELD)):
        for i, (title, body) in enumerate(_articles(data / f"wikitext2_{name}.txt")[: 40 if held else 60]):
            lead = body[0].split(". ")[0] + "."
            if "<unk>" not in title:
                yield Pair(f"What is {title}?", lead, "question_answering", "wiki-question", held, i % 3 == 0)
            for j, paragraph in enumerate(rng.sample(body, min(3, len(body)))):
                t = templates[(3 * i + j) % len(templates)]
                yield Pair(
                    t.format(paragraph[:1500]),
                    None,
                    "summarisation",
                    "wiki-summary",
                    held,
                    j == 0 and i < (12 if held else 24),
                )


def _structured(data: Path, rng: random.Random) -> Iterator[Pair]:
    paths = sorted((data / "json_schemas").glob("*.json"))
    small = [q for q in paths if q.stat().st_size < 1600]
    for i, path in enumerate(small):
        held = i % 4 == 1
        schema = json.loads(path.read_text(encoding="utf-8"))
        text = json.dumps(schema, indent=2 if i % 2 else None)
        templates = P.SCHEMA_HELD if held else P.SCHEMA
        yield Pair(
            templates[i % len(templates)].format(text), None, "structured_output", "schema-instance", held, i < 28
        )
        keys = ", ".join(list(schema.get("properties", {}))[:6])
        if keys and not held:  # the inverse task has a real answer: the schema itself
            yield Pair(
                f"Write a JSON schema for an object with the fields {keys}.",
                text,
                "structured_output",
                "schema",
                held,
                i < 32,
            )
    for i, topic in enumerate(P.STRUCTURED_TOPICS):
        for j, t in enumerate(P.STRUCTURED):
            yield Pair(t.format(*topic), None, "structured_output", "format", False, (i + j) % 3 == 0)
    for p in P.STRUCTURED_HELD:
        yield Pair(p, None, "structured_output", "format", True)


def pairs(data: Path) -> list[Pair]:
    """Every training and held-out prompt, in a fixed order (seed 0)."""
    rng = random.Random(0)
    out = [*_facts(), *_explain(), *_dialogue(), *_mathematics(data, rng), *_code(data, rng), *_bbh(data, rng)]
    return [*out, *_alpaca(data), *_wikitext(data, rng), *_structured(data, rng)]
