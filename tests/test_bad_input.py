"""Awkward model.py files at the command line: one clear message, its exit code, and files as they were."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gradplan import cli
from gradplan.probes.batches import settings_kept

HEAD = """
import torch
from torch import nn
from torch.utils.data import Dataset
"""
MODEL = "def build_model():\n    return nn.Linear(4, 3)\n"
BATCH = "def build_batch(n):\n    return torch.randn(n, 4), torch.randint(3, (n,))\n"
LOSS = "def compute_loss(model, batch):\n    x, y = batch\n    return nn.functional.cross_entropy(model(x), y)\n"
RECIPE = "BATCH_SIZE = 8\nLEARNING_RATE = 0.1\n"
GOOD = HEAD + MODEL + BATCH + LOSS + RECIPE
DATA = """
class Data(Dataset):
    def __len__(self):
        return {length}
    def __getitem__(self, index):
        return torch.ones(4), index % 3
def build_dataset():
    return Data()
"""
COLLATE = "def collate_fn(samples):\n    return {}[0]  # here\n"


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


def run(*args: str) -> Result:
    device = () if "--device" in args else ("--device", "t4")
    return CliRunner().invoke(cli.main, ["probe", "model.py", *device, *args], prog_name="gradplan")


def files() -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in Path().rglob("*") if p.is_file() and "__pycache__" not in p.parts}


def place(text: str) -> str:
    """Where the line that ends in ``# here`` is."""
    lines = text.splitlines()
    return f"model.py:{next(i for i, line in enumerate(lines, 1) if line.endswith('# here'))}"


def refused(text: str | bytes, *args: str, exit_code: int = 1) -> str:
    """The message, after a run that failed as promised and changed no file."""
    Path("model.py").write_bytes(text if isinstance(text, bytes) else text.encode())
    before = files()
    result = run(*args)
    assert result.exit_code == exit_code, result.output
    assert files() == before
    assert result.stdout == ""
    details, error, message = result.stderr.rpartition("error: ")
    assert error
    assert "Traceback" not in result.stderr
    assert "gradplan/probes" not in details.replace("\\", "/")
    assert "mistake in gradplan" not in message
    return message.rstrip()


# No model


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"\x7fELF\x01\x00", "model.py"),
        ("", "found no nn.Module in it"),
        ("def f(:", "model.py:1 is not valid Python: "),
        ("import sys\nsys.exit('no data')", "model.py failed at model.py:2: SystemExit: no data"),
        ("def f():\n    return 1 / 0\nf()", "model.py failed at model.py:2: ZeroDivisionError: division by zero"),
        (HEAD + "class A(nn.Linear): ...\n" + BATCH, "found A. Write for example: def build_model()"),
        (HEAD + "class A(nn.ReLU): ...\nclass B(A): ...\n", "found A, B. Write for example: gradplan probe model.py:A"),
        (GOOD + "def build_model(): ...", "build_model() returned None; it must return one torch.nn.Module"),
        (GOOD + "def build_model():\n    return nn.ReLU()", "no parameter requires grad: nothing to train"),
    ],
)
def test_a_file_without_a_model(text: str | bytes, said: str) -> None:
    assert said in refused(text)


def test_a_file_that_is_not_there_is_wrong_usage() -> None:
    result = run()
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: there is no file model.py\n"


def test_a_name_that_is_not_in_the_file() -> None:
    Path("model.py").write_text(GOOD)
    result = CliRunner().invoke(cli.main, ["probe", "model.py:small", "--device", "t4"], prog_name="gradplan")
    assert (result.exit_code, result.stderr) == (1, "error: model.py has no small; it has build_model\n")


# Each of the user's functions, when it raises


@pytest.mark.parametrize(
    ("head", "function"),
    [
        ("build_model()", "build_model()"),
        ("build_batch(n)", "build_batch(2)"),
        ("compute_loss(model, batch)", "a training step with a micro-batch of 2"),
        ("build_optimizer(model, lr)", "build_optimizer(model, lr)"),
        ("build_dataset()", "build_dataset()"),
    ],
)
def test_an_exception_of_the_user_is_shown_with_their_line(head: str, function: str) -> None:
    text = GOOD + f"def {head}:\n    raise OSError('the disk\\nis full')  # here\n"
    assert refused(text) == f"{function} failed at {place(text)}: OSError: the disk is full"


@pytest.mark.parametrize(
    ("data", "function", "error"),
    [
        (DATA.format(length="{}[0]  # here"), "len() of the dataset", "KeyError: 0"),
        (DATA.format(length=9).replace("index % 3", "{}[0]  # here"), "the dataset", "KeyError: 0"),
        (DATA.format(length=9) + COLLATE, "collate_fn(samples)", "KeyError: 0"),
    ],
)
def test_an_exception_of_their_dataset_is_shown_with_their_line(data: str, function: str, error: str) -> None:
    text = HEAD + MODEL + LOSS + data
    assert refused(text) == f"{function} failed at {place(text)}: {error}"


def test_an_exception_in_forward_is_shown_with_their_line() -> None:
    text = HEAD + BATCH + LOSS + "class Net(nn.Linear):\n    def __init__(self):\n        super().__init__(4, 3)\n"
    text += "    def forward(self, x):\n        return super().forward(x.view(7))  # here\n"
    assert f" micro-batch of 2 failed at {place(text)}: RuntimeError: shape" in refused(text)


