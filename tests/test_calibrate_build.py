"""`qbe calibrate build`: logs become a set that looks like the traffic, and `qbe quantize` is driven by it."""

# ruff: noqa: E402
from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

for _name in ("datasketch", "presidio_analyzer", "py3langid", "fastapi", "llguidance"):
    pytest.importorskip(_name, reason=f"qbe calibrate needs {_name}: pip install 'qbe[calibrate]'")

from cli_process import qbe, refused
from conftest import byte_tokenizer
from qbe.calibration import labels, log, quotas
from qbe.calibration.near import Duplicates, Items, runs
from qbe.calibration.personal_data import Masker
from qbe.calibration.render import Rendered, render
from qbe.errors import QBEError
from qbe.store import calibration_set
from qbe.store.calibration_text import built_in, kinds, open_text

NOUNS = ("harbour", "violin", "glacier", "bakery", "tunnel", "orchard", "museum", "lighthouse", "canal", "workshop")
VERBS = ("describe", "compare", "paint", "visit", "repair", "photograph", "measure", "remember", "explain", "sell")
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"word": {"type": "string"}}}},
}


def chat(said: str, answer: str | None = None, **fields: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"messages": [{"role": "user", "content": said}], **fields}
    if answer is not None:
        row["response"] = {"choices": [{"message": {"role": "assistant", "content": answer}}]}
    return row


def rows() -> list[dict[str, Any]]:
    """A log of 46 exchanges."""
    words = random.Random(0)

    def sentence() -> str:
        return " and ".join(f"{words.choice(VERBS)} the {words.choice(NOUNS)}" for _ in range(6))

    found = [chat(f"Please {sentence()}.", f"I could {sentence()}, if you want.") for _ in range(36)]
    found += [chat(f"Look up the word {noun} for me in the big dictionary.", tools=[TOOL]) for noun in NOUNS[:6]]
    found += [
        chat("Schreibe mir bitte einen kurzen Brief an die Hausverwaltung wegen der Heizung im Bad.", "Gerne."),
        chat("Decris-moi la recette du gâteau aux pommes de ma grand-mère, avec le temps de cuisson.", license="MIT"),
        chat("Give me the order as JSON.", '{"order": 12, "lines": [{"sku": "A"}]}'),
        chat("Write the weather report in XML, please.", "<report><rain mm='4'/></report>"),
    ]
    return found


def write(path: Path, found: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found), encoding="utf-8")
    return path


