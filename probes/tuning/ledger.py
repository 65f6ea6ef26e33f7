"""One Optuna study, shared by all processes that use its storage: who runs what, and what became of it.

A trial whose process died is failed and its parameters are tried again; failed trials never count as done.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
import psutil
from optuna.exceptions import StorageInternalError
from optuna.samplers import TPESampler
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from gradplan.probes.errors import UsageError

IDENTITY = "gradplan"  # the study's attribute that says what it is a study of
OWNER, ALIVE, PLANNED, WHY = "owner", "alive", "planned", "why"  # attributes of a trial
LIVE = (TrialState.COMPLETE, TrialState.RUNNING)
GIVEN_UP = (ValueError, RuntimeError)  # Optuna's answers where another process has ended a trial
DRIVERS = {
    "postgresql": "psycopg2-binary, for postgresql+psycopg2://...",
    "mysql": "pymysql, for mysql+pymysql://...",
}
SILENT_SECONDS = 600.0  # a process on another machine that has not been heard of for so long is dead
NAMELESS_SECONDS = 30.0  # a trial that nobody has put a name to for so long is nobody's
CLOCK_SECONDS = 10.0  # two processes may see a third begin at so different times, where the clock was set
LOCK_SECONDS = 60.0  # how long SQLite waits for others
NUM_ATTEMPTS = 8  # to make the tables, while others make them too


def open_storage(where: str) -> BaseStorage:
    """Any storage of Optuna's: the URL of a database, or the path of a journal file.

    Raises:
        UsageError: it cannot be opened.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    shown = without_password(where)
    try:
        if "://" not in where:
            _check_journal(where)
            return JournalStorage(JournalFileBackend(where))
        timeout = {"timeout": LOCK_SECONDS} if where.startswith("sqlite") else {}
        return _patiently(lambda: RDBStorage(where, engine_kwargs={"connect_args": timeout, "pool_pre_ping": True}))
    except ImportError:
        dialect, _, driver = where.partition("://")[0].partition("+")
        known = DRIVERS.get(dialect, dialect) if not driver else f"{driver} (or {DRIVERS.get(dialect, dialect)})"
        raise UsageError(f"--storage {shown} needs a driver that is not installed: pip install {known}") from None
    except UsageError:
        raise
    except Exception as error:  # SQLAlchemy's and the drivers' own kinds
        reason = str(error).splitlines()[0]
        raise UsageError(f"cannot open the storage {shown}: {reason}") from None


def without_password(where: str) -> str:
    """As it may be shown and kept."""
    return re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", where)


