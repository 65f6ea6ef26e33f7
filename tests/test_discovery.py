"""Which model a model.py means, and the numbers of its recipe: `gradplan.probes.discovery`."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy
import pytest

from gradplan.probes.discovery import find_builder, positive_constant, split_name
from gradplan.probes.errors import UserCodeError

NET = """
from torch import nn
class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
"""
OTHER = """
class Other(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
"""
NEEDY = """
from torch import nn
class Needy(nn.Module):
    def __init__(self, width): ...
"""


def module(text: str) -> ModuleType:
    made = ModuleType("model")
    exec(text, made.__dict__)
    return made


def found(text: str, wanted: str | None = None) -> str:
    return find_builder(module(text), "model.py", wanted)


def refused(text: str, wanted: str | None = None) -> str:
    with pytest.raises(UserCodeError) as caught:
        found(text, wanted)
    return str(caught.value)


# What was typed


@pytest.mark.parametrize(
    ("typed", "file", "name"),
    [
        ("model.py", "model.py", None),
        ("a b/model.py:small", "a b/model.py", "small"),
        ("model.py:Net2", "model.py", "Net2"),
        (r"C:\models\model.py", r"C:\models\model.py", None),
        (r"C:\models\model.py:small", r"C:\models\model.py", "small"),
        ("a:b/model.py", "a:b/model.py", None),
        ("model.py:", "model.py:", None),
        ("model.py:2", "model.py:2", None),
        ("model.py:a.b", "model.py:a.b", None),
        ("model:small", "model:small", None),
    ],
)
def test_a_name_after_the_colon_is_split_off_a_python_file(typed: str, file: str, name: str | None) -> None:
    assert split_name(typed) == (file, name)


# The model


def test_build_model_comes_first() -> None:
    assert found(f"{NET}{OTHER}\nmodel = Other()\ndef build_model(): ...") == "build_model"


def test_build_model_may_be_any_callable() -> None:
    for builder in ("Net", "lambda: Net()", "__import__('functools').partial(Net, 3)"):
        assert found(f"{NET}\nbuild_model = {builder}") == "build_model"


def test_then_a_module_called_model() -> None:
    assert found(f"{NET}{OTHER}\nmodel = Other()") == "model"


def test_a_model_that_is_no_module_is_passed_over() -> None:
    assert found(f"{NET}\nmodel = 'resnet'\nbuild_model = None") == "Net"


def test_then_the_only_class_of_this_file_that_needs_no_arguments() -> None:
    assert found(NET) == "Net"
    assert found(NEEDY + OTHER) == "Other"
    assert found(f"{NEEDY}\nfrom torch.nn import Identity\nclass Mine(Identity): ...") == "Mine"


def test_a_second_name_for_a_class_that_was_imported_is_no_candidate() -> None:
    assert found(f"{NET}\nActivation = nn.ReLU") == "Net"


@pytest.mark.parametrize("name", ["small", "Net", "Needy", "net", "build_model"])
def test_a_name_after_the_colon_is_the_model(name: str) -> None:
    text = f"{NET}{NEEDY}\nnet = Net()\ndef build_model(): ...\ndef small(): ..."
    assert found(text, name) == name


def test_a_name_that_is_not_there_is_answered_with_those_that_are() -> None:
    text = f"{NET}{OTHER}\ndef build_tiny(): ...\ndef get_data(): ...\ndef build_batch(n): ..."
    assert refused(text, "smal") == "model.py has no smal; it has Net, Other, build_tiny, get_data"
    assert refused("x = 1", "smal") == "model.py has no smal; it has no model"


def test_a_name_of_something_else_is_no_model() -> None:
    assert refused(f"{NET}\nBATCH_SIZE = 3", "BATCH_SIZE") == "BATCH_SIZE in model.py is no model; it has Net"


def test_two_candidates_are_listed_with_what_to_type() -> None:
    message = refused(f"{NET}{OTHER}\ndef build_batch(n): ...\ndef build_dataset(): ...")
    assert message.startswith("which model of model.py? There is no build_model(); found Net, Other. ")
    assert message.endswith("gradplan probe model.py:Net")


def test_a_file_without_a_model_is_told_what_to_write() -> None:
    message = refused("import torch\ndef build_batch(n): ...")
    assert message.startswith("which model of model.py? There is no build_model(); found no nn.Module in it. ")
    assert message.endswith("def build_model(): return MyModel(...)")


def test_a_class_that_needs_arguments_needs_a_builder() -> None:
    assert refused(NEEDY).endswith("found Needy. Write for example: def build_model(): return MyModel(...)")


def test_a_function_that_sounds_like_a_builder_is_offered() -> None:
    message = refused(f"{NEEDY}\ndef make_net(): ...")
    assert message.endswith("found Needy, make_net. Write for example: gradplan probe model.py:make_net")


def test_build_model_must_be_a_function() -> None:
    assert refused("build_model = 3") == "build_model in model.py is int; it must be a function () -> nn.Module"
    assert refused(f"{NET}\nbuild_model = Net()") == "build_model in model.py is Net; name it model"


# The recipe


@pytest.mark.parametrize("value", [0, -3, True, "32", 2.0, [32], math.nan, b"1", numpy.float64(3)])
def test_a_batch_size_is_a_positive_whole_number(value: Any) -> None:
    holder = ModuleType("model")
    holder.BATCH_SIZE = value  # type: ignore[attr-defined]
    with pytest.raises(UserCodeError) as caught:
        positive_constant(holder, "BATCH_SIZE", int)
    assert str(caught.value) == f"BATCH_SIZE is {value!r}; it must be a positive whole number"


@pytest.mark.parametrize("value", [0, -1e-3, math.nan, math.inf, True, "3e-4", (1e-3,), 1j])
def test_a_learning_rate_is_a_positive_finite_number(value: Any) -> None:
    holder = ModuleType("model")
    holder.LEARNING_RATE = value  # type: ignore[attr-defined]
    with pytest.raises(UserCodeError) as caught:
        positive_constant(holder, "LEARNING_RATE", float)
    assert str(caught.value) == f"LEARNING_RATE is {value!r}; it must be a positive number"


def test_numbers_of_any_library_become_pythons() -> None:
    holder = module("import numpy\nBATCH_SIZE = numpy.int64(32)\nLEARNING_RATE = numpy.float32(0.5)\nONE = 1")
    size, rate = positive_constant(holder, "BATCH_SIZE", int), positive_constant(holder, "LEARNING_RATE", float)
    assert (size, type(size), rate, type(rate)) == (32, int, 0.5, float)
    assert isinstance(positive_constant(holder, "ONE", float), float)


def test_what_is_not_said_is_none() -> None:
    assert positive_constant(module("BATCH_SIZE = None"), "BATCH_SIZE", int) is None
    assert positive_constant(module(""), "BATCH_SIZE", int) is None
