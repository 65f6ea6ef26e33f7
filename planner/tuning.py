"""The verb ``tune``: search the learning-rate multiplier around the rule's value, then believe only fresh seeds."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gradplan import script as script_files
from gradplan.files import find_model, is_same_file
from gradplan.planfile import Plan
from gradplan.probes.errors import UsageError
from gradplan.probes.evidence import Notice, TuningTrial
from gradplan.verdict import FEWEST_PAIRS, Tuning, best_multiplier, is_too_fine, judge

if TYPE_CHECKING:
    from gradplan.probes.tuning.ledger import Ledger
    from gradplan.probes.tuning.messages import Run

DEFAULT_TRIALS = 10
DEFAULT_HORIZON = 0.25
DEFAULT_STUDY = "gradplan"
FEWEST_STEPS = 20  # a shorter run is mostly warm-up
HELD_OUT = 0.1  # of the dataset, where the file has no validation set
STEPS_WITHOUT_DATASET = 100  # train.py's own default
SAFE_HORIZON = 0.25
_folders: set[str] = set()  # of scripts that are being run


@dataclass(frozen=True)
class Length:
    """How long each run is, of how long a training; ``held_out`` is the share of the dataset that is kept apart."""

    num_steps: int
    num_real_steps: int
    epochs: int | None
    held_out: float | None
    objective: str


def tune(
    plan: Plan,
    *,
    plan_path: str | Path = "gradplan.json",
    num_trials: int = DEFAULT_TRIALS,
    horizon: float = DEFAULT_HORIZON,
    epochs: int | None = None,
    max_steps: int | None = None,
    device: str | None = None,
    storage: str | None = None,
    study: str = DEFAULT_STUDY,
    num_workers: int = 1,
    num_seeds: int = FEWEST_PAIRS,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> Plan:
    """``plan`` with a multiplier for its learning rate, if fresh seeds say that it is better than 1.

    Every trial is a complete run of train.py, shorter than the real one, from the same initial weights and with the
    same samples in the same order. The study is kept in ``storage`` and goes on where it stopped.

    Args:
        plan_path: where the plan is; the study's default place is beside it.
        num_trials: trials of the search in all, over everybody who shares the study. 1, 1/2 and 2 come first.
        horizon: length of a run as a share of the real training's.
        epochs, max_steps: length of the real training, as train.py's options; one epoch, or 100 steps without a
            dataset.
        device: as train.py's option; None is its own choice.
        storage: the URL of a database, or the path of a journal file, as Optuna has them; None is a journal beside
            the plan.
        study: its name.
        num_workers: runs at a time on this machine.
        num_seeds: pairs of runs, with the best multiplier and with 1, that the verdict is from.
        seed: of the search and of its runs; the pairs have seeds after it.
        progress: told in a few words how far it is.

    Raises:
        UserCodeError: no run comes to its end.
        UsageError: the learning rate is unknown, a count or a share cannot be, the study is of another plan, or the
            storage cannot be opened.
    """
    _check(plan, num_trials, horizon, num_workers, num_seeds)
    length = length_of(plan, horizon, epochs, max_steps)
    if storage is not None and is_same_file(storage, plan_path):
        raise UsageError(f"--storage {storage} is the plan's own file")
    where = storage or f"{Path(plan_path).with_suffix('')}.study.log"
    progress("importing optuna")
    from gradplan.probes.tuning.ledger import Ledger, open_storage, without_password
    from gradplan.probes.tuning.messages import Run, Script
    from gradplan.probes.tuning.search import Runners, run_pairs, search_multiplier

    model = find_model(plan, plan_path)
    opened = open_storage(where)
    identity = identity_of(plan, model, length, seed)
    ledger = Ledger(opened, study, identity)

    def make_run(multiplier: float, run_seed: int = seed) -> Run:
        return Run(
            multiplier=multiplier,
            seed=run_seed,
            num_steps=length.num_steps,
            epochs=length.epochs,
            validation_share=length.held_out,
        )

    with script_of(plan, model) as script_path:
        script = Script(
            script=str(script_path), model_folder=str(model.resolve().parent), parent_pid=os.getpid(), device=device
        )
        with Runners(script, os.getcwd(), num_workers) as runners:
            heard = _Progress("trial", num_trials, len(ledger.done()), progress)
            trials = search_multiplier(ledger, runners, make_run, num_trials, seed, heard)
            best = best_multiplier(trials)
            seeds = range(seed + 1, seed + 1 + num_seeds)
            has_run = any(trial.multiplier == 1 and trial.value is not None for trial in trials)
            is_settled = best == 1 or (has_run and is_too_fine(best, length.num_steps, length.num_real_steps))
            pairs = [] if is_settled else [{"multiplier": one, "seed": s} for s in seeds for one in (1.0, best)]
            checks_ledger = Ledger(opened, f"{study}-checks-{best:.6g}", identity) if pairs else ledger
            checks: tuple[TuningTrial, ...] = ()
            if pairs:
                heard = _Progress("check", len(pairs), len(checks_ledger.done()), progress)
                checks = run_pairs(checks_ledger, runners, make_run, pairs, heard)
            failures = [*ledger.failures(), *(checks_ledger.failures() if pairs else ())]
    found = Tuning(
        study=study,
        storage=without_password(where),
        objective=length.objective,
        num_steps=length.num_steps,
        num_real_steps=length.num_real_steps,
        trials=trials,
        checks=checks,
        verdict=judge(best, checks),
    )
    return with_tuning(plan, found, length, failures)


def _check(plan: Plan, num_trials: int, horizon: float, num_workers: int, num_seeds: int) -> None:
    for name, count, least in (
        ("trials", num_trials, 1),
        ("workers", num_workers, 1),
        ("seeds", num_seeds, FEWEST_PAIRS),
    ):
        if count < least:
            raise UsageError(f"{count} {name} are too few: at least {least}")
    if not 0 < horizon <= 1:
        raise UsageError(f"the horizon is a share of the real training, above 0 and up to 1, not {horizon}")
    if plan.learning_rate is None and "configure_optimizers" not in plan.recipe.lightning:
        raise UsageError("the learning rate is unknown: set LEARNING_RATE or --base-lr, and plan again")


def length_of(plan: Plan, horizon: float, epochs: int | None, max_steps: int | None) -> Length:
    """How long the runs are, and what they are compared by."""
    recipe = plan.recipe
    has_dataset = "build_dataset" in recipe.names and not recipe.is_stream
    if not has_dataset:
        if epochs is not None:
            raise UsageError("--epochs needs a dataset with a length; give --max-steps")
        real = max_steps or STEPS_WITHOUT_DATASET
        objective = "mean training loss of the last tenth, on samples not seen before,"
        return Length(_share_of(real, horizon), real, None, None, objective)
    held_out = None if "build_validation_dataset" in recipe.names else HELD_OUT
    num_samples = recipe.dataset_length or plan.effective_batch_size
    num_samples -= math.ceil(num_samples * (held_out or 0))
    per_epoch = max(1, math.ceil(num_samples / plan.effective_batch_size))
    real = (epochs or 1) * per_epoch
    real = real if max_steps is None else min(real, max_steps)
    num_steps = _share_of(real, horizon)
    return Length(num_steps, real, math.ceil(num_steps / per_epoch), held_out, "validation loss")


def _share_of(num_real_steps: int, horizon: float) -> int:
    return min(num_real_steps, max(FEWEST_STEPS, math.ceil(num_real_steps * horizon)))


def identity_of(plan: Plan, model: Path, length: Length, seed: int) -> dict[str, str]:
    """What a study is a study of: another of these, and its values mean something else."""
    keys = (
        "num_parameters",
        "optimizer",
        "precision",
        "effective_batch_size",
        "base_learning_rate",
        "learning_rate_factor",
    )
    return {
        "model": hashlib.sha256(model.read_bytes()).hexdigest()[:16],
        "builder": plan.recipe.builder,
        **{key: str(getattr(plan, key)) for key in keys},
        "steps": str(length.num_steps),
        "objective": length.objective,
        "seed": str(seed),
        "space": "multiplier, log-uniform",
    }


@contextlib.contextmanager
def script_of(plan: Plan, model: Path) -> Iterator[Path]:
    """The plan's train.py in a folder of its own, with a multiplier in it that each run sets."""
    placeholder = plan.model_copy(update={"learning_rate_multiplier": 2.0})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.py")
        path.write_text(script_files.render(placeholder, path, model.resolve()), encoding="utf-8")
        _folders.add(folder)
        yield path
        _folders.discard(folder)