# The loss


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("(loss, 1)", "compute_loss returned a tuple of 2; yield the losses one by one"),
        ("{'loss': loss}", "compute_loss returned a dict of 1; yield the losses one by one"),
        ("[loss]", "compute_loss returned a list of 1; yield the losses one by one"),
        ("None", "compute_loss gave NoneType; it must be one scalar tensor"),
        ("loss.item()", "compute_loss gave float; it must be one scalar tensor"),
        ("model(x)", "compute_loss gave a tensor of shape (2, 3); it must be one scalar"),
        ("loss.detach()", "the loss has no gradient: it does not depend on a parameter"),
        ("x.sum()", "the loss has no gradient"),
        ("(loss.argmax())", "the loss has no gradient"),
        ("loss * float('nan')", "the loss of the first batch is nan; training from here cannot work"),
        ("loss / 0", "the loss of the first batch is inf"),
        ("(loss * (y > 9)).sum() / (y > 9).sum()", "the loss of the first batch is nan"),
        ("nn.functional.cross_entropy(model(x), y + 3)", "failed at model.py:14: IndexError: Target 3 is out of"),
    ],
)
def test_a_loss_must_be_one_finite_scalar_with_a_gradient(returned: str, said: str) -> None:
    text = LOSS.replace("return ", "loss = ") + f"    return {returned}\n"
    assert said in refused(HEAD + MODEL + BATCH + RECIPE + text)


def test_a_loss_that_reads_values_must_be_finite_too() -> None:
    text = LOSS.replace("return ", "loss = ") + "    return loss * float('nan') if loss.item() < 99 else loss\n"
    assert "the loss of the first batch is nan" in refused(HEAD + MODEL + BATCH + text)


def test_without_a_loss_the_message_ends_in_lines_to_paste() -> None:
    assert "def compute_loss(model, batch):\n" in refused(HEAD + MODEL + BATCH)


# The data


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (DATA.format(length=0), "a dataset of length 0: nothing to train on"),
        ("def build_dataset(): ...", "build_dataset() returned None; it must return a torch.utils.data.Dataset"),
        ("", "model.py has neither build_dataset() nor build_batch(batch_size)"),
        (DATA.format(length=3) + "BATCH_MULTIPLE = 4\n", "the dataset has 3 samples, too few for a micro-batch of 4"),
    ],
)
def test_a_dataset_must_hold_a_micro_batch(text: str, said: str) -> None:
    assert said in refused(HEAD + MODEL + LOSS + RECIPE + text)


@pytest.mark.parametrize("length", [1, 3])
def test_a_dataset_shorter_than_the_batch_limits_it_aloud(length: int) -> None:
    Path("model.py").write_text(HEAD + MODEL + LOSS + RECIPE + DATA.format(length=length))
    result = run("--json")
    assert result.exit_code == 0
    assert f'"effective_batch_size": {length},' in result.stdout
    assert '"limited_by": "dataset"' in result.stdout
    samples = "1 sample" if length == 1 else f"{length} samples"
    note = f"note: the dataset has {samples}, fewer than the effective batch of 8: planned for {length}\n"
    assert note in result.stderr


# The numbers


@pytest.mark.parametrize("constant", ["BATCH_SIZE = 0", "BATCH_SIZE = -3", "BATCH_SIZE = '32'", "BATCH_SIZE = True"])
def test_a_batch_size_that_is_none(constant: str) -> None:
    name, value = constant.split(" = ")
    assert refused(GOOD + constant) == f"{name} is {value}; it must be a positive whole number"


def test_a_learning_rate_that_is_no_number() -> None:
    assert refused(GOOD + "LEARNING_RATE = float('nan')") == "LEARNING_RATE is nan; it must be a positive number"


@pytest.mark.parametrize(
    ("option", "value"),
    [("--memory", "12XB"), ("--memory", "0"), ("--effective-batch", "-3"), ("--base-lr", "nan"), ("--device", "rtx-4")],
)
def test_an_option_that_cannot_be_is_wrong_usage(option: str, value: str) -> None:
    assert value in refused(GOOD, option, value, exit_code=2)


# What is there already


def test_what_does_not_fit_ends_in_3_and_says_what_would() -> None:
    message = refused(GOOD, "--memory", "500MiB", "--device", "rtx-4090", exit_code=3)
    assert "of 500 MiB, the CUDA context is counted as 512 MiB" in message
    message = refused(GOOD, "--memory", "513MiB", "--device", "rtx-4090", exit_code=3)
    assert "a micro-batch of 1 " in message
    assert "What can make it fit: " in message


def test_a_path_that_cannot_be_written_is_found_before_any_work() -> None:
    text = GOOD + "raise SystemError('work was done')\n"
    for option in ("--plan", "--script"):
        assert f"there is no folder {Path('nowhere').resolve()}" in refused(text, option, "nowhere/file", exit_code=2)
    Path("taken").mkdir()
    assert refused(text, "--script", "taken", exit_code=2) == "cannot write taken: it is a folder"


def test_somebodys_own_train_py_is_kept() -> None:
    Path("train.py").write_text("print('mine')\n")
    assert "train.py is there already, and gradplan did not write it" in refused(GOOD, exit_code=2)


def test_an_error_leaves_the_plan_and_the_script_of_the_last_success() -> None:
    Path("model.py").write_text(GOOD)
    assert run().exit_code == 0
    assert {"gradplan.json", "train.py"} <= files().keys()
    refused(GOOD + "def compute_loss(model, batch):\n    return None\n")
