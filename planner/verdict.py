"""What tuning found, and whether it is worth anything: paired runs on fresh seeds decide. Pure, without torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from pydantic import Field

from gradplan.probes.evidence import Frozen, TuningTrial

FEWEST_PAIRS = 5
# The best rate of a shorter run is not quite that of the whole: at a tenth of it, it was half of the right one, at a
# quarter from the right one (docs/tuning.md) to 1.7 times it. Nearer to 1 than this, a finding says nothing.
FINEST = ((1.0, 1.0), (0.25, 2.0), (0.0, 4.0))  # (share of the real training, factor)
# The two-sided 95 % quantile of Student's t for 1, 2, ... degrees of freedom (NIST/SEMATECH e-Handbook, 1.3.6.7.2).
T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


class Verdict(Frozen):
    """``multiplier`` beside 1, on seeds that the search did not see.

    ``gain`` is by how much the loss is lower with it, a mean over ``num_pairs`` seeds, and ``low`` to ``high`` its 95 %
    interval; None where too many runs diverged to say. ``num_diverged`` are those of its runs and of those with 1.
    """

    multiplier: float = Field(gt=0)
    num_pairs: int = Field(ge=0)
    gain: float | None = None
    low: float | None = None
    high: float | None = None
    num_diverged: tuple[int, int] = (0, 0)
    is_adopted: bool


class Tuning(Frozen):
    """A search for the learning-rate multiplier, and what came of it.

    Every run took ``num_steps`` optimizer steps, of the ``num_real_steps`` that training is to take, with a complete
    schedule of its own. ``objective`` says which loss was compared. ``checks`` are the runs behind the verdict.
    """

    study: str
    storage: str
    objective: str
    num_steps: int = Field(ge=1)
    num_real_steps: int = Field(ge=1)
    trials: tuple[TuningTrial, ...]
    checks: tuple[TuningTrial, ...]
    verdict: Verdict


def best_multiplier(trials: Iterable[TuningTrial]) -> float:
    """Of the runs that came to an end, that with the lowest loss, to three digits; 1 where there is none."""
    values = [(trial.value, trial.multiplier) for trial in trials if trial.value is not None]
    return min(64.0, max(1 / 64, float(f"{min(values)[1]:.3g}"))) if values else 1.0


def is_too_fine(multiplier: float, num_steps: int, num_real_steps: int) -> bool:
    """Whether it is nearer to 1 than runs of that length can tell."""
    factor = next(factor for share, factor in FINEST if num_steps >= share * num_real_steps)
    return 1 / factor < multiplier < factor or multiplier == 1


def judge(multiplier: float, checks: Iterable[TuningTrial]) -> Verdict:
    """Whether ``multiplier`` is better than 1.

    Adopted where the 95 % interval of the paired differences is above 0 (Student's t, at least 5 seeds), or where
    runs diverge with 1, and only with 1, on at least half of the seeds.
    """
    by_seed: dict[int | None, dict[float, float | None]] = {}
    for check in checks:
        by_seed.setdefault(check.seed, {})[check.multiplier] = check.value
    pairs = [(found[1.0], found[multiplier]) for found in by_seed.values() if {1.0, multiplier} <= found.keys()]
    if multiplier == 1 or not pairs:
        return Verdict(multiplier=multiplier, num_pairs=0, is_adopted=False)
    num_diverged = (sum(tuned is None for _, tuned in pairs), sum(rule is None for rule, _ in pairs))
    gains = [rule - tuned for rule, tuned in pairs if rule is not None and tuned is not None]
    found = Verdict(multiplier=multiplier, num_pairs=len(pairs), num_diverged=num_diverged, is_adopted=False)
    if any(num_diverged):
        is_rescue = num_diverged[0] == 0 and 2 * num_diverged[1] >= len(pairs) >= FEWEST_PAIRS
        return found.model_copy(update={"is_adopted": is_rescue})
    gain = statistics.fmean(gains)
    if len(gains) < FEWEST_PAIRS:
        return found.model_copy(update={"gain": gain})
    if len(set(pairs)) == 1:  # the seed changes nothing, so that all of them are one
        return found.model_copy(update={"gain": gain, "low": gain, "high": gain})
    half = T_95[min(len(gains) - 1, len(T_95)) - 1] * statistics.stdev(gains) / math.sqrt(len(gains))
    interval = {"gain": gain, "low": gain - half, "high": gain + half}
    return found.model_copy(update={**interval, "is_adopted": gain - half > 0})


def sentence(tuning: Tuning) -> str:
    """The verdict in words; the search's own best value is no part of it."""
    verdict = tuning.verdict
    runs = f"{verdict.num_pairs} fresh seeds, runs of {tuning.num_steps} of {tuning.num_real_steps} steps"
    if tuning.trials and all(trial.value is None for trial in tuning.trials):
        return "no evidence against the rule: every run diverged, so lower the base rate and plan again"
    if verdict.multiplier == 1:
        return "no evidence against the rule: no other multiplier did better in the search"
    if verdict.num_pairs == 0 and is_too_fine(verdict.multiplier, tuning.num_steps, tuning.num_real_steps):
        steps = f"{tuning.num_steps} of {tuning.num_real_steps} steps"
        return f"no evidence against the rule: the best, {verdict.multiplier:.3g}, is too near to 1 for runs of {steps}"
    times = f"{verdict.multiplier:.3g} times the rate"
    if any(verdict.num_diverged):
        tuned, rule = verdict.num_diverged
        what = f"with {times}, {tuned} of {verdict.num_pairs} runs diverged, and {rule} with the rate as planned"
    elif verdict.gain is None or verdict.low is None or verdict.high is None:
        what = f"{times} could not be compared on {FEWEST_PAIRS} seeds"
    elif verdict.low == verdict.high:
        what = f"{times} could not be judged: every seed gives the same run"
    else:
        by = f"by {verdict.gain:.3g} (95 % interval {verdict.low:.3g} to {verdict.high:.3g})"
        what = f"{times} lowers the {tuning.objective} {by}"
    return f"{what}; {runs}" if verdict.is_adopted else f"no evidence against the rule: {what}; {runs}"