def remove_folders() -> None:
    """Before this process ends at once."""
    for folder in _folders:
        shutil.rmtree(folder, ignore_errors=True)


def with_tuning(plan: Plan, found: Tuning, length: Length, failures: Sequence[str] = ()) -> Plan:
    """The plan with what was found, and its learning rate."""
    multiplier = found.verdict.multiplier if found.verdict.is_adopted else 1.0
    base, factor = plan.base_learning_rate, plan.learning_rate_factor
    notices = [warning for warning in plan.warnings if not warning.code.startswith(("tuned-", "tuning-"))]
    if length.held_out:
        message = f"tuning compared its runs on {length.held_out:.0%} of the dataset, drawn by the seed and held out"
        notices.append(Notice(code="tuning-held-out", message=message))
    if found.num_steps < SAFE_HORIZON * found.num_real_steps:
        message = (
            f"runs of {found.num_steps} of {found.num_real_steps} steps favour learning rates that are too low: from a "
            "quarter of the real training on, the right one was seen to win"
        )
        notices.append(Notice(code="tuning-short", message=message))
    if found.verdict.is_adopted:
        message = (
            f"the multiplier was found for a training of {found.num_real_steps} steps: a much longer one may like a "
            "lower rate, so tune again with its --epochs or --max-steps"
        )
        notices.append(Notice(code="tuning-length", message=message))
    if failures:
        message = (
            f"{len(failures)} runs failed and are not in the comparison; the same command tries again. The last: "
            f"{failures[-1]}"
        )
        notices.append(Notice(code="tuning-failed", message=message))
    return plan.model_copy(
        update={
            "learning_rate_multiplier": multiplier,
            "learning_rate": None if base is None else base * factor * multiplier,
            "tuning": found,
            "warnings": tuple(notices),
        }
    )


class _Progress:
    """Says how many are done, the best so far, and how long the rest will take."""

    def __init__(self, what: str, num_wanted: int, num_done: int, say: Callable[[str], None]) -> None:
        self._what, self._num_wanted, self._num_before, self._say = what, num_wanted, num_done, say
        self._begun_seconds = time.monotonic()
        say(f"{what} {num_done} of {num_wanted} done" if num_done else f"{what} 1 of {num_wanted}")

    def __call__(self, ledger: Ledger) -> None:
        from gradplan.probes.tuning.search import as_trial

        done = ledger.done()
        here = max(1, len(done) - self._num_before)
        left_seconds = (time.monotonic() - self._begun_seconds) / here * max(0, self._num_wanted - len(done))
        best = best_multiplier(map(as_trial, done)) if self._what == "trial" else None
        so_far = "" if best is None else f", best so far {best:.3g}"
        self._say(f"{self._what} {len(done)} of {self._num_wanted} done{so_far}, {_in_words(left_seconds)} left")


def _in_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
