"""All gates of a suite: from what was seen of both sides to a list of decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from qbe.regress.gate import Flips, Gate, Judge, Status
from qbe.regress.identity import Difference
from qbe.regress.identity_gates import fidelity, identity, laws, weights
from qbe.regress.observe import Observed
from qbe.regress.service_gates import service
from qbe.regress.suite import Suite
from qbe.regress.task import Task
from qbe.regress.weights import WeightCheck

_NAMES = {"logic": "right answers", "schema": "right objects", "tools": "right calls", "retrieval": "facts found",
          "own": "right answers"}  # fmt: skip


@dataclass
class Seen:
    """All that gates look at.

    Attributes:
        tasks: asked of both.
        before, now: baseline and candidate.
        differences: of two local models; None: they are not both here.
        weights: None where they were not compared.
        changed: files of items that are not those of the suite.
        slow: why the candidate is slow on this machine.
    """

    suite: Suite
    tasks: Sequence[Task]
    before: Observed
    now: Observed
    differences: list[Difference] | None = None
    weights: WeightCheck | None = None
    changed: list[str] = field(default_factory=list)
    slow: str = ""


def judge(seen: Seen) -> list[Gate]:
    """Every gate of the suite, those that do not apply included."""
    by_domain: dict[str, list[Task]] = {}
    for task in seen.tasks:
        if not task.trap:
            by_domain.setdefault(task.domain, []).append(task)
    comparisons = len(by_domain) + ("safety" in by_domain) + 1
    decide = Judge(seen.suite.alpha, comparisons)
    found = _unanswered(seen)
    for domain, tasks in by_domain.items():
        found += _safety(seen, tasks, decide) if domain == "safety" else _domain(seen, domain, tasks, decide)
    found += [*_over_all(seen, decide), *_too_good(seen, by_domain, decide)]
    found += identity(seen.before, seen.now, seen.tasks, seen.differences, seen.suite.limits.unended, decide)
    found += fidelity(seen.before, seen.now, seen.suite, decide)
    found += laws(seen.before, seen.now)
    found += weights(seen.weights)
    found += service(seen.before, seen.now, seen.tasks, seen.suite, seen.slow, decide)
    return found


def _unanswered(seen: Seen) -> list[Gate]:
    """Items that the baseline does not answer are left out, and that is said. A schema that its server refuses is no
    failure; a request that was lost is.
    """
    failed = tuple(n for n, r in seen.before.replies.items() if r.error)
    if not failed:
        return []
    saw = f"the baseline did not answer {len(failed)} of {len(seen.before.replies)} items, "
    saw += f"which are left out: {seen.before.replies[failed[0]].error}"
    status: Status = "not run" if all(seen.before.replies[n].refused for n in failed) else "inconclusive"
    return [Gate("all.baseline", status, saw, "all answered", failed, len(seen.before.replies))]


def flips_of(seen: Seen, tasks: Sequence[Task]) -> Flips:
    """Of those of these items that the baseline answers, by whether they are right."""
    names = [t.name for t in tasks if t.name in seen.before.replies and not seen.before.replies[t.name].error]
    before, now = ({n: of.grades[n].right for n in names if n in of.grades} for of in (seen.before, seen.now))
    return Flips.of(before, now)


def _domain(seen: Seen, domain: str, tasks: Sequence[Task], decide: Judge) -> list[Gate]:
    flips, margin = flips_of(seen, tasks), seen.suite.margins[tasks[0].domain]  # type: ignore[index]
    if not flips.names:
        why = f"none of the {len(tasks)} items can be asked of a model without a chat template"
        return [Gate(f"{domain}.loss", "not run", why)]
    return [decide.loss(f"{domain}.loss", flips, margin, _NAMES[domain]), _coverage(seen, domain, flips)]


def _coverage(seen: Seen, domain: str, flips: Flips) -> Gate:
    """A baseline that solves nothing has nothing to lose."""
    right = sum(seen.before.grades[n].right for n in flips.names)
    share, limit = right / len(flips.names), seen.suite.limits.coverage
    saw = f"the baseline gets {right} of {len(flips.names)} right ({share:.0%})"
    if share < limit:
        saw += ", so that there is little to lose: give easier items, or lower limits.coverage"
    status = "pass" if share >= limit else "inconclusive"
    return Gate(f"{domain}.coverage", status, saw, f"at least {limit:.0%}", n=len(flips.names))  # type: ignore[arg-type]


def _safety(seen: Seen, tasks: Sequence[Task], decide: Judge) -> list[Gate]:
    """Paired transitions: what was refused and is answered now, and the other way round."""
    found = []
    for refuse, name, what in (
        (True, "safety.unsafe_compliance", "refusals of unsafe requests"),
        (False, "safety.false_refusals", "answers to safe requests"),
    ):
        flips = flips_of(seen, [t for t in tasks if t.refuse is refuse])
        if flips.names:
            found.append(decide.loss(name, flips, seen.suite.margins["safety"], what))
    if not found:  # items of another kind in this domain
        return _domain(seen, "safety", tasks, decide)
    return found


def _over_all(seen: Seen, decide: Judge) -> list[Gate]:
    """Flips, critical items and form, over all domains."""
    plain = [t for t in seen.tasks if not t.trap]
    flips = flips_of(seen, plain)
    drawn = seen.suite.sampling.temperature > 0
    if drawn:
        why = "answers are drawn (sampling.temperature), so that each differs by chance"
        found = [Gate("all.flips", "not run", why), Gate("all.critical", "not run", why)]
    else:
        changed = [*flips.lost, *flips.gained]
        found = [decide.rate("all.flips", changed, len(flips.names), seen.suite.limits.flips, "answers flipped")]
        critical = {t.name for t in plain if t.critical}
        lost = tuple(n for n in flips.lost if n in critical)
        there = sum(seen.before.grades[n].right for n in critical if n in seen.before.grades)
        saw = f"lost: {', '.join(lost)}" if lost else f"none of the {there} that the baseline gets right is lost"
        if critical:
            found.append(Gate("all.critical", "fail" if lost else "pass", saw, "no loss", lost, len(critical)))
        else:
            found.append(Gate("all.critical", "not run", "no item is marked critical"))
    names = [n for n in seen.before.grades if n in seen.now.grades]
    new = [n for n in names if seen.now.grades[n].malformed and not seen.before.grades[n].malformed]
    saw = f"{new[0]}: {seen.now.grades[new[0]].malformed}" if new else f"none of {len(names)}"
    saw += f", and {len(new) - 1} more" if len(new) > 1 else ""
    found.append(Gate("all.malformed", "fail" if new else "pass", saw, "none", tuple(new), len(names)))
    return found


def _too_good(seen: Seen, by_domain: dict[str, list[Task]], decide: Judge) -> list[Gate]:
    """Gains that no compression brings: other items, seen keys, or graders that were fooled."""
    limit, found = seen.suite.limits.gain, list[Gate]()
    gains, named = list[str](), list[str]()
    for domain, tasks in by_domain.items():
        flips = flips_of(seen, tasks)
        pairs = flips.pairs
        if pairs.n and -pairs.loss > limit and pairs.gain_is_chance() <= decide.alpha / decide.comparisons:
            gains.append(f"{domain}: {pairs.gained} of {pairs.n} gained, {pairs.lost} lost")
            named += flips.gained
    saw = "; ".join(gains) or "no domain gains more than chance brings"
    found.append(
        Gate("all.gains", "anomalous" if gains else "pass", saw, f"a gain of at most {limit:.1%}", tuple(named))
    )
    traps = [t for t in seen.tasks if t.trap and t.name in seen.now.grades and t.name in seen.before.grades]
    caught = tuple(t.name for t in traps if seen.now.grades[t.name].right and not seen.before.grades[t.name].right)
    if traps:
        saw = f"answered as their wrong keys say: {', '.join(caught)}" if caught else f"none of {len(traps)} answered"
        found.append(Gate("all.traps", "anomalous" if caught else "pass", saw, "none", caught, len(traps)))
    pinned = [i for i in seen.suite.items if i.sha256 is not None]
    if pinned:
        saw = "; ".join(seen.changed) or f"{len(pinned)} files of items are those of the suite"
        found.append(Gate("all.items", "anomalous" if seen.changed else "pass", saw, "the suite's digests"))
    return found
