"""A user's job behind the names of the contract: `gradplan.probes.workload`, `contract` and `batches`."""

from __future__ import annotations

import dataclasses
import math
import random
import sys
from collections import UserDict, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import gradplan
from gradplan.plan import to_json
from gradplan.probes.batches import num_elements, settings_kept
from gradplan.probes.errors import UserCodeError
from gradplan.probes.evidence import Recipe
from gradplan.probes.simulator.tracer import Tracer
from gradplan.probes.simulator.training import Setup
from gradplan.probes.workload import Workload, load_workload

HEAD = """
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset
"""
MODEL = "def build_model():\n    return nn.Linear(4, 3)\n"
BATCH = "def build_batch(n):\n    return torch.randn(n, 4), torch.randint(3, (n,))\n"
LOSS = "def compute_loss(model, batch):\n    x, y = batch\n    return nn.functional.cross_entropy(model(x), y)\n"
PLAIN = HEAD + MODEL + BATCH + LOSS
SENTENCES = (
    HEAD
    + MODEL
    + """
class Sentences(Dataset):
    lengths = {lengths}
    def __len__(self):
        return len(self.lengths)
    def __getitem__(self, index):
        return torch.full((self.lengths[index],), index)
def build_dataset():
    return Sentences()
def collate_fn(samples):
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)
"""
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    with settings_kept():
        yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def load(text: str, *args: Any) -> Workload:
    Path("model.py").write_text(text)
    return load_workload("model.py", *args)


def recipe(text: str, *args: Any) -> Recipe:
    """As a probe reads it, from a model without memory."""
    return Tracer(Setup(load(text, *args), "32-true", (8, 0)), lambda _: None).recipe()


def refused(function: Any, *args: Any) -> str:
    with pytest.raises(UserCodeError) as caught:
        function(*args)
    return str(caught.value)


def probe(text: str, **options: Any) -> gradplan.Plan:
    Path("model.py").write_text(text)
    return gradplan.probe("model.py", device="t4", effective_batch=8, **options)


# The model


def test_a_model_is_new_each_time_and_in_training_mode() -> None:
    workload = load(PLAIN + "def build_model():\n    return nn.Linear(4, 3).eval()\n")
    first, second = workload.build_model(), workload.build_model()
    assert first is not second
    assert first.training


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("None", "returned None; it must return one torch.nn.Module"),
        ("[]", "returned list; it must return"),
        ("nn.Linear", "returned the class Linear, not an instance; it must return"),
        ("{'a': nn.Linear(1, 1)}", "returned dict; it must return"),
        ("torch.zeros(3)", "returned Tensor; it must return"),
        ("(nn.Linear(1, 1), nn.Linear(1, 1))", "a tuple of 2 models; return one module that holds them: torch.nn.Mod"),
        ("[nn.Linear(1, 1)] * 3", "returned a list of 3 models; return one module"),
        ("nn.ReLU()", "returned a model in which no parameter requires grad: nothing to train"),
        ("nn.Linear(1, 1).requires_grad_(False)", "in which no parameter requires grad"),
        ("nn.LazyLinear(3)", "returned a model with lazy modules, whose sizes are not known yet; run it once"),
    ],
)
def test_a_builder_must_return_one_model_that_can_be_trained(returned: str, said: str) -> None:
    message = refused(load(PLAIN + f"def build_model():\n    return {returned}\n").build_model)
    assert message.startswith("build_model() ")
    assert said in message


ON_IMPORT = ("model = nn.Linear(4, 3)\n", "net = nn.Linear(4, 3)\ndef build_model():\n    return net\n")


@pytest.mark.parametrize("where", ON_IMPORT)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_model_built_on_import_stays_as_it_was(where: str, precision: Any) -> None:
    text = HEAD + BATCH + LOSS + f"torch.manual_seed(1)\n{where}open('imports', 'a').write('x')\n"
    assert probe(text, precision=precision).num_parameters == 15
    assert Path("imports").read_text() == "x"
    assert is_as_imported(sys.modules["model"])