def _check_journal(path: str) -> None:
    """A journal's lines are JSON: another file would be written to."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        lines = file.read().splitlines(keepends=True)
        try:
            is_journal = all("op_code" in json.loads(line) for line in lines[:1])
        except (ValueError, TypeError):
            is_journal = False
        if not is_journal:
            raise UsageError(f"{path} is there already, and is no journal of Optuna's; give another --storage")
        if lines and not lines[-1].endswith(b"\n"):
            raise UsageError(f"{path} ends in the middle of a line: delete that line, and the study goes on")


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
        try:
            self.study = optuna.create_study(
                storage=storage, study_name=name, sampler=TPESampler(seed=0), direction="minimize", load_if_exists=True
            )
            trials = self.study.get_trials(deepcopy=False)  # before its attribute, which comes before them
            known = self.study.user_attrs.get(IDENTITY)
            if known is None and not trials:
                known = dict(identity)
                self.study.set_user_attr(IDENTITY, known)
        except (OSError, StorageInternalError, ValueError, KeyError, AssertionError) as error:
            raise UsageError(f"the study's storage cannot be used, or is damaged: {error}") from None
        if known is None:
            raise UsageError(f"the study '{name}' is not gradplan's; give another name with --study")
        if known != dict(identity):
            keys = [key for key in identity if known.get(key) != identity[key]]
            differs = "; ".join(f"{key}: {known.get(key)} there, {identity[key]} here" for key in keys)
            raise UsageError(
                f"the study '{name}' is of another plan ({differs}); the options that it was begun with go on with it, "
                "and --study NAME begins another"
            )

    def done(self) -> list[FrozenTrial]:
        """Trials with a value, in the order of their numbers."""
        return self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))

    def are_settled(self, wanted: Sequence[Mapping[str, Any]]) -> bool:
        """Whether each of these has a value, or has failed and neither waits nor runs again."""
        states: dict[str, set[TrialState]] = {}
        for trial in self.study.get_trials(deepcopy=False):
            states.setdefault(_key(trial.user_attrs.get(PLANNED)), set()).add(trial.state)
        found = [states.get(_key(params), set()) for params in wanted]
        return all(TrialState.COMPLETE in each or not each & {TrialState.WAITING, TrialState.RUNNING} for each in found)

    def plan(self, wanted: Sequence[Mapping[str, Any]]) -> None:
        """These parameters are to be tried, unless they are or were; a trial that failed is not one."""
        states = (TrialState.COMPLETE, TrialState.RUNNING, TrialState.WAITING)
        known = [trial.user_attrs.get(PLANNED) for trial in self.study.get_trials(deepcopy=False, states=states)]
        for params in map(dict, wanted):
            if params not in known:
                self._enqueue(params)

    def _enqueue(self, params: dict[str, Any]) -> None:
        self.study.enqueue_trial(params, user_attrs={PLANNED: params})

    def failures(self) -> list[str]:
        """Why runs failed, where they did by themselves."""
        failed = self.study.get_trials(deepcopy=False, states=(TrialState.FAIL,))
        return [trial.user_attrs[WHY] for trial in failed if WHY in trial.user_attrs]

    def take(self, num_wanted: int, sampler_seed: int) -> Trial | None:
        """A trial for this process, where fewer than ``num_wanted`` are done or being done; else None.

        Two processes may ask at the same moment: the later trial is given back.
        """
        trials = self.study.get_trials(deepcopy=False)
        if sum(trial.state in LIVE for trial in trials) >= num_wanted:
            return None
        # Seeded by how many there are, so that a study that goes on does not begin again with the same numbers; and
        # beside others, who may ask at the same count, by who asks.
        asks_alone = not any(trial.state == TrialState.RUNNING for trial in trials)
        seed = sampler_seed + len(trials) + (0 if asks_alone else os.getpid())
        self.study.sampler = TPESampler(seed=seed, n_startup_trials=3, constant_liar=True)
        trial = self._ask()
        earlier = self._earlier_than(trial)
        if len(earlier) >= num_wanted or _is_twin(trial, earlier):
            self.fail(trial)  # one more than was asked for
            return None
        return trial

    def take_planned(self, wanted: Sequence[Mapping[str, Any]]) -> Trial | None:
        """One of the planned trials for this process, where one of ``wanted`` waits; else None."""
        if not self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            return None
        trial = self._ask()
        is_wanted = _key(trial.user_attrs.get(PLANNED)) in map(_key, wanted)
        if not is_wanted or _is_twin(trial, self._earlier_than(trial)):
            self.fail(trial)
            return None
        return trial

    def _ask(self) -> Trial:
        trial = self.study.ask()
        trial.set_user_attr(OWNER, _this_process())
        trial.set_user_attr(ALIVE, time.time())
        return trial

    def _earlier_than(self, trial: Trial) -> list[FrozenTrial]:
        return [one for one in self.study.get_trials(deepcopy=False, states=LIVE) if one.number < trial.number]

    def finish(self, trial: Trial, value: float) -> None:
        """Write down its value; where others have given it up meanwhile, they have planned it again."""
        with contextlib.suppress(*GIVEN_UP):
            self.study.tell(trial, value)

    def fail(self, trial: Trial, why: str | None = None) -> None:
        """Write down that it has no value, and why where that is the run's own fault."""
        with contextlib.suppress(*GIVEN_UP):
            if why is not None:
                trial.set_user_attr(WHY, why)
            self.study.tell(trial, state=TrialState.FAIL)

    def keep_alive(self, trial: Trial) -> None:
        """Tell the others that this process is still at it."""
        with contextlib.suppress(*GIVEN_UP):
            trial.set_user_attr(ALIVE, time.time())

    def revive(self) -> None:
        """What a process left behind that is no more is failed, and planned again."""
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if not _is_dead(trial):
                continue
            with contextlib.suppress(*GIVEN_UP):  # somebody else was quicker
                self.study.tell(trial.number, state=TrialState.FAIL)
                if params := {**trial.user_attrs.get(PLANNED, {}), **trial.params}:
                    self._enqueue(params)


def _key(params: Mapping[str, Any] | None) -> str:
    return repr(sorted((params or {}).items()))


def _is_twin(trial: Trial, others: Sequence[FrozenTrial]) -> bool:
    """Whether somebody else has planned and taken the same."""
    planned = trial.user_attrs.get(PLANNED)
    return planned is not None and any(other.user_attrs.get(PLANNED) == planned for other in others)


def _this_process() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}


def _is_dead(trial: FrozenTrial) -> bool:
    owner, heard = trial.user_attrs.get(OWNER), trial.user_attrs.get(ALIVE)
    if owner is None or heard is None:  # it has just begun, or somebody died at that very moment
        begun = trial.datetime_start
        return begun is not None and time.time() - begun.timestamp() > NAMELESS_SECONDS
    if owner["host"] != socket.gethostname():
        return bool(time.time() - heard > SILENT_SECONDS)
    try:
        return bool(abs(psutil.Process(owner["pid"]).create_time() - owner["started"]) > CLOCK_SECONDS)
    except psutil.NoSuchProcess:
        return True
