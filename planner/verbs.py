"""The verbs as functions: model.py -> Workload -> Evidence -> Plan. The command line is their thin face."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import gradplan
from gradplan.plan import Goal, Plan, find_target, make_plan
from gradplan.probes.errors import UsageError
from gradplan.probes.evidence import Evidence, Notice, Precision
from gradplan.probes.launch import launch
from gradplan.probes.simulator.allocator_settings import settings_of_environment
from gradplan.probes.simulator.catalogue import COMMON, Gpu, find, gpus

__all__ = ["gpus", "probe"]

DEFAULT_GPU = "rtx-4090"
MEASURED = ("cpu", "cuda", "xpu", "mps")
OTHER_NAMES = {"hip": "cuda", "rocm": "cuda"}  # as torch calls them
INVENTED = "test:"
WHY_SIMULATED = "no accelerator here: simulated an {name}. --device NAME simulates another; 'gradplan gpus' lists them"


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
        device: "cuda", "cuda:1", "xpu", "mps" or "cpu", measured: real training steps in a child process. A GPU's
            name as in ``gpus()``, simulated. ``test:FILE``, an invented one. None measures the accelerator of this
            machine; where there is none, it simulates an ``rtx-4090`` and says what other GPUs could hold.
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
    gpu = None if device is None or is_measured(device) else simulated(device)
    if not 0 <= headroom_percent < 100:
        raise UsageError(f"headroom is a share of the memory, from 0 to below 100 percent, not {headroom_percent}")
    progress("importing torch and the model")
    import torch

    from gradplan.probes.batches import settings_kept
    from gradplan.probes.measure import Measurement
    from gradplan.probes.simulate import Simulation
    from gradplan.probes.workload import load_workload

    started, world_size = launch(), num_ranks(world_size)
    here = None if gpu else device_here(device) if device else accelerator_here()
    goal = Goal(effective_batch, world_size, precision, max_micro_batch)
    with settings_kept(), folder_kept() as folder:
        workload = load_workload(model, base_batch, base_lr)
        prober: Measurement | Simulation
        if here is not None:
            prober = Measurement(
                workload, here, precision, memory_bytes, headroom_percent, world_size, started, folder, progress
            )
        else:
            gpu = gpu or find(DEFAULT_GPU)
            total_bytes = memory_bytes or gpu.total_bytes
            settings, text = settings_of_environment(total_bytes)
            prober = Simulation(workload, gpu, precision, memory_bytes, headroom_percent, progress, settings)
            if text:
                message = f"simulated with PYTORCH_CUDA_ALLOC_CONF={text}: set it for train.py, too"
                workload.notices.append(Notice(code="allocator-settings", message=message))
            if device is None:
                workload.notices.append(Notice(code="simulated-device", message=WHY_SIMULATED.format(name=gpu.name)))
        recipe = prober.recipe()
        target = find_target(recipe, goal)
        others = tuple(find(name) for name in COMMON) if device is None and here is None else ()
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


def num_ranks(asked: int) -> int:
    """As torchrun says where it started this process, else as asked for.

    Raises:
        UsageError: both speak, of different numbers.
    """
    started = launch().num_ranks
    if started > 1 and asked not in (1, started):
        raise UsageError(f"torchrun started {started} processes, and --world-size says {asked}")
    return max(asked, started)


def is_first_rank() -> bool:
    """Whether this process speaks for all that torchrun started."""
    return launch().is_first


def simulated(device: str) -> Gpu:
    """The GPU of that name.

    Raises:
        UsageError: there is none.
    """
    try:
        return find(device)
    except UsageError as error:
        raise UsageError(f"{error}. On this machine, {', '.join(MEASURED)} are measured, where they are here") from None


def is_measured(device: str) -> bool:
    """Whether it is this machine's own, to be measured, or one that is invented for tests."""
    kind = device.split(":")[0].lower()
    return kind in (*MEASURED, *OTHER_NAMES) or device.startswith(INVENTED)


def is_trained_on(device: str | None) -> bool:
    """Whether train.py can be run on that device here."""
    return device is not None and is_measured(device) and not device.startswith(INVENTED)


def accelerator_here() -> str | None:
    """The accelerator of this machine, as torch calls it."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def device_here(device: str) -> str:
    """That device of this machine, as torch calls it.

    Raises:
        UsageError: this machine has no such device.
    """
    if device.startswith(INVENTED):
        from gradplan.probes.measuring.invented import read_device

        read_device(device.removeprefix(INVENTED))
        return device
    import torch

    kind, _, number = device.lower().partition(":")
    torch_kind = OTHER_NAMES.get(kind, kind)
    if number and not number.isdecimal():
        raise UsageError(f"'{device}' names no device: write {kind}, or {kind}:1 for the second one")
    if torch_kind == "cpu":
        return "cpu"
    is_other_build = kind in OTHER_NAMES and torch.version.hip is None
    if accelerator_here() != torch_kind or is_other_build:
        raise UsageError(
            f"no '{kind}' here that this torch ({torch.__version__}) can use. To plan for a GPU that is not here, name "
            f"it: --device {DEFAULT_GPU}; 'gradplan gpus' lists them"
        )
    if number and int(number) >= (num_devices := torch.accelerator.device_count()):
        raise UsageError(f"no '{device}' here: there are {num_devices}, counted from 0")
    return f"{torch_kind}:{int(number)}" if number else torch_kind