@pytest.mark.parametrize("where", ON_IMPORT)
def test_a_model_built_on_import_stays_as_it_was_after_real_steps(where: str) -> None:
    loss = LOSS.replace("return", "loss =") + "    assert loss.item() < 1e9\n    return loss\n"
    text = HEAD + BATCH + loss + f"torch.manual_seed(1)\n{where}"
    assert "real-steps" in [warning.code for warning in probe(text).warnings]
    assert is_as_imported(sys.modules["model"])


def is_as_imported(module: Any) -> bool:
    model = module.model if hasattr(module, "model") else module.net
    torch.manual_seed(1)
    pairs = zip(model.parameters(), nn.Linear(4, 3).parameters(), strict=True)
    return all(torch.equal(*pair) and pair[0].grad is None for pair in pairs)


def test_a_builder_may_read_values_and_mark_parameters() -> None:
    text = (
        PLAIN
        + """
def build_model():
    model = nn.Linear(4, 3)
    assert model.weight.abs().sum().item() > 0
    model.bias.is_special = True
    return model
def build_optimizer(model, lr):
    assert model.bias.is_special
    return torch.optim.SGD(model.parameters(), lr)
"""
    )
    assert probe(text).optimizer == "SGD"


# The optimizer and its learning rate


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("None", "build_optimizer returned None; it must return one torch.optim.Optimizer"),
        ("torch.optim.SGD", "returned the class SGD, not an instance; it must"),
        ("(optimizer, optimizer)", "returned 2 optimizers; return one optimizer with a parameter group for each part"),
        ("[optimizer]", "returned 1 optimizers; return one"),
        ("torch.optim.lr_scheduler.ConstantLR(optimizer)", "returned ConstantLR; it must"),
        ("torch.optim.LBFGS(model.parameters(), lr)", "returned LBFGS, whose step() evaluates the whole batch again"),
        ("torch.optim.SGD(nn.Linear(4, 3).parameters(), lr)", "returned an optimizer of other parameters than those"),
    ],
)
def test_one_first_order_optimizer_of_the_model_must_be_built(returned: str, said: str) -> None:
    text = "def build_optimizer(model, lr):\n    optimizer = torch.optim.SGD(model.parameters(), lr)\n"
    workload = load(PLAIN + text + f"    return {returned}\n")
    assert said in refused(workload.build_optimizer, workload.build_model())


def test_without_build_optimizer_it_is_adamw_on_what_can_be_trained() -> None:
    workload = load(PLAIN + "LEARNING_RATE = 0.25\n")
    model = workload.build_model()
    model.bias.requires_grad = False
    optimizer = workload.build_optimizer(model)
    assert type(optimizer) is torch.optim.AdamW
    assert [group["params"] for group in optimizer.param_groups] == [[model.weight]]
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_build_optimizer_gets_the_recipes_rate_and_groups_keep_their_ratios() -> None:
    groups = "[{'params': [model.weight], 'lr': lr}, {'params': [model.bias], 'lr': lr / 10}]"
    text = PLAIN + f"LEARNING_RATE = 0.5\ndef build_optimizer(model, lr):\n    return torch.optim.SGD({groups})\n"
    workload = load(text)
    optimizer = workload.build_optimizer(workload.build_model())
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.05]
    assert recipe(text).base_learning_rate == 0.5


