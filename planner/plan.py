"""Evidence and a goal become a plan: micro-batches, accumulation, learning rate. Pure, without torch."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator

from gradplan.advice import batch_notices, rate_confidence, rate_notices, what_would_fit, window_notices
from gradplan.goal import Goal, Limit, Target, find_target, per_rank_target
from gradplan.probes.errors import DoesNotFitError, GradplanError, UsageError
from gradplan.probes.evidence import Evidence, Frozen, Notice, Precision, Recipe
from gradplan.scaling import Confidence, factor, rule_for
from gradplan.window import split_window

__all__ = [
    "Goal",
    "Plan",
    "Target",
    "find_target",
    "from_json",
    "is_untouched",
    "make_plan",
    "per_rank_target",
    "to_json",
]

SCHEMA = 1
MOST_ACCUMULATION_STEPS = 1_000_000


class Plan(Frozen):
    """What gradplan.json holds. Bytes are bytes, times are seconds, batch sizes are samples.

    The keys are an interface: keys may be added, none is renamed or changes its meaning. The JSON key
    "schema" is ``schema_version`` in Python, where pydantic uses the other name.
    """

    model_config = ConfigDict(populate_by_name=True)

    schema_version: Literal[1] = Field(default=1, alias="schema")
    gradplan_version: str
    torch_version: str
    model: str
    precision: Precision
    optimizer: str
    num_parameters: int = Field(ge=0)
    micro_batch_size: int = Field(ge=1)
    micro_batch_sizes: tuple[int, ...] = Field(min_length=1)
    accumulation_steps: int = Field(ge=1)
    world_size: int = Field(ge=1)
    effective_batch_size: int = Field(ge=1)
    max_micro_batch_size: int = Field(ge=1)
    limited_by: Limit
    base_batch_size: int | None
    base_learning_rate: float | None
    learning_rate: float | None
    learning_rate_rule: str
    learning_rate_factor: float = Field(gt=0)
    learning_rate_multiplier: float = Field(default=1.0, gt=0)
    confidence: Confidence
    backward: Literal["joint", "sequential"] = "joint"
    evidence: Evidence
    warnings: tuple[Notice, ...] = ()
    recipe: Recipe

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Plan:
        """A plan edited by hand must still be one plan: train.py would follow whichever key it reads."""
        sizes = self.micro_batch_sizes
        if min(sizes) < 1 or sum(sizes) * self.world_size != self.effective_batch_size:
            raise ValueError("micro_batch_sizes times world_size do not add up to effective_batch_size")
        if len(sizes) != self.accumulation_steps:
            raise ValueError("accumulation_steps is not the number of micro_batch_sizes")
        if max(sizes) != self.micro_batch_size or self.micro_batch_size > self.max_micro_batch_size:
            raise ValueError("micro_batch_size is not the largest of micro_batch_sizes, or above the maximum")
        if (self.learning_rate is None) != (self.base_learning_rate is None):
            raise ValueError("learning_rate and base_learning_rate are known only together")
        if self.learning_rate is not None and self.base_learning_rate is not None:
            product = self.base_learning_rate * self.learning_rate_factor * self.learning_rate_multiplier
            if not math.isclose(self.learning_rate, product, rel_tol=0.01):
                raise ValueError("learning_rate is not base_learning_rate x factor x multiplier")
        return self


def to_json(plan: Plan) -> str:
    """The text of gradplan.json, sealed: the same plan always gives the same bytes.

    The last key, "sha256", is the hash of the others. A plan may be edited and read again; the hash only says
    that somebody did, so that their work is not overwritten.
    """
    data = plan.model_dump(mode="json", by_alias=True)
    return json.dumps({**data, "sha256": _sha256(data)}, indent=2, ensure_ascii=False) + "\n"


def is_untouched(text: str) -> bool:
    """Whether ``to_json`` made this text and nobody changed it since, white space apart."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and data.pop("sha256", None) == _sha256(data)


