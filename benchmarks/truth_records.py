"""Records in the format of measured.json: what each one is, and the script that rebuilds it.

A record's family, model, shape, type and optimizer choose the script, so that others of the same kind rebuild alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truth_decoders import SHAPES, Shape
from truth_gpt import VOCAB_SIZE, Variant, gpt_script
from truth_images import (
    Fabric,
    Network,
    OptimizerOf,
    Script,
    gpumemnet_cnn,
    low_bit_adam,
    optimizer_of,
    optimizer_tutorial,
    timm_benchmark,
    timm_model,
    timm_sample_shape,
    timm_training,
    torchvision_model,
    vit_finetuning,
)
from truth_loops import BEFORE_FORWARD, xmem_script
from truth_micro import Sizes, micro_script
from truth_models import MODELS
from truth_release import Release
from truth_text import Recipe as TuneRecipe
from truth_text import Trainer, bert_large, full_finetuning, lora_finetuning

from gradplan.probes.errors import UsageError
from gradplan.probes.simulator.catalogue import Gpu, find

ScriptOf = Callable[[int], Script]  # for a batch size; for a microbenchmark, the size that it varies


NUM_TUNE_ROWS = 4  # of torchtune's table: packed, compiled, chunked loss, checkpointed; then its own optimizers


class NotRebuilt(Exception):  # noqa: N818 - an answer, no mistake
    """Why a record cannot be rebuilt here."""


@dataclass(frozen=True)
class Record:
    """One published measurement, as its file has it; sizes in MiB."""

    fields: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        return self.fields.get(name)

    @property
    def text(self) -> str:
        """All that the record says of how it was run."""
        return json.dumps(self.fields)

    @property
    def release(self) -> Release:
        """The release of torch that it ran on."""
        return Release.of(str(self.torch))

    @property
    def batches(self) -> list[int]:
        """The batch sizes, or those of the size that a microbenchmark varies."""
        value = self.batch_size
        if isinstance(value, Mapping):
            value = next(iter(value.values()))
        return [int(size) for size in value] if isinstance(value, list) else [int(value)]

    @property
    def measured(self) -> list[float]:
        """MiB, one for each of ``batches``; none where only a verdict is known."""
        value = self.measured_mib
        return [] if value is None else list(value) if isinstance(value, list) else [value]

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """Channels, height and width; the model's own where the record leaves them to it."""
        shape = self.input_shape[1:]
        if all(isinstance(size, int) for size in shape):
            return shape[0], shape[1], shape[2]
        return timm_sample_shape(self.model)

    @property
    def gpu(self) -> Gpu | None:
        """The card of the catalogue; None where the record names none. Of several, the last."""
        text = re.sub(r"\(.*", "", str(self.fields["gpu"])).split(" AND ")[-1].strip()
        for name in (text, f"{text} 40GB", f"{text} 80GB"):
            try:
                return find(name)
            except UsageError:
                continue
        return None

    @property
    def capability(self) -> tuple[int, int]:
        """CUDA's, by default an A100's."""
        gpu = self.gpu
        return (8, 0) if gpu is None or gpu.compute_capability is None else gpu.compute_capability

    @property
    def precision(self) -> str:
        """As Lightning names it: "32-true", "16-mixed", "bf16-mixed" or "bf16-true"."""
        text = str(self.dtype).lower()
        if text.startswith("fp32"):
            return "32-true"
        kind = "bf16" if "bf16" in text else "16"
        is_mixed = any(word in text for word in ("autocast", "amp", "mixed"))
        return f"{kind}-{'mixed' if is_mixed else 'true'}"


def read_records(path: Path) -> list[Record]:
    """The records of a file in the format of measured.json."""
    return [Record(fields) for fields in json.loads(path.read_text(encoding="utf-8"))]


def script_of(record: Record) -> ScriptOf:
    """The script that a record was measured with, by batch size.

    Raises:
        NotRebuilt: and why.
    """
    for is_kind, rebuild in KINDS:
        if is_kind(record):
            return rebuild(record)
    raise NotRebuilt(f"no script for the family {record.family}")


def _micro(record: Record) -> ScriptOf:
    if "Focus" in record.model:
        size = record.input_shape[-1]
        return lambda batch_size: micro_script("focus", Sizes({"B": batch_size, "size": size}))
    varied = next(iter(record.batch_size))
    return lambda size: micro_script(record.model, Sizes({**record.input_shape, varied: size}))


def _gpt(record: Record) -> ScriptOf:
    number = int(re.findall(r"\d+", record.id)[-1])
    variant = Variant(number, record.vocab or VOCAB_SIZE)
    return lambda batch_size: gpt_script(variant, batch_size)


def _optimizer(record: Record) -> OptimizerOf:
    try:
        return optimizer_of(record.optimizer, record.release)
    except ValueError:
        if "unknown" in record.optimizer:
            return optimizer_of("sgd with momentum", record.release)  # the script's default
        raise NotRebuilt(f"no optimizer of torch in {record.optimizer!r}") from None


def _torchvision(record: Record) -> Network:
    found = re.search(r"nn\.Linear\(\d+, ?(\d+)\)", record.rebuild)
    return Network(torchvision_model(record.model, int(found[1]) if found else 1000), record.sample_shape)