@pytest.mark.parametrize(
    ("optimizer", "rate"),
    [
        ("torch.optim.SGD(model.parameters(), lr=0.05)", 0.05),
        ("torch.optim.Adam(model.parameters())", 1e-3),
        ("torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5), foreach=False)", 0.5),
        ("torch.optim.SGD([{'params': [model.weight], 'lr': 0.2}, {'params': [model.bias], 'lr': 0.1}])", 0.2),
        ("torch.optim.SGD(model.parameters(), lr=lr)", None),
        ("torch.optim.SGD(model.parameters(), lr=lr * 3)", None),
        ("torch.optim.SGD([{'params': [model.weight], 'lr': lr}, {'params': [model.bias], 'lr': lr / 10}])", None),
        ("torch.optim.SGD([{'params': [model.weight], 'lr': 0.1}, {'params': [model.bias], 'lr': lr}])", None),
        ("Prodigal(model.parameters(), {'lr': None})", None),
        ("Prodigal(model.parameters(), {})", None),
    ],
)
def test_a_rate_nobody_named_is_read_from_the_optimizer_unless_it_follows_what_it_is_given(
    optimizer: str, rate: float | None
) -> None:
    text = PLAIN + "class Prodigal(torch.optim.Optimizer): ...\n"
    found = recipe(text + f"def build_optimizer(model, lr):\n    return {optimizer}\n").base_learning_rate
    assert found == (None if rate is None else pytest.approx(rate))


@pytest.mark.parametrize("rate", ["nan", "inf"])
def test_a_rate_that_is_not_finite_is_refused(rate: str) -> None:
    text = PLAIN + "def build_optimizer(model, lr):\n"
    text += f"    return torch.optim.SGD(model.parameters(), lr=float('{rate}'))\n"
    assert refused(recipe, text) == f"build_optimizer returned an optimizer whose learning rate is {rate}"


def test_the_recipe_is_what_was_asked_else_what_the_file_says() -> None:
    text = PLAIN + "BATCH_SIZE = 32\nLEARNING_RATE = 0.1\nBATCH_MULTIPLE = 4\n"
    known = recipe(text)
    assert (known.base_batch_size, known.base_learning_rate, known.batch_multiple) == (32, 0.1, 4)
    asked = recipe(text, 64, 0.2)
    assert (asked.base_batch_size, asked.base_learning_rate) == (64, 0.2)
    nothing = recipe(PLAIN)
    assert (nothing.base_batch_size, nothing.batch_multiple) == (None, 1)


def test_the_recipe_lists_the_names_that_the_file_defines() -> None:
    known = recipe(PLAIN + "collate_fn = None\ndef load_weights(model): ...\nBATCH_SIZE = 2\n")
    assert set(known.names) == {"build_model", "build_batch", "compute_loss", "load_weights", "BATCH_SIZE"}
    assert (known.model, known.builder, known.num_parameters) == ("model.py", "build_model", 15)


def test_batch_norm_is_seen_unless_it_is_frozen() -> None:
    text = HEAD + BATCH + LOSS + "def build_model():\n    return nn.Sequential(nn.Linear(4, 3), nn.{}(3))\n"
    assert recipe(text.format("BatchNorm1d")).has_batch_norm
    assert not recipe(text.format("LayerNorm")).has_batch_norm


def test_a_train_step_that_is_not_used_is_mentioned() -> None:
    assert "train-step-ignored" in [notice.code for notice in recipe(PLAIN + "def train_step(): ...\n").notices]


# The loss


@pytest.mark.parametrize(
    ("output", "batch"),
    [
        ("SimpleNamespace(loss=loss, logits=x)", "{'x': x, 'y': y}"),
        ("{'logits': x, 'loss': loss}", "(x, y)"),
        ("loss", "[x, y]"),
        ("loss.reshape(1)", "(x, y)"),
    ],
)
def test_without_compute_loss_the_loss_that_the_model_returns_is_taken(output: str, batch: str) -> None:
    text = (
        HEAD
        + f"""
from types import SimpleNamespace
class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
    def forward(self, x, y):
        loss = nn.functional.cross_entropy(super().forward(x), y)
        return {output}
def build_batch(n):
    x, y = torch.randn(n, 4), torch.randint(3, (n,))
    return {batch}
"""
    )
    workload = load(text)
    loss = workload.compute_loss(workload.build_model(), workload.make_batch(2))
    assert isinstance(loss, Tensor)
    assert loss.numel() == 1
    assert loss.requires_grad


