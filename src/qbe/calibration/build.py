"""`qbe calibrate build`: logs are read, rendered and labelled; what may not be in a set goes; quotas choose; personal
data is masked."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from qbe.analysis.profile import CLASSES
from qbe.calibration import labels, log, quotas
from qbe.calibration.near import Duplicates, Items, runs
from qbe.calibration.personal_data import Masker
from qbe.calibration.render import render
from qbe.errors import QBEError
from qbe.progress import bar
from qbe.store.calibration_set import Passage
from qbe.store.calibration_text import FEWEST, template_digest
from qbe.version import __version__

SHORTEST = 16  # tokens of a passage
_NO_TEXT, _SHORT, _LONG = "not text alone", f"under {SHORTEST} tokens", "longer than the context"
_DUPLICATE, _ITEM = "near another passage", "near an item of a suite"


@dataclass
class Candidates:
    """What a log may give.

    Attributes:
        passages: as they would be taken, personal data included.
        logged: how many exchanges have each combination of labels, near-duplicates included.
        left_out: why -> how many.
        sources: one for each log.
    """

    passages: list[Passage] = field(default_factory=list)
    logged: Counter[quotas.Values] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    sources: list[dict[str, Any]] = field(default_factory=list)


def build(
    logs: Sequence[Path], tokenizer: Any, model: str, context: int, items: Iterable[str], count: int,
    licence: str | None = None, *, progress: bool,
) -> tuple[list[Passage], dict[str, Any]]:  # fmt: skip
    """The passages of a set, and what `set.json` says of them.

    Args:
        tokenizer: of the model, with its chat template. model: its name.
        context: tokens of its longest input.
        items: texts of suites that nothing in the set may be near.
        count: passages to take, at most.
        licence: of lines that name none.

    Raises:
        QBEError: a log that cannot be read or has something else in it, or too little is left of it.
    """
    found = _read(logs, tokenizer, model, context, Items(items), licence, progress)
    values = [(p.prompt_class, p.language, p.structure, p.length) for p in found.passages]
    texts = [p.text for p in found.passages]
    chosen = quotas.choose(list(zip(values, texts, strict=True)), found.logged, count)
    passages = []
    with bar("masking personal data", len(chosen), progress) as step:
        masker = Masker()  # seconds, in which Presidio is imported
        for i in chosen:
            text = masker.mask(texts[i])
            passages.append(replace(found.passages[i], text=text, tokens=len(_ids(tokenizer, text))))
            step()
    tokens = sum(p.tokens for p in passages)
    if tokens < FEWEST:
        gone = ", ".join(f"{n} {why}" for why, n in found.left_out.most_common()) or "nothing was left out"
        raise QBEError(f"the log gives {len(passages)} passages of {tokens} tokens ({gone}); give more of it: a set "
                       f"has at least {FEWEST} tokens")  # fmt: skip
    met = quotas.met(found.logged, [values[i] for i in chosen], count)
    known = {"class": CLASSES, "structure": labels.STRUCTURES, "length": labels.lengths(context)}
    taken = Counter(p.source for p in passages)
    return passages, {
        "qbe": __version__,
        "model": model,
        "template": template_digest(tokenizer),
        "context": context,
        "passages": len(passages),
        "tokens": tokens,
        "sources": [{**source, "taken": taken[source["name"]]} for source in found.sources],
        "licences": dict(Counter(p.licence for p in passages).most_common()),
        "quotas": {
            name: {value: _rounded(of.get(value)) for value in dict.fromkeys((*of, *known.get(name, ())))}
            for name, of in met.items()
        },
        "left_out": dict(found.left_out.most_common()),
        "masked": dict(masker.counts.most_common()),
    }


def _rounded(quota: quotas.Quota | None) -> dict[str, float]:
    """Zeros for what the log does not have."""
    return {key: round(n, 4) for key, n in asdict(quota or quotas.Quota(0.0, 0.0, 0)).items()}


def _read(
    logs: Sequence[Path], tokenizer: Any, model: str, context: int, items: Items, licence: str | None, progress: bool
) -> Candidates:
    found, labeller, duplicates = Candidates(), labels.Labeller(), Duplicates()
    names = [path.name for path in logs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise QBEError(f"two logs are called '{twice}': passages name the log that they are of; rename one")
    with bar("reading logs", sum(map(log.count_lines, logs)), progress) as step:
        for path in logs:
            exchanges = 0
            for some in log.read(path, licence):
                for exchange in some:
                    exchanges += 1
                    why = _take(found, exchange, tokenizer, model, context, items, labeller, duplicates)
                    if why is not None:
                        found.left_out[why] += 1
                step()
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            found.sources.append({"name": path.name, "sha256": digest, "exchanges": exchanges})
    return found


def _take(
    found: Candidates, exchange: log.Exchange, tokenizer: Any, model: str, context: int, items: Items,
    labeller: labels.Labeller, duplicates: Duplicates,
) -> str | None:  # fmt: skip
    """Adds an exchange to the candidates; else why it is left out."""
    if not exchange.only_text:
        return _NO_TEXT
    rendered = render(exchange, tokenizer, model)
    tokens = len(_ids(tokenizer, rendered.text))
    if not SHORTEST <= tokens <= context:
        return _SHORT if tokens < SHORTEST else _LONG
    passage = Passage(
        rendered.text, labeller.prompt_class(rendered.asked, _ids(tokenizer, rendered.asked)),
        labeller.language(rendered.said or rendered.text), labels.structure(rendered), labels.length(tokens), tokens,
        exchange.source, exchange.licence,
    )  # fmt: skip
    found.logged[(passage.prompt_class, passage.language, passage.structure, passage.length)] += 1
    if items.near(runs(rendered.text)):
        return _ITEM
    if not duplicates.is_new(f"{len(found.passages)}", runs(rendered.said or rendered.text)):
        return _DUPLICATE
    found.passages.append(passage)
    return None


def _ids(tokenizer: Any, text: str) -> list[int]:
    try:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    except (TypeError, ValueError):  # of lone surrogates
        return _ids(tokenizer, text.encode("utf-8", "replace").decode())
    return ids
