"""The GPUs that can be simulated: how much memory each one reports, and where that number is from."""

from __future__ import annotations

import difflib
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

from gradplan.probes.errors import UsageError

# Processes that hold no more than a context, in the texts of out-of-memory errors: 471 MiB on an RTX 4090
# (3DTopia/Phidias-Diffusion#8), 414 on an A100 (awslabs/keys_values#92), 256 on an RTX 3090. That is 3.7, 3.8 and 3.1
# for each of their multiprocessors, whose threads' local memory it holds. What the processes themselves hold besides
# PyTorch's own memory, kernels and all, is 479 and 492 MiB on an RTX 4090, 260 to 314 on an RTX 3090.
CONTEXT_BYTES_PER_MULTIPROCESSOR = 4 * 2**20
UNKNOWN_CONTEXT_BYTES = 400 * 2**20
"""Device memory that a process uses before its first tensor: the CUDA context.

About 300 to 400 MiB since CUDA 11.7 loads kernels lazily, which PyTorch asks for by default; more than 1000
MiB before (github.com/pytorch/pytorch, issues 107667 and 109888). The larger number serves for every card,
AMD's too, for which no published reading was found.
"""

COMMON: tuple[str, ...] = (
    "rtx-4060",
    "rtx-3060-12gb",
    "t4",
    "l4",
    "rtx-4090",
    "rtx-5090",
    "a100-40gb",
    "h100-80gb",
    "a100-80gb",
)
"""Slugs of the cards that most people have or rent, in order of memory."""

NOISE_WORDS = frozenset({"nvidia", "geforce", "tesla", "amd", "radeon", "instinct", "gpu", "graphics", "generation"})
SERIES_WORDS = frozenset({"rtx", "gtx", "rx"})


@dataclass(frozen=True)
class Gpu:
    """One card, as gpus.json describes it.

    ``name`` is what the driver reports, so cards sold in several sizes share it; ``other_names`` are those of
    its variants. ``total_bytes`` is the total memory that CUDA or HIP reports, ``nominal_bytes`` the vendor's
    size. ``basis`` says whether the total was "reported" by such a card or "estimated" from similar ones;
    ``source`` quotes the reading or names the vendor's page. ``compute_capability`` is NVIDIA's (major,
    minor), ``architecture`` AMD's gfx name; the other one is None. A card with several devices (A16, MI250,
    MI250X) stands here as one of them.
    """

    slug: str
    name: str
    family: str
    kind: Literal["cuda", "rocm"]
    total_bytes: int
    nominal_bytes: int
    basis: Literal["reported", "estimated"]
    source: str
    compute_capability: tuple[int, int] | None = None
    multiprocessors: int | None = None
    architecture: str | None = None
    other_names: tuple[str, ...] = ()

    @property
    def context_bytes(self) -> int:
        """About what the driver's context and the kernels take of ``total_bytes``."""
        if self.multiprocessors is None:
            return UNKNOWN_CONTEXT_BYTES
        return self.multiprocessors * CONTEXT_BYTES_PER_MULTIPROCESSOR


@cache
def gpus() -> tuple[Gpu, ...]:
    """Every card of the catalogue, by family, then by memory."""
    text = resources.files(__package__).joinpath("gpus.json").read_text(encoding="utf-8")
    return tuple(_gpu(entry) for entry in json.loads(text)["gpus"])


def find(name: str) -> Gpu:
    """The card called ``name``: a slug, a driver's name or a common spelling ("RTX 4090", "rtx4090", "4090").

    Raises UsageError where no card or more than one goes by that name; the message lists the candidates.
    """
    found = _index().get(_key(name), ())
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{name!r} is the name of several GPUs; say which: {_slugs(found)}")
    nearest = _nearest(name)
    hint = f"the nearest are {_slugs(nearest)}; " if nearest else ""
    raise UsageError(f"no GPU is called {name!r}; {hint}'gradplan gpus' lists all")


def _gpu(entry: Mapping[str, object]) -> Gpu:
    fields = {key: entry[key] for key in Gpu.__dataclass_fields__ if key in entry}
    if isinstance(capability := entry.get("compute_capability"), str):
        major, minor = capability.split(".")
        fields["compute_capability"] = (int(major), int(minor))
    if isinstance(others := entry.get("other_names"), list):
        fields["other_names"] = tuple(others)
    return Gpu(**fields)  # type: ignore[arg-type]


@cache
def _index() -> dict[str, tuple[Gpu, ...]]:
    """Key of a spelling -> the cards that go by it. A whole slug names one card, whatever else it spells."""
    index: defaultdict[str, dict[str, Gpu]] = defaultdict(dict)
    for gpu in gpus():
        for spelling in _spellings(gpu):
            index[_key(spelling)][gpu.slug] = gpu
    shared = {key: tuple(cards.values()) for key, cards in index.items()}
    whole = {key: (gpu,) for gpu in gpus() for key in (_key(gpu.slug), gpu.slug.replace("-", ""))}
    return shared | whole


def _spellings(gpu: Gpu) -> Iterator[str]:
    """The driver's names; the slug without its memory ("a100"), with it ("rtx-4090-24gb"), without "rtx"."""
    bare = re.sub(r"-\d+gb$", "", gpu.slug)
    yield from (gpu.name, *gpu.other_names)
    for slug in (bare, f"{bare}-{gpu.nominal_bytes / 2**30:.0f}gb"):
        yield slug
        series, _, model = slug.partition("-")
        if series in SERIES_WORDS:
            yield model


def _key(spelling: str) -> str:
    """Lower-case letters and digits only, without the words that name no model."""
    words = re.findall(r"[a-z0-9]+", spelling.lower())
    return "".join(word for word in words if word not in NOISE_WORDS)


def _nearest(name: str, count: int = 4) -> tuple[Gpu, ...]:
    close = difflib.get_close_matches(_key(name), _index(), n=count)
    return tuple(dict.fromkeys(gpu for key in close for gpu in _index()[key]))[:count]


def _slugs(cards: tuple[Gpu, ...]) -> str:
    return ", ".join(gpu.slug for gpu in cards)