@pytest.mark.parametrize(
    ("forward", "problem"),
    [
        ("self, x", "takes 2 positional arguments but 3 were given"),
        ("self, x, y", "the model returned a tensor of shape (2, 3)"),
        ("self, x, y, loss=None: SimpleNamespace(loss=loss) #", "the model returned SimpleNamespace without a loss"),
        ("self, x, y: (x, y) #", "the model returned tuple without a loss"),
        ("self, x, y: {'logits': x} #", "the model returned dict without a loss"),
    ],
)
def test_without_any_loss_the_lines_to_paste_are_given(forward: str, problem: str) -> None:
    body = "" if "#" in forward else ": super(Net, self).forward(x) #"
    text = HEAD + BATCH + "from types import SimpleNamespace\nclass Net(nn.Linear):\n    def __init__(self):\n"
    text += f"        super().__init__(4, 3)\nNet.forward = lambda {forward}{body}\n"
    workload = load(text)
    message = refused(workload.compute_loss, workload.build_model(), workload.make_batch(2))
    assert message.startswith("no loss: ")
    assert problem in message
    _, lines = message.split("paste into model.py, for example:\n\n")
    workload = load(HEAD + MODEL + BATCH + "\n".join(line.removeprefix("    ") for line in lines.splitlines()))
    assert workload.compute_loss(workload.build_model(), workload.make_batch(2)).ndim == 0


def test_a_type_error_inside_the_model_is_the_users() -> None:
    text = (
        HEAD
        + BATCH
        + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)
    def forward(self, x, y):
        return self.inner(x, y)
"""
    )
    workload = load(text)
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
        workload.compute_loss(workload.build_model(), workload.make_batch(2))


TRAINING_STEP = """
class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
    def training_step(self, batch{index}):
        loss = self(batch[0]).sum()
        return {returned}
"""


@pytest.mark.parametrize(("index", "returned"), [(", batch_idx", "loss"), ("", "loss"), ("", "{'loss': loss, 'x': 1}")])
def test_a_training_step_gives_the_loss(index: str, returned: str) -> None:
    workload = load(HEAD + BATCH + TRAINING_STEP.format(index=index, returned=returned))
    assert workload.compute_loss(workload.build_model(), workload.make_batch(2)).ndim == 0


def test_a_module_that_optimizes_by_hand_is_told_what_to_define() -> None:
    text = HEAD + BATCH + TRAINING_STEP.format(index="", returned="loss") + "    automatic_optimization = False\n"
    workload = load(text)
    message = refused(workload.compute_loss, workload.build_model(), workload.make_batch(2))
    assert "Net optimizes by hand" in message
    assert "define compute_loss(model, batch) and build_optimizer(model, lr)" in message


# Data


def test_build_batch_is_called_with_the_batch_size() -> None:
    inputs, targets = load(PLAIN).make_batch(5)
    assert (inputs.shape, targets.shape) == ((5, 4), (5,))


def test_without_build_batch_samples_are_collated() -> None:
    text = HEAD + MODEL + "def build_dataset():\n    return TensorDataset(torch.zeros(3, 4), torch.arange(3))\n"
    inputs, targets = load(text).make_batch(3)
    assert (inputs.shape, sorted(targets.tolist())) == ((3, 4), [0, 1, 2])


@pytest.mark.parametrize("dataset", ["[torch.zeros(4)] * 5", "torch.zeros(5, 4)", "TensorDataset(torch.zeros(5, 4))"])
def test_anything_with_a_length_and_samples_is_a_dataset(dataset: str) -> None:
    workload = load(HEAD + MODEL + f"def build_dataset():\n    return {dataset}\n")
    assert workload.dataset_length == 5
    assert len(workload.make_batch(2)) in (1, 2)


def test_the_batch_is_of_the_largest_samples() -> None:
    workload = load(SENTENCES.format(lengths="[3, 9, 1, 7, 9, 2]"))
    batch = workload.make_batch(3)
    assert batch.shape == (3, 9)
    assert [int(row[0]) for row in batch] == [1, 4, 3]


def test_equal_samples_come_in_their_order() -> None:
    batch = load(SENTENCES.format(lengths="[2] * 50")).make_batch(4)
    assert batch[:, 0].tolist() == [0, 1, 2, 3]


def test_a_batch_larger_than_the_dataset_repeats_the_largest_samples() -> None:
    batch = load(SENTENCES.format(lengths="[1, 3, 2]")).make_batch(7)
    assert batch[:, 0].tolist() == [1, 2, 0, 1, 2, 0, 1]


def test_a_huge_dataset_is_only_sampled() -> None:
    text = SENTENCES.format(lengths="range(1, 100_001)")
    workload = load("reads = []\n" + text.replace("return torch", "reads.append(index)\n        return torch"))
    batch = workload.make_batch(2)
    assert len(set(workload.module.reads)) == 4096
    assert batch.shape[1] > 99_000


def test_batches_are_the_same_in_every_run_and_at_every_call() -> None:
    text = (
        HEAD
        + MODEL
        + """