def exchanges(path: Path, row: Any) -> list[log.Exchange]:
    return next(log.read(write(path, [row]), None))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path, home: Path) -> tuple[Path, dict[str, Any]]:
    """A set of 24 passages from a log with all that has to go, and what the command said."""
    folder = tmp_path_factory.mktemp("calibrate")
    suite = folder / "suite.toml"
    suite.write_text('margins = {own = 0.1}\n[[items]]\ndomain = "own"\nkind = "rows"\npath = "own.jsonl"\n')
    asked = "Which of our seven warehouses has the most pallets of blue paint this week?"
    write(folder / "own.jsonl", [{"id": 1, "prompt": asked, "contains": "Kiel"}])
    found = [
        *rows(),
        chat(rows()[0]["messages"][0]["content"].upper(), rows()[0]["response"]["choices"][0]["message"]["content"]),
        chat(f"Hello there, a question from the office. {asked} Many thanks from all of us here!"),
        chat("Write to ana.lopez@example.com or call +49 30 901820 about the card 4111 1111 1111 1111.", license="MIT"),
        chat("word " * 3000),
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
    ]  # fmt: skip
    done = qbe(
        "calibrate", "build", str(write(folder / "log.jsonl", found)), "-o", str(folder / "set"), "--model",
        str(tiny_folder), "--passages", "24", "--suite", str(suite), "--licence", "internal", "--json", home=home,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    return folder / "set", json.loads(done.stdout)


def test_the_set_looks_like_the_log(made: tuple[Path, dict[str, Any]]) -> None:
    folder, said = made
    found = calibration_set.read(folder)
    assert said == found.about
    assert said["passages"] == len(found.passages) == 24
    assert said["tokens"] == sum(p.tokens for p in found.passages)
    assert {s["name"] for s in said["suites"]} == {"default", "suite"}
    for label, field in (("class", "prompt_class"), ("language",) * 2, ("structure",) * 2, ("length",) * 2):
        of = said["quotas"][label]
        assert sum(q["share"] for q in of.values()) == pytest.approx(1, abs=1e-3)
        taken = Counter(getattr(p, field) for p in found.passages)
        assert {v: q["taken"] for v, q in of.items() if q["taken"]} == dict(taken)
        assert all(q["taken"] >= 1 for q in of.values() if q["share"]), f"a {label} of the log is not in the set"
    assert {"text", "tools", "json", "xml"} <= said["quotas"]["structure"].keys()
    assert {"en", "de", "fr"} <= said["quotas"]["language"].keys()
    assert sum(said["licences"].values()) == 24
    assert said["licences"].keys() <= {"internal", "MIT"}
    assert said["sources"][0]["taken"] == 24
    assert said["sources"][0]["exchanges"] == len(rows()) + 5
    # As the model reads it: through the template, answer included.
    german = next(p.text for p in found.passages if p.language == "de")
    assert german.startswith("user: Schreibe")
    assert german.rstrip().endswith("assistant:") or "assistant: Gerne." in german


def test_what_may_not_be_in_it_is_not(made: tuple[Path, dict[str, Any]]) -> None:
    folder, said = made
    text = (folder / "passages.jsonl").read_text()
    assert said["left_out"] == {
        "near another passage": 1, "near an item of a suite": 1, "longer than the context": 1, "not text alone": 1
    }  # fmt: skip
    assert "warehouses" not in text
    assert "ana.lopez" not in text
    assert "4111" not in text


def test_the_set_drives_the_whole_store(
    made: tuple[Path, dict[str, Any]], tiny_folder: Path, home: Path, tmp_path: Path
) -> None:
    folder, said = made
    out, plain = tmp_path / "out", tmp_path / "plain"
    done = qbe("quantize", str(tiny_folder), "-o", str(out), "--calibrate", str(folder), "--json", home=home)
    assert done.returncode == 0, done.stderr.decode()
    done = qbe("quantize", str(tiny_folder), "-o", str(plain), "--json", home=home)
    assert done.returncode == 0, done.stderr.decode()
    provenance = json.loads((out / "provenance.json").read_text())
    assert provenance["calibration"] == {"text": "set", "sha256": said["digest"]}
    for name in ("sensitivity.json", "kv_sensitivity.json"):
        of_set, of_default = (json.loads((f / name).read_text()) for f in (out, plain))
        assert of_set["about"]["text"] == "set"
        assert of_default["about"]["text"] == "built-in calibration text"
    assert of_set["heads"] != of_default["heads"]
    weights = [json.loads((f / "sensitivity.json").read_text())["kl"] for f in (out, plain)]
    assert weights[0] != weights[1]
    folds = []
    for store in (out, plain):
        with safe_open(store / "smoothing.safetensors", framework="pt") as file:
            folds.append({name: file.get_tensor(name).tolist() for name in file.keys()})  # noqa: SIM118
    assert folds[0] != folds[1]
    assert qbe("generate", "hi", "--model", str(out), "--max-tokens", "2", home=home).returncode == 0
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "set.json").write_text((folder / "set.json").read_text())
    (damaged / "passages.jsonl").write_text((folder / "passages.jsonl").read_text()[:-2] + " \n")
    told = refused("quantize", str(tiny_folder), "-o", str(tmp_path / "no"), "--calibrate", str(damaged), home=home)
    assert "its digest is not that in set.json" in told
    assert not (tmp_path / "no").exists()


def test_another_models_template_is_told(made: tuple[Path, dict[str, Any]], tmp_path: Path, home: Path) -> None:
    from conftest import tiny_llama

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    tiny_llama().save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    asked = ("quantize", str(tmp_path / "other"), "-o", str(tmp_path / "out"), "--calibrate", str(made[0]))
    done = qbe(*asked, home=home)
    assert done.returncode == 0, done.stderr.decode()
    assert "was built with another model's chat template" in done.stderr.decode()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: this is not JSON"),
        ("[1]", "line 2: a line is a JSON object"),
        ('{"input": "hi"}', "line 2: the Responses API's 'input' is not read"),
        ('{"text": "hi"}', "line 2: there are neither 'messages' nor a 'prompt'"),
        ('{"messages": [{"role": "wizard", "content": "hi"}]}', "line 2: messages.0.role"),
        ('{"prompt": {"a": 1}}', "line 2: prompt: it is neither text nor a list of tokens"),
        ('{"prompt": [99999999]}', "line 2: prompt: it has tokens that the model does not know"),
        (
            '{"messages": [{"role": "user", "content": "hi there, you"}]}',
            "2 passages of 50 tokens (nothing was left out)",
        ),
    ],
)
def test_lines_that_are_no_requests_are_refused(
    line: str, says: str, tmp_path: Path, tiny_folder: Path, home: Path
) -> None:
    (tmp_path / "log.jsonl").write_text(f'{{"messages": [{{"role": "user", "content": "a"}}]}}\n{line}\n')
    where = ["-o", str(tmp_path / "set"), "--model", str(tiny_folder)]
    assert says in refused("calibrate", "build", str(tmp_path / "log.jsonl"), *where, home=home)
    assert not (tmp_path / "set").exists()


