"""What was measured as rows, comparisons and flips: JSON, and lines for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from qbe.datasets.intervals import Numbers, difference, interval, verdict
from qbe.eval.compare import FULL, ComparisonResult, Query, QueryResult, Setting

BASELINES = ("static", "fixed", "random", "uniform")
SLACK = 0.05  # bits by which averages may differ that are held against each other
UNEQUAL = "not at equal bits"


def describe(outcome: ComparisonResult) -> dict[str, Any]:
    """`reference` (16 bits) and `rows` for each data set and setting, `comparisons` with the baselines, `flips`.

    Several data sets count as one more, `all`: where a policy gives one kind of query more bits than another, only the
    whole has the average that was asked for.
    """
    by_dataset: dict[str, list[Query]] = {}
    for query in outcome.queries:
        by_dataset.setdefault(query.item.dataset, []).append(query)
    if len(by_dataset) > 1:
        by_dataset["all"] = outcome.queries
    rows = [row(name, queries, s) for s in outcome.settings for name, queries in by_dataset.items()]
    return {
        "reference": [row(name, queries, FULL) for name, queries in by_dataset.items()],
        "rows": rows,
        "comparisons": [
            c for name, queries in by_dataset.items() for c in comparisons(name, queries, outcome.settings)
        ],
        "flips": [f for s in outcome.settings for f in flips(outcome.queries, s)],
        "skipped": outcome.skipped,
        "left_out": outcome.left_out,
    }


def row(dataset: str, queries: Sequence[Query], setting: Setting) -> dict[str, Any]:
    """One setting on one data set.

    `kl` is nats a token from 16 bits, `top1` the share of tokens with the same likeliest successor, both over all
    tokens of the reference answers, of which `perplexity` is; the intervals are over queries. `bits` is what was asked
    for, `average_bits` and `bytes_per_token` what these tokens got. `accuracy` and `answer_tokens` are of the answers
    written.
    """
    of = [q.measured[setting] for q in queries]
    tokens, kl, loss = _tokens(of), _kl(of), _numbers([m.fidelity.loss for m in of])
    agreed = _numbers([m.fidelity.agreed for m in of])
    per_token = interval(loss, tokens)
    summary: dict[str, Any] = {
        "policy": setting.policy, "seed": setting.seed, "dataset": dataset, "bits": setting.bits, "n": len(of),
        "tokens": int(tokens.sum()), "average_bits": _mean_bits(queries, [setting]),
        "bytes_per_token": round(float(np.average([m.bytes_per_token for m in of], weights=tokens))),
        "kl": float(kl.sum() / tokens.sum()), "kl_interval": interval(kl, tokens),
        "top1": float(agreed.sum() / tokens.sum()), "top1_interval": interval(agreed, tokens),
        "perplexity": math.exp(min(700.0, loss.sum() / tokens.sum())),
        "perplexity_interval": per_token and [math.exp(min(700.0, x)) for x in per_token],
        "accuracy": None, "accuracy_interval": None, "answer_tokens": None,
    }  # fmt: skip
    answers = [m.answer for m in of if m.answer is not None]
    if answers:
        right = _numbers([a.right for a in answers])
        summary["accuracy"], summary["accuracy_interval"] = float(right.mean()), interval(right, np.ones(len(right)))
        summary["answer_tokens"] = float(np.mean([a.tokens for a in answers]))
    return summary


def comparisons(dataset: str, queries: Sequence[Query], settings: Sequence[Setting]) -> list[dict[str, Any]]:
    """Each policy against each baseline at the same budget, the seeds of one that draws averaged for each query."""
    groups: dict[tuple[float, str], list[Setting]] = {}
    for s in settings:
        groups.setdefault((s.bits, s.policy), []).append(s)
    compared = []
    for (bits, policy), ours in groups.items():
        for baseline in BASELINES:
            theirs = groups.get((bits, baseline), [])
            # A pair of baselines is compared once.
            if not theirs or (policy in BASELINES and BASELINES.index(policy) >= BASELINES.index(baseline)):
                continue
            a, b = ([_kl([q.measured[s] for q in queries]) for s in group] for group in (ours, theirs))
            a_kl, b_kl = np.mean(a, 0), np.mean(b, 0)
            kl, bits_of = interval(a_kl, b_kl), [_mean_bits(queries, group) for group in (ours, theirs)]
            entry: dict[str, Any] = {
                "dataset": dataset, "bits": bits, "policy": policy, "baseline": baseline, "n": len(queries),
                "average_bits": bits_of,
                "kl_ratio": float(a_kl.sum() / b_kl.sum()) if b_kl.sum() else None, "kl_ratio_interval": kl,
                "kl_verdict": _fair(verdict(kl, 1.0, True, len(queries)), bits_of),
            }  # fmt: skip
            if all(q.measured[s].answer for q in queries for s in (*ours, *theirs)):
                a_right, b_right = _right(queries, ours), _right(queries, theirs)
                wider = difference(a_right, b_right)
                entry["accuracy_difference"] = float((a_right - b_right).mean())
                entry["accuracy_difference_interval"] = wider
                entry["accuracy_verdict"] = _fair(verdict(wider, 0.0, False, len(queries)), bits_of)
            compared.append(entry)
    return compared


def _fair(said: str, average_bits: Sequence[float]) -> str:
    """A verdict, unless the bits that the policy had more, or fewer, than the baseline may be what is behind it."""
    more = average_bits[0] - average_bits[1]
    return UNEQUAL if (said == "better" and more > SLACK) or (said == "worse" and more < -SLACK) else said


def flips(queries: Sequence[Query], setting: Setting) -> list[dict[str, Any]]:
    """The answers that are right at 16 bits and wrong here, or the other way round."""
    flipped = []
    for query in queries:
        before, now = query.measured[FULL].answer, query.measured[setting].answer
        if before is not None and now is not None and before.right != now.right:
            flipped.append({
                "policy": setting.policy, "seed": setting.seed, "bits": setting.bits, "item": query.item.name,
                "now": "right" if now.right else "wrong", "answer": now.text, "answer_at_16_bits": before.text,
            })  # fmt: skip
    return flipped


def render(described: dict[str, Any], model: str) -> RenderableType:
    """Tables by data set, and below them what the comparisons say."""
    parts: list[RenderableType] = []
    for reference in described["reference"]:
        name = reference["dataset"]
        parts.append(Text(f"{model}, {name}: {reference['n']} queries, {reference['tokens']} tokens", style="bold"))
        table = Table(box=None, padding=(0, 2, 0, 0))
        asked = reference["accuracy"] is not None
        columns = ["policy", "bits", "MB/token", "KL, nats", "95 %", "top-1", "perplexity"]
        for column in columns + ["right", "95 %", "tokens"] * asked:
            table.add_column(column, justify="left" if column == "policy" else "right")
        for r in [reference, *(r for r in described["rows"] if r["dataset"] == name)]:
            label = "16 bits" if r is reference else r["policy"] + ("" if r["seed"] is None else f":{r['seed']}")
            cells = [label, f"{r['average_bits']:.2f}", f"{r['bytes_per_token'] / 1e6:.1f}", f"{r['kl']:.5f}",
                     _span(r["kl_interval"], ".5f"), f"{r['top1']:.2%}", f"{r['perplexity']:.3f}"]  # fmt: skip
            if asked:
                cells += [f"{r['accuracy']:.1%}", _span(r["accuracy_interval"], ".1%"), f"{r['answer_tokens']:.0f}"]
            table.add_row(*cells)
        parts += [table, *(Text(_says(c)) for c in described["comparisons"] if c["dataset"] == name), Text("")]
    changed = described["flips"]
    if changed:
        gained = sum(f["now"] == "right" for f in changed)
        parts.append(
            Text(f"{len(changed)} answers flipped: {len(changed) - gained} lost, {gained} gained (--json lists)")
        )
    parts += [Text(line, style="yellow") for line in described["skipped"]]
    if described["left_out"]:
        parts.append(
            Text(f"{len(described['left_out'])} items are longer than the context: {described['left_out'][0]} …")
        )
    return Group(*parts)


def _says(c: dict[str, Any]) -> str:
    ours, theirs = c["average_bits"]
    had = f" ({ours:.2f} and {theirs:.2f})" if abs(ours - theirs) >= 0.005 else ""
    line = f"{c['policy']} and {c['baseline']} at {c['bits']:g} bits{had}: KL "
    if c["kl_ratio"] is None:
        return line + "none at all in either"
    line += f"{c['kl_ratio']:.3f} times{_brackets(c['kl_ratio_interval'], '.3f')}, {c['kl_verdict']}"
    if "accuracy_verdict" in c:
        line += f"; right {c['accuracy_difference']:+.1%}{_brackets(c['accuracy_difference_interval'], '+.1%')}, "
        line += c["accuracy_verdict"]
    return line


def _span(bounds: Sequence[float] | None, form: str) -> str:
    return "" if bounds is None else f"{bounds[0]:{form}} to {bounds[1]:{form}}"


def _brackets(bounds: Sequence[float] | None, form: str) -> str:
    return "" if bounds is None else f" ({_span(bounds, form)})"


def _numbers(values: Sequence[float]) -> Numbers:
    return np.asarray(values, dtype=np.float64)


def _tokens(of: Sequence[QueryResult]) -> Numbers:
    return _numbers([m.fidelity.tokens for m in of])


def _kl(of: Sequence[QueryResult]) -> Numbers:
    return _numbers([m.fidelity.kl for m in of])


def _mean_bits(queries: Sequence[Query], settings: Sequence[Setting]) -> float:
    """Over the tokens that divergence is counted on: a policy may give the queries that have many of them more."""
    of = [q.measured[s] for q in queries for s in settings]
    return round(float(np.average([m.bits for m in of], weights=_tokens(of))), 4)


def _right(queries: Sequence[Query], settings: Sequence[Setting]) -> Numbers:
    """Per query the share of the seeds that are right."""
    rows = [[bool((a := q.measured[s].answer) and a.right) for q in queries] for s in settings]
    return np.mean(_numbers(rows), 0)  # type: ignore[arg-type]