import random, numpy
torch.rand(int(random.random() * 9))  # at import
class Noise(Dataset):
    def __init__(self):
        self.lengths = torch.randint(1, 30, (100,))
    def __len__(self):
        return 100
    def __getitem__(self, index):
        return torch.full((int(self.lengths[index]),), random.random()) + numpy.random.rand() + torch.rand(1)
def build_dataset():
    return Noise()
def collate_fn(samples):
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)
"""
    )
    first = load(text)
    one, two = first.make_batch(5), first.make_batch(5)
    random.random()
    torch.rand(3)
    three = load(text).make_batch(5)
    assert torch.equal(one, two)
    assert torch.equal(one, three)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("None", "build_dataset() returned None; it must return a torch.utils.data.Dataset"),
        ("torch.utils.data.DataLoader([1, 2])", "build_dataset() returned DataLoader; it must"),
        ("TensorDataset", "build_dataset() returned the class TensorDataset, not an instance; it must"),
        ("(i for i in range(3))", "build_dataset() returned generator; it must"),
        ("(Ten(), Ten())", "build_dataset() returned a tuple of 2 datasets; return the one to train on"),
        ("[Ten(), Ten(), Ten()]", "build_dataset() returned a list of 3 datasets"),
        ("Stream()", "build_dataset() returned an IterableDataset: define build_batch(batch_size) as well"),
        ("[]", "build_dataset() returned a dataset of length 0: nothing to train on"),
        ("torch.zeros(0, 4)", "a dataset of length 0"),
        ("Endless()", "len() of the dataset failed: TypeError"),
    ],
)
def test_build_dataset_must_return_one_dataset_with_samples(returned: str, said: str) -> None:
    text = (
        HEAD
        + MODEL
        + LOSS
        + """
class Ten(Dataset):
    def __len__(self):
        return 10
    def __getitem__(self, index):
        return torch.zeros(4), 1
class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(4), 1
class Endless(Dataset):
    def __getitem__(self, index):
        return torch.zeros(4), 1