def _timm(record: Record) -> Network:
    name = re.search(r"create_model\('([^']+)'", record.rebuild)
    classes = re.search(r"num_classes=(\d+)", record.rebuild)
    model = timm_model(
        name[1] if name else record.model,
        record.release,
        int(classes[1]) if classes else None,
        "checkpointing" in record.rebuild,
        record.sample_shape[-1],
    )
    return Network(model, record.sample_shape)


def _vit(record: Record) -> ScriptOf:
    if re.search(r"fsdp|offload", record.text, re.IGNORECASE):
        raise NotRebuilt("runs on several GPUs")
    found = re.search(r"accumulation (\d+)", str(record.note))
    fabric = Fabric(record.precision, int(found[1]) if found else 1)
    network, optimizer = _torchvision(record), _optimizer(record)
    return lambda batch_size: vit_finetuning(network, optimizer, batch_size, fabric)


def _cnn(record: Record) -> ScriptOf:
    network = _timm(record) if "timm" in record.rebuild else _torchvision(record)
    optimizer = _optimizer(record)
    return lambda batch_size: gpumemnet_cnn(network, optimizer, batch_size)


def _timm_training(record: Record) -> ScriptOf:
    network, optimizer = _timm(record), _optimizer(record)
    return lambda batch_size: timm_training(network, optimizer, batch_size)


def _timm_benchmark(record: Record) -> ScriptOf:
    network, optimizer, is_mixed = _timm(record), _optimizer(record), record.precision == "16-mixed"
    return lambda batch_size: timm_benchmark(network, optimizer, batch_size, is_mixed)


def _low_bit_adam(record: Record) -> ScriptOf:
    if re.search(r"8bit|4bit|fp8|offload|deepspeed", record.optimizer, re.IGNORECASE):
        raise NotRebuilt(f"the optimizer is none of torch: {record.optimizer}")
    network, optimizer = _timm(record), _optimizer(record)
    return lambda batch_size: low_bit_adam(network, optimizer, batch_size, record.precision)


def _tutorial(record: Record) -> ScriptOf:
    network, optimizer = _torchvision(record), _optimizer(record)
    return lambda batch_size: optimizer_tutorial(network, optimizer, batch_size)


def _xmem(record: Record) -> ScriptOf:
    optimizer = re.search(r"torch\.optim\.(\w+)", record.optimizer)
    if record.model not in MODELS or optimizer is None:
        raise NotRebuilt(f"no such model or optimizer: {record.model}, {record.optimizer}")
    return lambda batch_size: xmem_script(MODELS[record.model], optimizer[1], BEFORE_FORWARD, batch_size)


def _lora(record: Record) -> ScriptOf:
    if "bnb" in record.text:
        raise NotRebuilt("quantized by bitsandbytes")
    shape, optimizer, length = _shape(record), _optimizer(record), record.input_shape[1]
    return lambda batch_size: lora_finetuning(shape, optimizer, batch_size, length)


def _shape(record: Record) -> Shape:
    wanted = _letters(record.model)
    for name, shape in SHAPES.items():
        if _letters(name) == wanted:
            return shape
    raise NotRebuilt(f"the sizes of {record.model} are not written down")


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _torchtune(record: Record) -> ScriptOf:
    row = int(record.id.rsplit("-", 1)[-1])
    if row > NUM_TUNE_ROWS:
        raise NotRebuilt(f"not rebuilt: {record.note}")
    shape, length = _shape(record), record.input_shape[1]
    optimizer = optimizer_of("torch.optim.AdamW(fused=True)", record.release)  # as its configurations have it
    recipe = TuneRecipe(has_chunked_loss=row >= 3, is_checkpointed=row >= 4)
    return lambda batch_size: full_finetuning(shape, optimizer, batch_size, length, recipe)


def _bert(record: Record) -> ScriptOf:
    if "bitsandbytes" in record.optimizer:
        raise NotRebuilt("its optimizer is of bitsandbytes")
    note = str(record.note)
    trainer = Trainer(
        record.precision,
        4 if re.search(r"GA4|accumulation 4", note) else 1,
        bool(re.search(r"\bGC\b|checkpointing", note)),
        "adafactor" if "Adafactor" in record.optimizer else "adamw",
    )
    length = record.input_shape[1]
    return lambda batch_size: bert_large(batch_size, length, trainer)


def _refused(reason: str) -> Callable[[Record], ScriptOf]:
    def refuse(record: Record) -> ScriptOf:
        raise NotRebuilt(reason)

    return refuse


def _begins(*prefixes: str) -> Callable[[Record], bool]:
    return lambda record: str(record.id).startswith(prefixes)


def _of(family: str) -> Callable[[Record], bool]:
    return lambda record: bool(record.family == family)


KINDS: list[tuple[Callable[[Record], bool], Callable[[Record], ScriptOf]]] = [
    (_begins("xmem"), _xmem),
    (_of("microbench"), _micro),
    (_begins("rasbt-gpt"), _gpt),
    (_begins("rasbt-vit"), _vit),
    (_begins("gpumemnet-timm"), _timm_training),
    (_of("GPUMemNet-CNN"), _cnn),
    (_of("timm-fit"), _timm_benchmark),
    (_begins("torchao"), _low_bit_adam),
    (_begins("pt-tutorial"), _tutorial),
    (_begins("litgpt"), _lora),
    (_begins("hf-bert"), _bert),
    (_begins("torchtune"), _torchtune),
    (_begins("peft"), _refused("batches of variable length, and a text generated from 50 samples at once")),
    (_begins("torchtitan"), _refused("runs on several GPUs")),
]