def test_other_bad_input_is_refused(tmp_path: Path, tiny_folder: Path, home: Path) -> None:
    (tmp_path / "log.jsonl").write_text("")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    to = ["-o", str(tmp_path / "set"), "--model", str(tiny_folder)]
    at = ["calibrate", "build", str(tmp_path / "log.jsonl"), *to]
    assert "cannot be read" in refused("calibrate", "build", str(tmp_path / "none.jsonl"), *to, home=home)
    assert "not valid UTF-8" in refused("calibrate", "build", str(tmp_path / "latin.jsonl"), *to, home=home)
    assert "--passages is 0" in refused(*at, "--passages", "0", home=home)
    assert "cannot be read" in refused(*at, "--suite", str(tmp_path / "none.toml"), home=home)
    assert "no/such-model" in refused(*at[:-1], "no/such-model", home=home)
    assert "two logs are called 'log.jsonl'" in refused(*at, str(tmp_path / "log.jsonl"), home=home)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "x").touch()
    assert "already exists and is not empty" in refused(*at, home=home)


def test_all_forms_of_a_line_say_the_same(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "What is a fjord?"}]
    answer = {"choices": [{"message": {"role": "assistant", "content": "A drowned valley."}}]}
    forms = [
        {"messages": said, "response": answer},
        {"messages": said, **answer},
        {"request": {"messages": said}, "response": answer},
        {"body": {"messages": said}, "response": {"status_code": 200, "body": answer}},
        {"request": {"method": "POST", "body": {"messages": said}}, "response": answer},
        {"messages": said, "response": "A drowned valley."},
        {"messages": [*said, answer["choices"][0]["message"]]},
    ]
    texts = [render(exchanges(tmp_path / "log.jsonl", form)[0], byte_tokenizer(), "x").text for form in forms]
    assert {t.removesuffix("assistant: ") for t in texts} == {"user: What is a fjord?\nassistant: A drowned valley.\n"}
    failed = {"messages": said, "response": {"error": {"message": "overloaded"}}}
    assert exchanges(tmp_path / "log.jsonl", failed)[0].answer is None
    several = {"prompt": ["one", "two"], "response": {"choices": [{"text": "!"}]}}
    assert [(e.request["prompt"], e.answer) for e in exchanges(tmp_path / "log.jsonl", several)] == [
        ("one", "!"), ("two", None)
    ]  # fmt: skip
    old = chat("Look it up.", functions=[TOOL["function"]])
    assert render(exchanges(tmp_path / "log.jsonl", old)[0], byte_tokenizer(), "x").uses_tools