def _sha256(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def from_json(text: str, name: str = "the plan file") -> Plan:
    """The plan that ``to_json`` wrote; ``name`` is what error messages call it.

    Raises:
        GradplanError: the text is damaged, is not a plan, or was written with a newer schema.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GradplanError(f"{name} is damaged: not JSON ({error})") from None
    if not isinstance(data, dict) or not {"schema", "gradplan_version"} <= data.keys():
        raise GradplanError(f"{name} is not a gradplan plan: it has no schema and gradplan_version")
    schema, writer = data["schema"], data["gradplan_version"]
    if isinstance(schema, int) and schema > SCHEMA:
        raise GradplanError(
            f"{name} is newer than this gradplan: schema {schema}, written by gradplan {writer}, where this "
            f"one reads schema {SCHEMA}. Upgrade gradplan, or probe again"
        )
    data.pop("sha256", None)
    try:
        return Plan.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        problem = f"{where}: {first['msg']}" if where else first["msg"]
        raise GradplanError(f"{name} is damaged (written by gradplan {writer}): {problem}") from None


def make_plan(recipe: Recipe, evidence: Evidence, goal: Goal, *, gradplan_version: str, torch_version: str) -> Plan:
    """The settings that keep the effective batch within what the evidence says fits.

    Raises:
        UsageError, UserCodeError: as ``find_target``.
        DoesNotFitError: no trial fits; the message says what would help.
    """
    target = find_target(recipe, goal)
    largest = _largest_that_fits(recipe, evidence, goal)
    at_most = largest if target.at_most is None else min(largest, target.at_most)
    whole = at_most // recipe.batch_multiple * recipe.batch_multiple
    _check_steps(target.per_rank or whole, whole)
    sizes = split_window(target.per_rank or whole, at_most, recipe.batch_multiple)
    effective = sum(sizes) * goal.world_size

    rule, base, base_rate = rule_for(recipe.optimizer), recipe.base_batch_size, recipe.base_learning_rate
    scale = 1.0 if base is None else factor(rule, base, effective)
    notices = (
        *target.notices,
        *batch_notices(target, effective),
        *rate_notices(recipe, rule, effective, scale),
        *window_notices(recipe, goal, sizes),
        *recipe.notices,
        *evidence.notices,
    )
    return Plan(
        gradplan_version=gradplan_version,
        torch_version=torch_version,
        model=recipe.model,
        precision=goal.precision,
        optimizer=recipe.optimizer,
        num_parameters=recipe.num_parameters,
        micro_batch_size=sizes[0],
        micro_batch_sizes=tuple(sizes),
        accumulation_steps=len(sizes),
        world_size=goal.world_size,
        effective_batch_size=effective,
        max_micro_batch_size=largest,
        limited_by=target.bound if target.bound is not None and at_most == target.at_most else "memory",
        base_batch_size=base,
        base_learning_rate=base_rate,
        learning_rate=None if base_rate is None else base_rate * scale,
        learning_rate_rule="none" if rule is None else rule.name,
        learning_rate_factor=scale,
        confidence=rate_confidence(recipe, rule, effective),
        evidence=evidence,
        warnings=tuple(dict.fromkeys(notices)),
        recipe=recipe,
    )


def _check_steps(per_rank: int, at_most: int) -> None:
    num_steps = -(-per_rank // at_most)
    if num_steps > MOST_ACCUMULATION_STEPS:
        raise UsageError(
            f"a batch of {per_rank} in micro-batches of at most {at_most} takes {num_steps} accumulation steps, more "
            f"than {MOST_ACCUMULATION_STEPS}; give a smaller --effective-batch"
        )


def _largest_that_fits(recipe: Recipe, evidence: Evidence, goal: Goal) -> int:
    largest = max((trial.micro_batch_size for trial in evidence.trials if trial.fits), default=0)
    if largest < recipe.batch_multiple:
        raise DoesNotFitError(what_would_fit(recipe, evidence, goal))
    return largest
