"""One Optuna study, shared by all processes that use its storage: who runs what, and what became of it.

A trial whose process died is failed and its parameters are tried again; failed trials never count as done.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
import psutil
from optuna.samplers import TPESampler
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from gradplan.probes.errors import UsageError

IDENTITY = "gradplan"  # the study's attribute that says what it is a study of
OWNER, ALIVE, PLANNED = "owner", "alive", "planned"  # attributes of a trial
SILENT_SECONDS = 600.0  # a process on another machine that has not been heard of for so long is dead
LOCK_SECONDS = 60.0  # how long SQLite waits for others
NUM_ATTEMPTS = 8  # to make the tables, while others make them too


def open_storage(where: str) -> BaseStorage:
    """Any storage of Optuna's: the URL of a database, or the path of a journal file.

    Raises:
        UsageError: it cannot be opened.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        if "://" not in where:
            return JournalStorage(JournalFileBackend(where))
        timeout = {"timeout": LOCK_SECONDS} if where.startswith("sqlite") else {}
        return _patiently(lambda: RDBStorage(where, engine_kwargs={"connect_args": timeout, "pool_pre_ping": True}))
    except ModuleNotFoundError as error:
        raise UsageError(f"--storage {where} needs the package {error.name}: pip install {error.name}") from None
    except Exception as error:  # SQLAlchemy's and the drivers' own kinds
        reason = str(error).splitlines()[0]
        raise UsageError(f"cannot open the storage {where}: {reason}") from None


def _patiently(make: Callable[[], RDBStorage]) -> RDBStorage:
    """Several processes that start together may all try to make the tables."""
    for attempt in range(NUM_ATTEMPTS - 1):
        try:
            return make()
        except Exception as error:
            if not any(word in str(error) for word in ("already exists", "locked", "duplicate key", "UNIQUE")):
                raise
            time.sleep(random.uniform(0.1, 0.5) * (attempt + 1))
    return make()


class Ledger:
    """The study ``name``. ``identity`` is what it must be a study of.

    Raises:
        UsageError: it is there, and is a study of something else; the message says what differs.
    """

    def __init__(self, storage: BaseStorage, name: str, identity: Mapping[str, str]) -> None:
        self.study = optuna.create_study(
            storage=storage, study_name=name, sampler=TPESampler(seed=0), direction="minimize", load_if_exists=True
        )
        known = self.study.user_attrs.get(IDENTITY)
        if known is None and self.study.get_trials(deepcopy=False):
            raise UsageError(f"the study '{name}' is not gradplan's; give another name with --study")
        if known is None:
            self.study.set_user_attr(IDENTITY, dict(identity))
        elif known != dict(identity):
            keys = [key for key in identity if known.get(key) != identity[key]]
            differs = "; ".join(f"{key}: {known.get(key)} there, {identity[key]} here" for key in keys)
            raise UsageError(f"the study '{name}' is of another plan ({differs}); begin one with --study NAME")

    def done(self) -> list[FrozenTrial]:
        """Trials with a value, in the order of their numbers."""
        return self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))

    def is_anything_left(self) -> bool:
        """Whether a planned trial waits or runs, here or elsewhere."""
        return bool(self.study.get_trials(deepcopy=False, states=(TrialState.WAITING, TrialState.RUNNING)))

    def plan(self, wanted: Sequence[Mapping[str, Any]]) -> None:
        """These parameters are to be tried, unless they are or were; a trial that failed is not one."""
        states = (TrialState.COMPLETE, TrialState.RUNNING, TrialState.WAITING)
        known = [trial.user_attrs.get(PLANNED) for trial in self.study.get_trials(deepcopy=False, states=states)]
        for params in map(dict, wanted):
            if params not in known:
                self._enqueue(params)

    def _enqueue(self, params: dict[str, Any]) -> None:
        self.study.enqueue_trial(params, user_attrs={PLANNED: params})

    def take(self, num_wanted: int, sampler_seed: int, is_planned_only: bool = False) -> Trial | None:
        """A trial for this process, where fewer than ``num_wanted`` are done or being done; else None.

        With ``is_planned_only``, only one of those that were planned. Two processes may ask at the same moment: the
        later trial is given back.
        """
        trials = self.study.get_trials(deepcopy=False)
        live = [trial for trial in trials if trial.state in (TrialState.COMPLETE, TrialState.RUNNING)]
        if len(live) >= num_wanted:
            return None
        if is_planned_only and not any(trial.state == TrialState.WAITING for trial in trials):
            return None
        # Seeded by how many there are, so that a study that goes on does not begin again with the same numbers.
        self.study.sampler = TPESampler(seed=sampler_seed + len(trials), n_startup_trials=3, constant_liar=True)
        trial = self.study.ask()
        trial.set_user_attr(OWNER, _this_process())
        trial.set_user_attr(ALIVE, time.time())
        planned = trial.user_attrs.get(PLANNED)
        if (is_planned_only and planned is None) or self._is_one_too_many(trial, planned, num_wanted):
            self.fail(trial, "one more than was asked for")
            return None
        return trial

    def _is_one_too_many(self, trial: Trial, planned: Mapping[str, Any] | None, num_wanted: int) -> bool:
        states = (TrialState.COMPLETE, TrialState.RUNNING)
        earlier = [t for t in self.study.get_trials(deepcopy=False, states=states) if t.number < trial.number]
        is_twin = planned is not None and any(t.user_attrs.get(PLANNED) == planned for t in earlier)
        return is_twin or len(earlier) >= num_wanted

    def finish(self, trial: Trial, value: float) -> None:
        self.study.tell(trial, value)

    def fail(self, trial: Trial, why: str) -> None:
        trial.set_user_attr("why", why)
        self.study.tell(trial, state=TrialState.FAIL)

    def keep_alive(self, trial: Trial) -> None:
        """Tell the others that this process is still at it."""
        trial.set_user_attr(ALIVE, time.time())

    def revive(self) -> None:
        """What a process left behind that is no more is failed, and planned again."""
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if not _is_dead(trial):
                continue
            with contextlib.suppress(ValueError, RuntimeError):  # somebody else was quicker
                self.study.tell(trial.number, state=TrialState.FAIL)
                if params := {**trial.user_attrs.get(PLANNED, {}), **trial.params}:
                    self._enqueue(params)


def _this_process() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}


def _is_dead(trial: FrozenTrial) -> bool:
    owner, heard = trial.user_attrs.get(OWNER), trial.user_attrs.get(ALIVE)
    if owner is None or heard is None:  # it has just begun, or somebody died at that very moment
        begun = trial.datetime_start
        return begun is None or time.time() - begun.timestamp() > SILENT_SECONDS
    if owner["host"] != socket.gethostname():
        return bool(time.time() - heard > SILENT_SECONDS)
    try:
        return bool(abs(psutil.Process(owner["pid"]).create_time() - owner["started"]) > 1)
    except psutil.NoSuchProcess:
        return True
