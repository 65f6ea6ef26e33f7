"""Learning-rate rules by optimizer, each named and cited.

When the batch goes from b to k b, the learning rate goes to lr x k^p. The rules hold while gradient noise
dominates, for training from scratch; beyond the critical batch the best rate grows more slowly (McCandlish et
al. 2018, arXiv:1812.06162), and Shallue et al. 2019 (JMLR 20) found no rule that holds everywhere. So each
answer comes with a confidence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Confidence = Literal["high", "medium", "low"]


@dataclass(frozen=True)
class Rule:
    """The learning rate is multiplied by (effective batch / base batch) ** ``exponent``.

    ``source`` is where the rule comes from. ``well_tested`` rules were measured over a range of batch sizes,
    for this optimizer or its closest kin; the others are derived or carried over.
    """

    name: Literal["linear", "sqrt", "constant"]
    exponent: float
    source: str
    well_tested: bool = False


def _linear(source: str, well_tested: bool = False) -> Rule:
    return Rule("linear", 1.0, source, well_tested)


def _sqrt(source: str, well_tested: bool = False) -> Rule:
    return Rule("sqrt", 0.5, source, well_tested)


_ADAM = "Malladi et al. 2022, arXiv:2205.10287; Granziol et al. 2020, arXiv:2006.09092"
_LIKE_ADAM = f"as Adam, whose normalisation it shares ({_ADAM})"
_MUON = "Cesista and Wen 2025 (a 130M language model); kexue.fm/archives/11285 (theory)"

# Unlisted on purpose, as no rule is known: Rprop (lr is only its first step, and it needs full batches),
# LBFGS (lr is a part of a quasi-Newton step, and repeated closure calls do not accumulate), Adadelta (its
# step follows from its own past steps; lr is a bare factor), schedule-free and parameter-free optimizers.
_RULES = {
    "sgd": _linear("Goyal et al. 2017, arXiv:1706.02677", well_tested=True),
    "asgd": _linear("as SGD; its decay depends on lr x steps, which the linear rule keeps per sample"),
    "adam": _sqrt(_ADAM, well_tested=True),
    "adamw": _sqrt(_ADAM, well_tested=True),
    "nadam": _sqrt(_LIKE_ADAM, well_tested=True),
    "nadamw": _sqrt(_LIKE_ADAM, well_tested=True),
    "radam": _sqrt(_LIKE_ADAM, well_tested=True),
    "adamax": _sqrt(_LIKE_ADAM),
    "sparseadam": _sqrt(_LIKE_ADAM),
    "stableadamw": _sqrt(_LIKE_ADAM),
    "rmsprop": _sqrt("Malladi et al. 2022, arXiv:2205.10287, with alpha scaled too; else it is less"),
    "adagrad": Rule("constant", 0.0, "derived: its sum of squares shrinks, so its step grows with the batch"),
    "adafactor": _sqrt("as Adam, with which Li et al. 2024, arXiv:2405.14578, group it"),
    "lion": _sqrt("as sign descent, Li et al. 2024, arXiv:2405.14578"),
    "muon": _sqrt(_MUON),
    "muonwithauxadam": _sqrt(_MUON),
    "shampoo": _sqrt("derived: as Adam where its preconditioners decay; where they only sum, as Adagrad"),
    "soap": _sqrt("as Adam, which it runs in Shampoo's eigenbasis (Vyas et al. 2024, arXiv:2409.11321)"),
    "lamb": _sqrt("You et al. 2019, arXiv:1904.00962"),
    "lars": _linear("You et al. 2017, arXiv:1708.03888"),
}


def rule_for(optimizer: str) -> Rule | None:
    """The rule for an optimizer's class name, in any case, with or without its module.

    None where no rule is known: the rate is then the user's to choose. Another implementation of the same
    update has the same rule: ``PagedAdamW8bit``, ``FusedAdam``, ``DeepSpeedCPUAdam``.
    """
    name = re.sub("[^a-z0-9]", "", optimizer.rsplit(".", 1)[-1].lower())
    name = re.sub("^(paged|fused|deepspeed|cpu|singledevice)+", "", name)
    return _RULES.get(re.sub("(4bit|8bit|32bit|fp8)$", "", name))


def factor(rule: Rule | None, base_batch: int, effective_batch: int) -> float:
    """What the learning rate is multiplied by; exactly 1 for the same batch and where no rule is known.

    Raises:
        ValueError: a batch below 1.
    """
    if base_batch < 1 or effective_batch < 1:
        raise ValueError(f"cannot scale a learning rate from batch {base_batch} to {effective_batch}")
    if rule is None or effective_batch == base_batch:
        return 1.0
    return float((effective_batch / base_batch) ** rule.exponent)


def confidence(rule: Rule | None, base_batch: int, effective_batch: int) -> Confidence:
    """How far to trust ``factor``.

    High where nothing changes. A well-tested rule is high up to twice (or half) the batch and medium up to
    eight times (or an eighth). All else is low.
    """
    if effective_batch == base_batch:
        return "high"
    far = max(base_batch, effective_batch) / min(base_batch, effective_batch)
    if rule is None or not rule.well_tested or far > 8:
        return "low"
    return "high" if far <= 2 else "medium"