def test_a_generation_prompt_ends_what_has_no_answer(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    for answer, wanted in ((None, "<user>Hi!<assistant>"), ("Ho!", "<user>Hi!<assistant>Ho!")):
        exchange = exchanges(tmp_path / "log.jsonl", chat("Hi!", answer))[0]
        assert render(exchange, tokenizer, "x").text == wanted
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(QBEError, match=r"line 1: x has no chat template"):
        render(exchange, tokenizer, "x")


def test_structures_and_lengths() -> None:
    def of(answer: str, asked: str = "", tools: bool = False, json: bool = False) -> str:
        return labels.structure(Rendered("", asked, "", answer, tools, json))

    assert of("It is a valley.") == "text"
    assert of(' [1, 2, {"a": null}] ') == of('Here:\n```json\n{"a": 1}\n```') == of("Sure", json=True) == "json"
    assert of("<a x='1'>b</a>") == of("```xml\n<a><b/></a>\n```") == "xml"
    assert of("<a b </c>") == of("a < b and b > c") == "text"
    assert of("", asked='{"a": 1}') == "json"
    assert of('{"a": 1}', tools=True) == "tools"
    assert [labels.length(n) for n in (1, 2048, 2049, 8192, 10_000, 200_000)] == [
        "up to 2k", "up to 2k", "2k-8k", "2k-8k", "8k-32k", "from 128k"
    ]  # fmt: skip
    assert labels.lengths(2048) == ("up to 2k",)
    assert labels.lengths(8192) == ("up to 2k", "2k-8k")


def test_quotas_give_shares_and_the_rare_ones_their_place() -> None:
    common, rare = ("code", "en", "text", "up to 2k"), ("dialogue", "de", "json", "up to 2k")
    other = ("code", "en", "tools", "2k-8k")
    candidates = [(v, f"{v}{i}") for v, n in ((common, 900), (other, 97), (rare, 3)) for i in range(n)]
    logged = Counter(v for v, _ in candidates)
    chosen = quotas.choose(candidates, logged, 40)
    taken = Counter(candidates[i][0] for i in chosen)
    assert len(set(chosen)) == 40
    assert taken[rare] == 2
    assert abs(taken[other] - 4) <= 1
    beginning = Counter(candidates[i][0] for i in chosen[:10])
    assert len(beginning) == 3, "a beginning of the set looks like the whole"
    assert chosen == quotas.choose(candidates, logged, 40)
    shuffled = [candidates[i] for i in reversed(range(1000))]
    assert [shuffled[i] for i in quotas.choose(shuffled, logged, 40)] == [candidates[i] for i in chosen]
    assert sorted(quotas.choose(candidates[-5:], logged, 40)) == [0, 1, 2, 3, 4]  # all there are
    met = quotas.met(logged, [candidates[i][0] for i in chosen], 40)
    assert met["language"]["de"] == quotas.Quota(0.003, 2, 2)


def test_near_duplicates_are_found_and_others_are_not() -> None:
    first = "The committee met on Monday and decided, after a long debate, to repair the bridge before the winter. " * 3
    second = first.upper().replace(",", "")
    kept = Duplicates()
    assert kept.is_new("a", runs(first))
    assert not kept.is_new("b", runs(second))
    assert kept.is_new("c", runs("Nobody in the village had seen the comet before the night of the great storm. " * 3))
    assert kept.is_new("d", runs("村口有一棵老槐树没有人知道它多少岁了"))
    assert not kept.is_new("e", runs("村口有一棵老槐树,没有人知道它多少岁了。"))
    assert runs("!") == set()


def test_a_passage_that_holds_half_of_an_item_is_near() -> None:
    items = Items(["Which of the two barges carried the heavier load of slate to the mill in March?"])
    around = "We talked about other things for a while. " * 50
    assert items.near(runs(f"{around} which of the two barges carried the heavier load of slate, to the MILL?"))
    assert not items.near(runs(f"{around} which of the two barges was the older one? {around}"))
    assert not Items([]).near(runs(around))


def test_personal_data_is_replaced_by_its_kind_and_ordinary_text_is_not() -> None:
    masker = Masker()
    text = (
        "Ana (ana.lopez@example.com, +49 30 901820) paid with 4111 1111 1111 1111 from DE89 3704 0044 0532 0130 00; "
        "she came from 192.168.1.34 with SSN 536-90-4399."
    )
    masked = masker.mask(text)
    assert masked == (
        "Ana (<EMAIL_ADDRESS>, <PHONE_NUMBER>) paid with <CREDIT_CARD> from <IBAN_CODE>; "
        "she came from <IP_ADDRESS> with SSN <US_SSN>."
    )
    assert masker.counts.total() == 6
    for text, expected in {
        "123-45-6789, 000 12 3456; 10-10-2024": "<US_SSN>, <US_SSN>; 10-10-2024",
        "write to jane [at] example.com or": "write to <EMAIL_ADDRESS> or",
        "jane.doe (AT) mail (dot) example (dot) co.uk": "<EMAIL_ADDRESS>",
        "jane at example dot com, jane@example[.]org": "<EMAIL_ADDRESS>, <EMAIL_ADDRESS>",
    }.items():
        assert masker.mask(text) == expected
    assert masker.mask("a." * 20000) == "a." * 20000
    plain = "Meet me at example.com at noon; call foo[at](x).bar or W @ x.T; arrive at 5 dot 30"
    assert masker.mask(plain) == plain
    plain = "132 / 88 = 1.5 hours; x = [1, 2, 3]; version 3.4.0-rc1 of 2024-03-11 has 1 512 lines <|im_end|>"
    assert masker.mask(plain) == plain


def test_the_built_in_text_has_five_languages_and_nothing_of_the_built_in_suite() -> None:
    from qbe.regress.sources import read
    from qbe.regress.suite import load

    labeller = labels.Labeller()
    of_kind = [text for kind, text in zip(kinds(), built_in().passages, strict=True) if kind == "languages"]
    assert {labeller.language(text) for text in of_kind} == {"de", "fr", "es", "ru", "zh"}
    tasks, changed = read(load(None))
    items = Items(text for task in tasks for text in (task.prompt, task.plain) if text)
    assert not changed
    assert not [p[:40] for p in built_in().passages if items.near(runs(p))]


def test_a_set_is_read_back_by_the_store(made: tuple[Path, dict[str, Any]]) -> None:
    text = open_text(made[0])
    tokens = text.windows(byte_tokenizer(), 512)
    assert tokens.shape[1] == 512
    assert text.sensitivity(byte_tokenizer()).shape[1] == 32
