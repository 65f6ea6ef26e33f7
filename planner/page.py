"""A plan as an HTML page that stands alone: its settings, its trials, and what tuning found, in Optuna's own plots."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from gradplan import reasons, report, verdict
from gradplan.plan import Plan
from gradplan.probes.evidence import TuningTrial
from gradplan.units import format_bytes

NO_PLOTS = "Optuna draws its plots with plotly, which is not installed: pip install 'gradplan[plots]'"
_HEADER = re.compile(r"<!-- gradplan wrote what follows; its sha256 was ([0-9a-f]{64}) -->\n")


def render(plan: Plan) -> str:
    """The text of the page, sealed as a script is: the same plan always gives the same text."""
    text = _template().render(
        plan=plan,
        device=f"{plan.evidence.device.name}, {format_bytes(plan.evidence.device.total_bytes)}",
        settings=report.setting_rows(plan),
        trials=[_trial_row(trial) for trial in sorted(plan.evidence.trials, key=lambda one: one.micro_batch_size)],
        verdict=verdict.sentence(plan.tuning) if plan.tuning else "",
        plots=_plots(plan),
    )
    return f"<!-- gradplan wrote what follows; its sha256 was {_sha256(text)} -->\n{text}"


def is_untouched(text: str) -> bool:
    """Whether ``render`` made this text and nobody changed it since."""
    header = _HEADER.match(text)
    return header is not None and header[1] == _sha256(text[header.end() :])


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@cache
def _template() -> Template:
    text = (resources.files("gradplan") / "page.html.jinja").read_text(encoding="utf-8")
    return Environment(undefined=StrictUndefined, autoescape=True, trim_blocks=True).from_string(text)


def _trial_row(trial: Any) -> tuple[str, ...]:
    sizes = (trial.needed_bytes, trial.predicted_bytes)
    needed, predicted = ("" if size is None else format_bytes(size) for size in sizes)
    seconds = "" if trial.step_seconds is None else reasons.format_seconds(trial.step_seconds)
    outcome = "fits" if trial.fits else trial.reason or "does not fit"
    return (str(trial.micro_batch_size), outcome, needed, predicted, seconds, trial.source)


def _plots(plan: Plan) -> list[str]:
    """Of the search; a page without them says what is missing."""
    tuning = plan.tuning
    trials = [trial for trial in tuning.trials if trial.value is not None] if tuning else []
    if not trials:
        return []
    try:
        import plotly  # type: ignore[import-untyped]  # noqa: F401
    except ImportError:
        return [f"<p>{NO_PLOTS}</p>"]
    from optuna import visualization

    study = _study_of(trials)
    named: dict[str, Any] = {"target": lambda trial: trial.value, "target_name": "loss"}
    figures = [plot(study, **named) for plot in (visualization.plot_slice, visualization.plot_optimization_history)]
    return [
        figure.to_html(full_html=False, include_plotlyjs=number == 0, div_id=f"plot-{number}")
        for number, figure in enumerate(figures)
    ]


def _study_of(trials: list[TuningTrial]) -> Any:
    """A study in memory with the trials that the plan holds: the page needs no storage."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    tried = [trial.multiplier for trial in trials]
    space: dict[str, Any] = {"multiplier": optuna.distributions.FloatDistribution(min(tried), max(tried), log=True)}
    study = optuna.create_study(study_name="gradplan")
    for trial in trials:
        params = {"multiplier": trial.multiplier}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=space, value=trial.value))
    return study
