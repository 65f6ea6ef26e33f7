"""The verbs as functions: model.py -> Workload -> Evidence -> Plan. The command line is their thin face."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import gradplan
from gradplan.plan import Goal, Plan, find_target, make_plan
from gradplan.probes.errors import UsageError
from gradplan.probes.evidence import Evidence, Notice, Precision
from gradplan.probes.simulator.allocator_settings import AllocatorSettings, parse_settings
from gradplan.probes.simulator.catalogue import COMMON, find, gpus

__all__ = ["gpus", "probe"]

DEFAULT_GPU = "rtx-4090"
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
MEASURED = ("cpu",)
NOT_YET_MEASURED = ("cuda", "xpu", "mps", "hip", "rocm")


def probe(
    model: str,
    *,
    device: str | None = None,
    memory_bytes: int | None = None,
    headroom_percent: float = 5.0,
    precision: Precision = "32-true",
    effective_batch: int | None = None,
    base_batch: int | None = None,
    base_lr: float | None = None,
    world_size: int = 1,
    max_micro_batch: int | None = None,
    with_levers: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Find the largest micro-batch of ``model`` (a path, or path:builder) and plan training with it.

    Args:
        device: a GPU's name as in ``gpus()``, simulated; None simulates an ``rtx-4090`` and says what other GPUs
            could hold. "cpu" measures: real training steps in child processes.
        memory_bytes: memory of the device instead of its own, the CUDA context being part of it. For "cpu", of the
            whole training process, instead of what is available now.
        headroom_percent: memory to leave free, 0 to below 100.
        effective_batch: samples of one optimizer step over all ranks; None means the recipe's.
        base_batch, base_lr: the recipe that is known to work, over what the file says.
        world_size: data-parallel ranks.
        max_micro_batch: look no further than this.
        with_levers: also say what changes would do to the largest micro-batch (``evidence.levers``). Takes about
            as long as the probe again; where nothing fits it is always done.
        progress: told in a few words what is being done.

    Raises:
        UserCodeError: the file or its code failed; the message names the user's line.
        UsageError: no such file or device, a count that cannot be.
        DoesNotFitError: not even the smallest micro-batch fits.
    """
    gpu = None if is_measured(device) else find(simulated_name(device))
    if not 0 <= headroom_percent < 100:
        raise UsageError(f"headroom is a share of the memory, from 0 to below 100 percent, not {headroom_percent}")
    progress("importing torch and the model")
    import torch

    from gradplan.probes.batches import settings_kept
    from gradplan.probes.measure import Measurement
    from gradplan.probes.simulate import Simulation
    from gradplan.probes.workload import load_workload

    goal = Goal(effective_batch, world_size, precision, max_micro_batch)
    with settings_kept(), folder_kept() as folder:
        workload = load_workload(model, base_batch, base_lr)
        prober: Measurement | Simulation
        if gpu is None:
            prober = Measurement(workload, precision, memory_bytes, headroom_percent, folder, progress)
        else:
            total_bytes = memory_bytes or gpu.total_bytes
            settings, text = allocator_settings(total_bytes)
            prober = Simulation(workload, gpu, precision, memory_bytes, headroom_percent, progress, settings)
            if text:
                message = f"simulated with PYTORCH_CUDA_ALLOC_CONF={text}: set it for train.py, too"
                workload.notices.append(Notice(code="allocator-settings", message=message))
        if device is None and gpu is not None:
            workload.notices.append(Notice(code="simulated-device", message=_why_simulated(torch, gpu.name)))
        recipe = prober.recipe()
        target = find_target(recipe, goal)
        others = tuple(find(name) for name in COMMON) if device is None else ()
        evidence = prober.gather(target.per_rank, target.at_most, others, with_levers)

        def planned(found: Evidence) -> Plan:
            versions = gradplan.__version__, str(torch.__version__)
            return make_plan(recipe, found, goal, gradplan_version=versions[0], torch_version=versions[1])

        plan = planned(evidence)
        if isinstance(prober, Simulation):
            plan = planned(prober.at_size(evidence, plan.micro_batch_size, plan.accumulation_steps))
    return plan


@contextlib.contextmanager
def folder_kept() -> Iterator[str]:
    """The working folder. Afterwards it is the same again: the user's file may change it."""
    folder = os.getcwd()
    try:
        yield folder
    finally:
        os.chdir(folder)


def allocator_settings(total_bytes: int) -> tuple[AllocatorSettings, str]:
    """What the environment asks of PyTorch's allocator on a GPU of ``total_bytes``, and the text that says so.

    Raises:
        UsageError: PyTorch would refuse it.
    """
    name = next((name for name in ALLOCATOR_VARIABLES if os.environ.get(name)), "")
    text = os.environ.get(name, "")
    try:
        return parse_settings(text, total_bytes), text
    except ValueError as error:
        raise UsageError(f"the environment variable {name}: {error}") from None


def is_measured(device: str | None) -> bool:
    """Whether it is this machine's own, to be measured."""
    return device is not None and device.lower() in MEASURED


def simulated_name(device: str | None) -> str:
    """The catalogue name to simulate.

    Raises:
        UsageError: the device would have to be measured, which this version cannot.
    """
    if device is None:
        return DEFAULT_GPU
    if device.split(":")[0].lower() in NOT_YET_MEASURED:
        raise UsageError(
            f"this version of gradplan simulates GPUs and cannot measure '{device}' yet; name the GPU instead, "
            f"for example --device {DEFAULT_GPU}: 'gradplan gpus' lists them"
        )
    return device


def _why_simulated(torch: object, name: str) -> str:
    has_accelerator = torch.accelerator.is_available()  # type: ignore[attr-defined]
    found = (
        "this version does not measure the accelerator of this machine" if has_accelerator else "no accelerator here"
    )
    return f"{found}: simulated an {name}. --device NAME simulates another; 'gradplan gpus' lists them"