"""
    )
    assert said in refused(load, text + f"def build_dataset():\n    return {returned}\n")


def test_a_stream_with_build_batch_has_no_length() -> None:
    text = PLAIN + "class Stream(IterableDataset):\n    def __iter__(self):\n        yield 1\nbuild_dataset = Stream\n"
    assert load(text).dataset_length is None
    assert len(load(text).make_batch(3)[0]) == 3


def test_without_data_the_two_ways_to_give_some_are_named() -> None:
    for text in (HEAD + MODEL, HEAD + MODEL + "build_batch = None\n"):
        assert "neither build_dataset() nor build_batch(batch_size)" in refused(load, text)


@pytest.mark.parametrize("name", ["build_batch(2)", "collate_fn(samples)"])
def test_a_batch_of_none_is_refused(name: str) -> None:
    text = HEAD + MODEL + "def build_dataset():\n    return [1, 2]\n" + f"def {name.split('(')[0]}(_): ...\n"
    assert refused(load(text).make_batch, 2) == f"{name} returned None; it must return a batch"


def test_samples_that_cannot_be_stacked_are_pytorchs_to_refuse() -> None:
    text = SENTENCES.format(lengths="[1, 2]").replace("collate_fn", "collate")
    assert refused(load(text).make_batch, 2).startswith("PyTorch's default collate (there is no collate_fn) failed at ")


def test_a_build_batch_that_ignores_the_batch_size_is_noticed() -> None:
    fixed = PLAIN + "def build_batch(n):\n    return torch.randn(32, 4), torch.randint(3, (32,))\n"
    assert [notice.code for notice in load(fixed).batch_size_notices(2)] == ["batch-size-ignored"]
    assert load(PLAIN).batch_size_notices(2) == []
    for numbers in ("[1] * n", "{'seeds': range(n), 'list': list(range(n))}", "object()"):
        assert load(PLAIN + f"def build_batch(n):\n    return {numbers}\n").batch_size_notices(2) == []


@dataclasses.dataclass
class Pair:
    __slots__ = ("left", "right")
    left: Any
    right: Any


class Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.me = tensor, self

    def size(self) -> int:
        return 7


class Image:
    size = (20, 10)


@pytest.mark.parametrize(
    ("sample", "elements"),
    [
        (torch.zeros(3, 4), 12),
        (numpy.zeros((2, 5)), 10),
        ("text", 4),
        (b"bytes", 5),
        (3.5, 1),
        (None, 1),
        ({"a": torch.zeros(3), "b": [torch.zeros(2), "xy"]}, 7),
        (UserDict(a=torch.zeros(3)), 3),
        (defaultdict(list, a=torch.zeros(3)), 3),
        ((torch.zeros(3), 1), 4),
        (Pair(torch.zeros(3), torch.zeros(5)), 8),
        (Image(), 200),
    ],
)
def test_a_sample_is_as_large_as_its_elements(sample: Any, elements: int) -> None:
    assert num_elements(sample) == elements


def test_an_object_that_holds_itself_is_counted_all_the_same() -> None:
    assert num_elements(Holder(torch.zeros(9))) > num_elements(Holder(torch.zeros(8)))


# More than one call, more than one file


@pytest.mark.parametrize(
    "cache",
    [
        "import functools\n@functools.lru_cache\ndef ones(n):\n    return torch.ones(n)\n",
        "kept = {}\ndef ones(n):\n    return kept.setdefault(n, torch.ones(n))\n",
        "from beside import ones\n",
    ],
)
def test_tensors_that_the_file_caches_are_of_no_harm(cache: str) -> None:
    Path("beside.py").write_text("import functools, torch\nones = functools.lru_cache(torch.ones)\n")
    plan = probe(HEAD + MODEL + BATCH + cache + LOSS.replace("model(x)", "model(x) * ones(3)"))
    assert plan.micro_batch_size == 8
    assert "real-steps" not in [warning.code for warning in plan.warnings]


def test_a_file_without_such_a_cache_is_imported_once() -> None:
    Path("imports").touch()
    probe(PLAIN + "open('imports', 'a').write('x')\n")
    assert Path("imports").read_text() == "x"


def test_two_files_of_one_name_are_two_models() -> None:
    sizes = []
    for width in (5, 7):
        Path(str(width)).mkdir()
        Path(str(width), "parts.py").write_text(f"WIDTH = {width}")
        text = PLAIN + "from parts import WIDTH\ndef build_model():\n    return nn.Linear(4, WIDTH)\n"
        Path(str(width), "model.py").write_text(text)
        sizes.append(gradplan.probe(f"{width}/model.py", device="t4", effective_batch=4).num_parameters)
    assert sizes == [5 * 5, 5 * 7]


def test_the_same_probe_twice_is_the_same_plan() -> None:
    assert to_json(probe(PLAIN)) == to_json(probe(PLAIN))


def test_the_callers_random_numbers_and_settings_stay_as_they_were() -> None:
    for seed in (random.seed, torch.manual_seed, numpy.random.seed):
        seed(123)
    before = (random.getstate(), torch.get_rng_state().tolist(), str(numpy.random.get_state()))
    probe("import torch\ntorch.set_default_dtype(torch.float64)\n" + PLAIN)
    after = (random.getstate(), torch.get_rng_state().tolist(), str(numpy.random.get_state()))
    assert before == after
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(UserCodeError, match="no gradient"):
        probe(PLAIN + "torch.set_grad_enabled(False)\n")
    assert torch.is_grad_enabled()


def test_settings_are_put_back_after_an_error_too() -> None:
    torch.manual_seed(7)
    state = torch.get_rng_state()
    with pytest.raises(UserCodeError):
        probe(PLAIN + "def build_model():\n    return None\n")
    assert torch.equal(torch.get_rng_state(), state)


def test_what_the_users_functions_print_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    text = HEAD + BATCH + LOSS + MODEL
    for name in ("x, y = batch", "return nn.Linear(4, 3)", "return torch.randn(n, 4)"):
        text = text.replace(name, f"print('said')\n    {name}")
    text += "def build_optimizer(model, lr):\n    print('said')\n    return torch.optim.SGD(model.parameters(), lr)\n"
    probe(text)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("said") > 4


def test_a_batch_may_be_any_nest_of_containers() -> None:
    text = (
        HEAD
        + MODEL
        + """
