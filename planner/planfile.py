"""gradplan.json: what a plan holds, and its text. Pure, without torch."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator

from gradplan.goal import Limit
from gradplan.probes.errors import GradplanError
from gradplan.probes.evidence import Backward, Evidence, Frozen, Notice, Precision, Recipe
from gradplan.scaling import Confidence
from gradplan.verdict import Tuning

SCHEMA = 1

Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0)]


class Asked(Frozen):
    """What was asked for, where the plan itself cannot say it; None is the recipe's batch, and no bound."""

    effective_batch: Count | None = None
    max_micro_batch: Count | None = None


class Plan(Frozen):
    """What gradplan.json holds. Bytes are bytes, times are seconds, batch sizes are samples.

    The keys are an interface: keys may be added, none is renamed or changes its meaning. The JSON key
    "schema" is ``schema_version`` in Python, where pydantic uses the other name. ``tried_up_to`` is the largest
    micro-batch that the probe would have tried; None where only memory would have stopped it.
    """

    model_config = ConfigDict(populate_by_name=True)

    schema_version: Literal[1] = Field(default=1, alias="schema")
    gradplan_version: str
    torch_version: str
    model: str
    precision: Precision
    optimizer: str
    num_parameters: int = Field(ge=0)
    micro_batch_size: Count
    micro_batch_sizes: tuple[int, ...] = Field(min_length=1)
    accumulation_steps: Count
    world_size: Count
    effective_batch_size: Count
    max_micro_batch_size: Count
    limited_by: Limit
    base_batch_size: Count | None
    base_learning_rate: Rate | None
    learning_rate: Rate | None
    learning_rate_rule: str
    learning_rate_factor: Rate
    learning_rate_multiplier: Rate = 1.0
    confidence: Confidence
    backward: Backward = "joint"
    evidence: Evidence
    warnings: tuple[Notice, ...] = ()
    recipe: Recipe
    asked: Asked = Asked()
    tried_up_to: Count | None = None
    tuning: Tuning | None = None

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
        if self.recipe.batch_multiple < 1 or any(size % self.recipe.batch_multiple for size in sizes):
            raise ValueError("micro_batch_sizes are not multiples of recipe.batch_multiple")
        if min(_sizes_in_bytes(self.evidence), default=0) < 0:
            raise ValueError("a size in bytes is below 0")
        if (self.learning_rate is None) != (self.base_learning_rate is None):
            raise ValueError("learning_rate and base_learning_rate are known only together")
        if self.learning_rate is not None and self.base_learning_rate is not None:
            product = self.base_learning_rate * self.learning_rate_factor * self.learning_rate_multiplier
            if not math.isclose(self.learning_rate, product, rel_tol=0.01):
                raise ValueError("learning_rate is not base_learning_rate x factor x multiplier")
        return self


def _sizes_in_bytes(evidence: Evidence) -> Iterator[int]:
    yield evidence.limit_bytes
    for trial in evidence.trials:
        known = (trial.peak_allocated_bytes, trial.peak_reserved_bytes, trial.required_bytes)
        yield from (num_bytes for num_bytes in known if num_bytes is not None)
    if evidence.anatomy is not None:
        yield from (part.num_bytes for part in (*evidence.anatomy.parts, *evidence.anatomy.modules))
        yield evidence.anatomy.unused_bytes
    yield from (lever.required_bytes for lever in evidence.levers)
    for peak in evidence.backward_peaks:
        yield from (peak.peak_allocated_bytes, peak.peak_reserved_bytes)


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
    if isinstance(schema, bool):
        raise GradplanError(f"{name} is damaged (written by gradplan {writer}): schema is {schema}")
    try:
        return Plan.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        problem = f"{where}: {first['msg']}" if where else first["msg"]
        raise GradplanError(f"{name} is damaged (written by gradplan {writer}): {problem}") from None
