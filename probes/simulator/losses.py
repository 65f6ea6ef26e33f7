"""What shapes do not show of a loss: is it finite, a mean, the sum of independent graphs? Small real steps tell."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gradplan.probes import step
from gradplan.probes.batches import seed_everything
from gradplan.probes.errors import UserCodeError
from gradplan.probes.evidence import Notice
from gradplan.probes.loading import describe, user_code
from gradplan.probes.simulator.building import fake_copy, fake_models, is_fake, new_mode, own_copy
from gradplan.probes.simulator.semantics import eager
from gradplan.probes.workload import Workload

VALUE_CHECK_BYTES = 256 * 2**20  # a step this small is also run for real: fake tensors cannot be NaN
GROWTH = 1.3  # twice the samples: a sum doubles, and a contrastive loss grows by log(2n - 1)
SAME_GRADIENT = 1e-4  # relative, in float32; another loss than the sum is off by far more
FIXED_SIZE = (
    "the model refuses a batch of another size after its first: where the sizes of a window differ, or the dataset "
    "leaves a short one, train.py fails"
)
NOT_A_MEAN = (
    "the loss of {large} samples is {ratio:.1f} times that of {small}: if it is no mean over samples, accumulated "
    "micro-batches are not equal to the whole batch. Return a mean, and count_items where it is one over items"
)
EVALUATION = (
    "compute_loss cannot be evaluated without gradients: after the last yield, write 'if cut.grad is not None:' before "
    "what carries the gradient back"
)
CUT = """{where}compute_loss yields losses whose graphs share {trunk}: the backward of the first frees
what the second needs. Cut the graph at the output of what they share, and carry the gradient back after the last yield:

    features = model.trunk(inputs)
    cut = features.detach().requires_grad_()
    yield first_loss(model.first(cut), targets)
    yield second_loss(model.second(cut), targets)
    if cut.grad is not None:  # in evaluation there is none
        features.backward(cut.grad)"""


def check_values(workload: Workload, unit: int) -> list[Notice]:
    """Run the loss on 2, 4 and 8 ``unit`` samples; what is odd about it.

    Raises:
        UserCodeError: the loss is not finite, or fails on real tensors.
    """
    notices = []
    with eager():
        seed_everything()
        model = own_copy(workload.build_model())
        small = _value(workload, model, 2 * unit)
        try:
            medium = _value(workload, model, 4 * unit)
        except UserCodeError:
            model = own_copy(workload.build_model())
            medium = _value(workload, model, 4 * unit)
            notices.append(Notice(code="fixed-batch-size", message=FIXED_SIZE))
            model = own_copy(workload.build_model())
        large = _value(workload, model, 8 * unit)
        if workload.yields_losses:
            notices += _evaluation_notices(workload, model, 2 * unit)
    (first, small_losses), (second, medium_losses), (third, large_losses) = small, medium, large
    has_same_losses = small_losses == medium_losses == large_losses
    if has_same_losses and first > 0 and second > GROWTH * first and third > GROWTH * second:
        message = NOT_A_MEAN.format(large=8 * unit, small=2 * unit, ratio=third / first)
        notices.append(Notice(code="loss-not-a-mean", message=message))
    return notices


def _value(workload: Workload, model: nn.Module, size: int) -> tuple[float, list[float]]:
    """The loss, or the sum of several, and which have items: a mean over none is no number, and train.py skips it."""
    batch = workload.make_batch(size)
    shares = [float(count > 0) for count in workload.count_items(batch) or [1.0]]
    if not any(shares):
        return 0.0, shares
    run = step.run_loss_by_loss if workload.yields_losses else step.run_losses_together
    with user_code("compute_loss(model, batch)"):
        value = float(run(model, batch, workload.compute_loss, shares, nullcontext()))
    if not math.isfinite(value):
        raise UserCodeError(
            f"the loss of the first batch is {value}; training from here cannot work. Look for a division by "
            "zero, a log of zero, or a batch without targets"
        )
    return value, shares


def _evaluation_notices(workload: Workload, model: nn.Module, size: int) -> list[Notice]:
    """Whether several losses can be evaluated: there is no gradient then that could be carried back."""
    try:
        step.evaluate(
            model, [(workload.make_batch(size), [1.0])], workload.compute_loss_to_evaluate, torch.device("cpu")
        )
    except Exception as error:
        return [Notice(code="evaluation-fails", message=f"{EVALUATION} ({describe('it', error)[0]})")]
    return []


def is_exact_loss_by_loss(workload: Workload, unit: int) -> bool:
    """Whether a backward after each loss gives the gradients of their sum, on a small real batch."""
    joint, by_loss = (_gradient(workload, unit, run) for run in (step.run_losses_together, step.run_loss_by_loss))
    if [one is None for one in joint] != [one is None for one in by_loss]:
        return False
    pairs = [(one, other) for one, other in zip(joint, by_loss, strict=True) if one is not None and other is not None]
    difference = sum(float((one - other).double().square().sum()) for one, other in pairs)
    return difference <= SAME_GRADIENT**2 * sum(float(one.double().square().sum()) for one, _ in pairs)


def _gradient(workload: Workload, unit: int, run: Any) -> list[Tensor | None]:
    with eager():
        seed_everything()
        model = own_copy(workload.build_model())
        batch = workload.make_batch(2 * unit)
        seed_everything()
        with user_code("compute_loss(model, batch)"):
            run(model, batch, workload.compute_loss, 1.0, nullcontext())
    return [parameter.grad for parameter in model.parameters()]


# Losses that share a graph


def is_second_backward(error: BaseException) -> bool:
    """Whether a backward met a graph that an earlier one had freed."""
    return isinstance(error, RuntimeError) and "backward through the graph a second time" in str(error)


def explain_shared_graph(workload: Workload, size: int) -> None:
    """Look for a graph that two losses of one batch share; nothing where there is none.

    Raises:
        UserCodeError: they do; it names the modules, and shows how to cut.
    """
    mode = new_mode()
    with fake_models(mode), torch.random.fork_rng(devices=[]):
        model = workload.build_model()
        model = model if is_fake(model) else fake_copy(model, mode)
        losses = list(workload.compute_loss(model, workload.make_batch(size)))
        names = shared_parameters(model, losses)
    if names is not None:
        raise UserCodeError(CUT.format(where=workload.line_of("compute_loss"), trunk=_described(model, names)))


def shared_parameters(model: nn.Module, losses: Iterable[Tensor]) -> list[str] | None:
    """Names of the parameters behind what the graphs share; None where they share none but parameters themselves."""
    seen: set[Any] = set()
    shared: set[Any] = set()
    for loss in losses:
        nodes = _nodes(loss.grad_fn)
        shared |= seen & nodes
        seen |= nodes
    if not any(not hasattr(node, "variable") for node in shared):
        return None
    leaves = {leaf.variable for node in shared for leaf, _ in node.next_functions if hasattr(leaf, "variable")}
    return [name for name, parameter in model.named_parameters() if any(parameter is leaf for leaf in leaves)]


def _nodes(root: Any) -> set[Any]:
    found, pending = set(), [root]
    while pending:
        node = pending.pop()
        if node is not None and node not in found:
            found.add(node)
            pending += [following for following, _ in node.next_functions]
    return found


def _described(model: nn.Module, names: list[str]) -> str:
    """``model.trunk``: the largest modules all of whose parameters are among ``names``."""
    modules: list[str] = []
    for path, module in model.named_modules():
        inside = [f"{path}.{name}" if path else name for name, _ in module.named_parameters()]
        is_known = any(path == known or path.startswith(f"{known}.") for known in modules)
        if path and inside and not is_known and {*inside} <= {*names}:
            modules.append(path)
    found = [f"model.{path}" for path in modules] or [f"model.{name}" for name in names] or ["a part"]
    return ", ".join(found[:3]) + (" and more" if len(found) > 3 else "")