from collections import UserDict, defaultdict, namedtuple
from dataclasses import dataclass
Pair = namedtuple("Pair", "x y")
@dataclass(frozen=True, slots=True)
class Frozen:
    pair: Pair
    name: str = "any"
def build_batch(n):
    made = defaultdict(list)
    made["deep"] = UserDict(frozen=Frozen(Pair(torch.randn(n, 4), torch.randint(3, (n,)))))
    return [made, ("text", 3, None)]
def compute_loss(model, batch):
    x, y = batch[0]["deep"]["frozen"].pair
    assert batch[0]["missing"] == []
    return nn.functional.cross_entropy(model(x), y)
"""
    )
    assert probe(text).micro_batch_size == 8


def test_a_rate_that_is_unknown_is_null_in_the_plan() -> None:
    follows = "def build_optimizer(model, lr):\n    return torch.optim.SGD(model.parameters(), lr / 10)\n"
    plan = probe(PLAIN + follows)
    assert (plan.base_learning_rate, plan.learning_rate) == (None, None)
    assert "no-base-lr" in [warning.code for warning in plan.warnings]
    assert math.isclose(probe(PLAIN + follows, base_lr=0.3).learning_rate or 0, 0.3)


# What only values show


def notices_of(text: str, **options: Any) -> list[str]:
    """Codes of what the probe says about a file."""
    Path("model.py").write_text(text, encoding="utf-8")
    plan = gradplan.probe("model.py", device="rtx-4090", **options)
    return [warning.code for warning in plan.warnings]


VALUES = """
import torch
from torch import nn
BATCH_SIZE, LEARNING_RATE = 16, 0.1
def build_model():
    return nn.Linear(8, 4)
def build_batch(n):
    return torch.randn(n, 8), torch.zeros(n, dtype=torch.long)
def compute_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


def test_a_loss_that_is_a_sum_is_mentioned_and_a_mean_is_not() -> None:
    assert "loss-not-a-mean" not in notices_of(VALUES)
    assert "loss-not-a-mean" in notices_of(VALUES.replace("batch[1])", "batch[1], reduction='sum')"))


def test_a_model_that_refuses_another_batch_size_is_mentioned() -> None:
    stateful = """
class Stateful(nn.Linear):
    size = None
    def forward(self, x):
        self.size = self.size or len(x)
        assert self.size == len(x)
        return super().forward(x)
def build_model():
    return Stateful(8, 4)
"""
    assert "fixed-batch-size" not in notices_of(VALUES)
    assert "fixed-batch-size" in notices_of(VALUES + stateful)


