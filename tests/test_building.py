"""Models are built without memory, and can be converted, copied and tied as users do."""

from __future__ import annotations

import copy
from collections.abc import Callable

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from gradplan.probes.simulator.building import as_fake, fake_models


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.convolution = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


def built_fake(mode: FakeTensorMode) -> Tied:
    return Tied()


def converted(mode: FakeTensorMode) -> Tied:
    with torch.utils._python_dispatch._disable_current_modes():
        model = Tied()
    as_fake(model, mode)
    return model


BOTH = pytest.mark.parametrize("build", [built_fake, converted])
Build = Callable[[FakeTensorMode], Tied]


def tensors_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def test_ten_billion_parameters_take_no_memory() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    with fake_models(FakeTensorMode()):
        model = nn.Sequential(*(nn.Linear(10_000, 10_000, bias=False) for _ in range(100)))
        model = copy.deepcopy(model.to(torch.bfloat16))
        model(torch.randn(2, 10_000, dtype=torch.bfloat16)).sum().backward()
        torch.optim.AdamW(model.parameters()).step()
        assert sum(parameter.numel() for parameter in model.parameters()) == 10_000_000_000
    assert process.memory_info().rss - before < 100 * 2**20


@BOTH
def test_all_parameters_and_buffers_are_fake(build: Build) -> None:
    mode = FakeTensorMode()
    with fake_models(mode):
        model = build(mode)
    assert all(isinstance(tensor, FakeTensor) for tensor in tensors_of(model))
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    assert not model.frozen.requires_grad
    assert model.embedding.weight.requires_grad


@BOTH
@pytest.mark.parametrize(
    "convert",
    [
        lambda model: model,
        lambda model: model.to(torch.bfloat16),
        lambda model: model.half().float(),
        lambda model: model.to(memory_format=torch.channels_last),
        lambda model: model.to("cpu"),
        copy.deepcopy,
        lambda model: copy.deepcopy(copy.deepcopy(model).to(torch.bfloat16)),
    ],
    ids=["as built", "bf16", "half", "channels_last", "device", "copy", "copies"],
)
def test_tied_parameters_stay_tied(build: Build, convert: Callable[[Tied], Tied]) -> None:
    mode = FakeTensorMode()
    with fake_models(mode):
        model = convert(build(mode))
        assert model.head.weight is model.embedding.weight
        assert sum(1 for _ in model.parameters()) == 4
        assert all(isinstance(tensor, FakeTensor) for tensor in tensors_of(model))
        model(torch.zeros(2, dtype=torch.long)).sum().backward()
        assert model.embedding.weight.grad is not None


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_can_be_given_another_type(build: Build, dtype: torch.dtype) -> None:
    mode = FakeTensorMode()
    with fake_models(mode):
        model = build(mode).to(dtype)
        assert {tensor.dtype for tensor in tensors_of(model)} == {dtype}
        assert {tensor.untyped_storage().nbytes() / tensor.numel() for tensor in tensors_of(model)} == {dtype.itemsize}


@BOTH
def test_a_model_can_be_laid_out_with_channels_last(build: Build) -> None:
    mode = FakeTensorMode()
    with fake_models(mode):
        weight = build(mode).to(memory_format=torch.channels_last).convolution.weight
        assert weight.is_contiguous(memory_format=torch.channels_last)


@BOTH
def test_a_copy_is_another_model(build: Build) -> None:
    mode = FakeTensorMode()
    with fake_models(mode):
        model = build(mode)
        twin = copy.deepcopy(model)
        mine, its = tensors_of(model), tensors_of(twin)
        storages = {tensor.untyped_storage()._cdata for tensor in (*mine, *its)}
        assert len(storages) == len(mine) + len(its)
        assert [tensor.requires_grad for tensor in mine] == [tensor.requires_grad for tensor in its]
        twin.load_state_dict(model.state_dict())


def test_a_copy_of_a_plain_tensor_keeps_its_kind() -> None:
    with fake_models(FakeTensorMode()):
        tensor = torch.ones(2, requires_grad=True)
        twin = copy.deepcopy([tensor, tensor])
        assert twin[0] is twin[1]
        assert twin[0].requires_grad
        assert not isinstance(twin[0], nn.Parameter)


def test_initialisers_that_ask_for_values_do_nothing() -> None:
    """In torch 2.14 trunc_normal_ asks mask.any(), which no fake tensor can answer; memory does not care."""
    with fake_models(FakeTensorMode()):
        weight = torch.empty(3, 3)
        assert nn.init.trunc_normal_(weight, std=0.02) is weight


def test_everything_is_as_before_afterwards() -> None:
    before = (torch.utils.swap_tensors, nn.Parameter.__deepcopy__, nn.init.trunc_normal_)
    with pytest.raises(KeyError), fake_models(FakeTensorMode()):
        raise KeyError
    assert (torch.utils.swap_tensors, nn.Parameter.__deepcopy__, nn.init.trunc_normal_) == before
    assert "__deepcopy__" not in vars(FakeTensor)
    weight = torch.zeros(100)
    nn.init.trunc_normal_(weight)
    assert weight.std() > 0.5
