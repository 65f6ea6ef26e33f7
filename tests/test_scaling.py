"""Learning-rate rules: one per optimizer, exact where nothing changes, and never a guess."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradplan.scaling import confidence, factor, rule_for

LINEAR = ["SGD", "ASGD", "LARS", "SGD8bit", "FusedSGD"]
SQRT = [
    *("Adam", "AdamW", "NAdam", "NAdamW", "RAdam", "Adamax", "SparseAdam", "StableAdamW", "RMSprop"),
    *("Adafactor", "Lion", "Muon", "MuonWithAuxAdam", "SingleDeviceMuonWithAuxAdam", "Shampoo", "SOAP"),
    *("LAMB", "Lamb", "FusedLAMB", "AdamW8bit", "AdamW4bit", "AdamWFp8", "PagedAdamW", "PagedAdamW8bit"),
    *("PagedAdam32bit", "FusedAdam", "CPUAdam", "DeepSpeedCPUAdam", "Lion8bit", "PagedLion"),
]
CONSTANT = ["Adagrad", "DeepSpeedCPUAdagrad", "Adagrad8bit"]
UNKNOWN = [
    *("MyOptimizer", "", "Adadelta", "Rprop", "LBFGS", "AdamWScheduleFree", "SGDScheduleFree", "Prodigy"),
    *("DAdaptAdam", "MySGD", "AdamWithExtras", "FusedNovoGrad", "Optimizer", "GaLoreAdamW"),
]

batches = st.integers(1, 10**6)


@pytest.mark.parametrize("optimizer", LINEAR)
def test_sgd_and_its_kin_scale_linearly(optimizer: str) -> None:
    rule = rule_for(optimizer)
    assert rule is not None
    assert rule.name == "linear"
    assert factor(rule, 32, 256) == 8.0
    assert factor(rule, 256, 32) == 1 / 8


@pytest.mark.parametrize("optimizer", SQRT)
def test_adam_and_its_kin_scale_with_the_square_root(optimizer: str) -> None:
    rule = rule_for(optimizer)
    assert rule is not None
    assert rule.name == "sqrt"
    assert factor(rule, 32, 128) == 2.0
    assert math.isclose(factor(rule, 32, 64), math.sqrt(2))


@pytest.mark.parametrize("optimizer", CONSTANT)
def test_adagrad_keeps_its_rate(optimizer: str) -> None:
    rule = rule_for(optimizer)
    assert rule is not None
    assert rule.name == "constant"
    assert factor(rule, 32, 4096) == 1.0


@pytest.mark.parametrize("optimizer", UNKNOWN)
def test_an_unknown_optimizer_has_no_rule_and_factor_one(optimizer: str) -> None:
    assert rule_for(optimizer) is None
    assert factor(None, 32, 4096) == 1.0
    assert confidence(None, 32, 33) == "low"
    assert confidence(None, 32, 32) == "high"


@pytest.mark.parametrize(
    "spelling", ["adamw", "ADAMW", "torch.optim.AdamW", "torch.optim.adamw.AdamW", "_AdamW", "Adam_W"]
)
def test_spelling_and_module_do_not_matter(spelling: str) -> None:
    assert rule_for(spelling) == rule_for("AdamW") is not None


@pytest.mark.parametrize("optimizer", LINEAR + SQRT + CONSTANT)
def test_every_rule_names_its_source(optimizer: str) -> None:
    rule = rule_for(optimizer)
    assert rule is not None
    assert "arXiv:" in rule.source or "kexue" in rule.source or rule.source.startswith(("derived", "as "))
    assert {"linear": 1.0, "sqrt": 0.5, "constant": 0.0}[rule.name] == rule.exponent


@given(batches, st.sampled_from(LINEAR + SQRT + CONSTANT))
def test_the_same_batch_gives_exactly_one(batch: int, optimizer: str) -> None:
    rule = rule_for(optimizer)
    assert factor(rule, batch, batch) == 1.0
    assert confidence(rule, batch, batch) == "high"


@given(batches, batches, st.sampled_from(LINEAR + SQRT + CONSTANT))
def test_there_and_back_is_one(base: int, effective: int, optimizer: str) -> None:
    rule = rule_for(optimizer)
    assert math.isclose(factor(rule, base, effective) * factor(rule, effective, base), 1.0)


@pytest.mark.parametrize(("base", "effective"), [(0, 1), (1, 0), (-4, 4)])
def test_a_batch_below_one_is_an_error(base: int, effective: int) -> None:
    with pytest.raises(ValueError, match="cannot scale"):
        factor(rule_for("SGD"), base, effective)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "PagedAdamW8bit"])
@pytest.mark.parametrize(
    ("base", "effective", "expected"),
    [
        (64, 128, "high"),
        (128, 64, "high"),
        (64, 129, "medium"),
        (129, 64, "medium"),
        (64, 512, "medium"),
        (512, 64, "medium"),
        (64, 513, "low"),
        (513, 64, "low"),
    ],
)
def test_tested_rules_are_high_to_twice_and_medium_to_eight_times(
    optimizer: str, base: int, effective: int, expected: str
) -> None:
    assert confidence(rule_for(optimizer), base, effective) == expected


@pytest.mark.parametrize(
    "optimizer",
    ["Lion", "Adafactor", "SOAP", "Shampoo", "Adagrad", "Muon", "RMSprop", "LAMB", "LARS", "ASGD"],
)
def test_little_tested_rules_are_low_however_near(optimizer: str) -> None:
    assert confidence(rule_for(optimizer), 64, 65) == "low"
    assert confidence(rule_for(optimizer), 64, 64) == "high"


def test_every_torch_optimizer_was_decided() -> None:
    import torch.optim

    without_rule = {"Optimizer", "Adadelta", "LBFGS", "Rprop"}
    found = {name for name, value in vars(torch.optim).items() if isinstance(value, type)}
    assert {name for name in found if rule_for(name) is None} == without_rule