def test_a_rate_that_the_file_does_not_use_is_mentioned() -> None:
    fixed = "def build_optimizer(model, lr):\n    return torch.optim.SGD(model.parameters(), lr=3e-4)\n"
    assert "learning-rate-not-used" in notices_of(VALUES + fixed)
    assert "learning-rate-not-used" not in notices_of(VALUES + fixed.replace("3e-4", "lr"))


def test_the_default_rate_is_called_a_default() -> None:
    assert "learning-rate-default" in notices_of(VALUES.replace(", LEARNING_RATE = 16, 0.1", " = 16"))


def test_bf16_on_a_card_without_it_is_mentioned() -> None:
    Path("model.py").write_text(VALUES, encoding="utf-8")
    for device, is_slow in (("t4", True), ("rtx-4090", False)):
        plan = gradplan.probe("model.py", device=device, precision="bf16-mixed")
        assert ("slow-bf16" in [warning.code for warning in plan.warnings]) is is_slow


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [("None", "build_scheduler returned NoneType"), ("S.ReduceLROnPlateau(optimizer)", "needs a validation loss")],
)
def test_a_scheduler_that_the_script_cannot_step_is_refused(scheduler: str, message: str) -> None:
    text = "from torch.optim import lr_scheduler as S\ndef build_scheduler(optimizer, num_steps):\n    return "
    with pytest.raises(UserCodeError, match=message):
        notices_of(VALUES + text + scheduler)


def test_a_count_that_is_no_number_is_refused() -> None:
    with pytest.raises(UserCodeError, match="count_items"):
        notices_of(VALUES + "def count_items(batch):\n    return None\n")


def test_a_mean_over_no_items_is_not_an_error_where_the_file_counts_them() -> None:
    ignored = VALUES.replace("torch.zeros(n, dtype=torch.long)", "torch.full((n,), -100)")
    with pytest.raises(UserCodeError, match="the loss of the first batch is nan"):
        notices_of(ignored)
    assert "loss-not-a-mean" not in notices_of(ignored + "def count_items(batch):\n    return (batch[1] >= 0).sum()\n")


def test_the_working_folder_is_left_as_it_was(tmp_path: Path) -> None:
    before = Path.cwd()
    notices_of(VALUES + "import os\nos.chdir('/')\n")
    assert Path.cwd() == before


def test_an_absurd_number_of_accumulation_steps_is_refused() -> None:
    with pytest.raises(gradplan.UsageError, match="accumulation steps"):
        notices_of(VALUES, effective_batch=999_999_999, max_micro_batch=1)


SCHEDULES = {
    "torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=num_steps)": True,
    "torch.optim.lr_scheduler.OneCycleLR(optimizer, optimizer.param_groups[0]['lr'], total_steps=num_steps)": False,
    "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)": False,
    "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)": False,
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_with_rates_of_its_own_is_said(schedule: str) -> None:
    workload = load(HEAD + MODEL + BATCH + f"def build_scheduler(optimizer, num_steps):\n    return {schedule}\n")
    model = workload.build_model()
    workload.recipe(model, workload.build_optimizer(model))
    assert any(notice.code == "schedule-sets-rate" for notice in workload.notices) == SCHEDULES[schedule]


def test_the_plan_scales_the_rate_that_the_optimizer_really_has() -> None:
    fixed = "def build_optimizer(model, lr):\n    return torch.optim.SGD(model.parameters(), lr=0.25)\n"
    workload = load(HEAD + MODEL + BATCH + "LEARNING_RATE = 0.5\n" + fixed)
    model = workload.build_model()
    assert workload.recipe(model, workload.build_optimizer(model)).base_learning_rate == 0.25
    assert any(notice.code == "learning-rate-not-used" for notice in workload.notices)
