"""Gates on time, memory, cost, and on whether the candidate runs well on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from qbe.regress.gate import Gate, Judge
from qbe.regress.observe import Observed
from qbe.regress.statistics import per_success_bounds, ratio_bounds
from qbe.regress.suite import Suite
from qbe.regress.task import Task

_FEWEST = 6  # answers whose times are compared
_FEWEST_RIGHT = 10  # of which the cost of one is said


def service(
    before: Observed, now: Observed, tasks: Sequence[Task], suite: Suite, slow: str, decide: Judge
) -> list[Gate]:  # fmt: skip
    """All of them."""
    return [*_times(before, now, suite, decide), _memory(before, now, suite.limits.memory),
            _cost(before, now, tasks, suite, decide), *_runtime(before, now, suite, slow)]  # fmt: skip


def _times(before: Observed, now: Observed, suite: Suite, decide: Judge) -> list[Gate]:
    """Of the same answers, with as many under way: seconds to the first token, and between tokens."""
    found = []
    both = [(r, now.replies[n]) for n, r in before.replies.items() if n in now.replies]
    both = [(a, b) for a, b in both if not a.error and not b.error]
    for name, what, limit in (
        ("first_s", "first_token", suite.limits.first_token), ("per_token_s", "per_token", suite.limits.per_token),
    ):  # fmt: skip
        times = [(getattr(a, name), getattr(b, name)) for a, b in both]
        times = [(a, b) for a, b in times if a > 0 and b > 0]
        if len(times) < _FEWEST:
            found.append(
                Gate(f"latency.{what}", "not run", f"there are times of {len(times)} answers, fewer than {_FEWEST}")
            )
            continue
        over, under = [b for _, b in times], [a for a, _ in times]
        said = f"seconds over the baseline's ({_mean_ms(under)}, now {_mean_ms(over)})"
        bounds = partial(ratio_bounds, over, under)
        found.append(decide.ratio(f"latency.{what}", bounds, sum(over) / sum(under), limit, said, len(times)))
    return found


def _mean_ms(seconds: Sequence[float]) -> str:
    return f"{1e3 * sum(seconds) / len(seconds):.4g} ms"


def _memory(before: Observed, now: Observed, limit: float) -> Gate:
    if not before.memory or not now.memory:
        return Gate("latency.memory", "not run", "not both are served here")
    ratio = now.memory / before.memory
    saw = f"{now.memory / 1e6:.0f} MB, the baseline {before.memory / 1e6:.0f}: {ratio:.2f} times as much"
    return Gate("latency.memory", "pass" if ratio <= limit else "fail", saw, f"at most {limit:g} times")


def _cost(before: Observed, now: Observed, tasks: Sequence[Task], suite: Suite, decide: Judge) -> Gate:
    """Of a task that succeeds: cheap tokens that solve less may cost more."""
    names = [t.name for t in tasks if not t.trap and t.name in before.grades and t.name in now.grades]
    priced = all(of.replies[n].cost > 0 for of in (before, now) for n in names if not of.replies[n].error)
    unit = "cost" if names and priced else "work"
    told = [of.replies[n].bits is not None for of in (before, now) for n in names if not of.replies[n].error]
    what = "the price" if unit == "cost" else "tokens at 16 bits" if all(told) else "tokens"
    costs, costs_now = ([getattr(of.replies[n], unit) for n in names] for of in (before, now))
    right, right_now = ([of.grades[n].right for n in names] for of in (before, now))
    if min(sum(right), sum(right_now)) < _FEWEST_RIGHT:
        saw = f"{sum(right)} answers are right, now {sum(right_now)}: too few to say what one costs"
        return Gate("latency.cost", "not run", saw)
    if not sum(costs):
        return Gate("latency.cost", "not run", "the baseline's server counts no tokens")
    bounds = partial(per_success_bounds, costs, right, costs_now, right_now)
    cost, cost_now = sum(costs) / sum(right), sum(costs_now) / sum(right_now)
    said = f"{what} of a right answer over the baseline's ({cost:.4g}, now {cost_now:.4g})"
    return decide.ratio("latency.cost", bounds, cost_now / cost, suite.limits.cost, said, len(names))


def _runtime(before: Observed, now: Observed, suite: Suite, slow: str) -> list[Gate]:
    known = {n for n, r in before.replies.items() if r.error}  # what the baseline cannot answer, either
    failed = [n for n, r in now.replies.items() if r.error and n not in known]
    saw = f"{len(now.replies)} requests, {suite.together} at once, were answered"
    if failed:
        saw = f"{len(failed)} of {len(now.replies)} requests were not answered: {now.replies[failed[0]].error}"
    load = Gate("runtime.load", "fail" if failed else "pass", saw, "all answered", tuple(failed), len(now.replies))
    if now.started_s is None:
        return [load, Gate("runtime.kernels", "not run", "the candidate is served elsewhere")]
    saw = slow or f"the kernels of this machine; ready after {now.started_s:.1f} s"
    return [load, Gate("runtime.kernels", "fail" if slow else "pass", saw, "no slow path")]
