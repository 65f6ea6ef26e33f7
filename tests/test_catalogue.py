"""The catalogue of GPUs: sound entries, sizes with a source, and names as people type them."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from importlib import resources
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradplan.probes.errors import UsageError
from gradplan.probes.simulator.catalogue import COMMON, UNKNOWN_CONTEXT_BYTES, Gpu, find, gpus

MIB = 2**20
ESTIMATED = [gpu for gpu in gpus() if gpu.basis == "estimated"]


def document() -> dict[str, Any]:
    text = resources.files("gradplan.probes.simulator").joinpath("gpus.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def memory_class(entry: dict[str, Any]) -> str:
    return f"{entry['kind']}-{entry['memory']}"


def error_of(name: str) -> str:
    """What ``find`` complains about; empty where it finds a card."""
    try:
        find(name)
    except UsageError as error:
        return str(error)
    return ""


def test_slugs_are_unique_and_canonical() -> None:
    slugs = [gpu.slug for gpu in gpus()]
    assert len(slugs) == len(set(slugs)) > 100
    assert [slug for slug in slugs if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", slug)] == []


@pytest.mark.parametrize("gpu", gpus(), ids=lambda gpu: gpu.slug)
def test_every_entry_has_a_source_a_believable_size_and_an_architecture(gpu: Gpu) -> None:
    assert gpu.name.strip()
    assert len(gpu.source) > 10
    assert 0.7 * gpu.nominal_bytes <= gpu.total_bytes <= gpu.nominal_bytes
    assert gpu.total_bytes > 4 * gpu.context_bytes
    assert (gpu.compute_capability is not None) == (gpu.kind == "cuda")
    assert (gpu.architecture is not None) == (gpu.kind == "rocm")
    assert gpu.compute_capability is None or (6, 0) <= gpu.compute_capability < (20, 0)
    assert gpu.architecture is None or re.fullmatch(r"gfx[0-9a-f]{3,4}", gpu.architecture)


def test_a_size_in_a_slug_is_the_nominal_size() -> None:
    sized = {gpu: match for gpu in gpus() if (match := re.search(r"-(\d+)gb$", gpu.slug))}
    assert len(sized) > 15
    assert [gpu.slug for gpu, match in sized.items() if gpu.nominal_bytes != int(match[1]) * 2**30] == []


def test_cards_that_share_a_driver_name_differ_in_size_and_say_so() -> None:
    for gpu in gpus():
        twins = [other for other in gpus() if other.name == gpu.name]
        assert len({twin.nominal_bytes for twin in twins}) == len(twins)
        assert len(twins) == 1 or all(re.search(r"-\d+gb$", twin.slug) for twin in twins)


@pytest.mark.parametrize("gpu", ESTIMATED, ids=lambda gpu: gpu.slug)
def test_an_estimate_is_the_least_that_an_equal_card_reports_or_the_share_of_its_class(gpu: Gpu) -> None:
    entries = document()["gpus"]
    mine = next(entry for entry in entries if entry["slug"] == gpu.slug)
    equals = [
        entry["total_bytes"]
        for entry in entries
        if entry["basis"] == "reported"
        and memory_class(entry) == memory_class(mine)
        and entry["nominal_bytes"] == gpu.nominal_bytes
    ]
    share = document()["shares"][memory_class(mine)]
    assert gpu.total_bytes == min(equals, default=int(gpu.nominal_bytes * share) // MIB * MIB)


def test_a_share_is_the_median_of_the_reported_cards_rounded_down() -> None:
    shares, entries = document()["shares"], document()["gpus"]
    assert set(shares) == {memory_class(entry) for entry in entries}
    for name, share in shares.items():
        ratios = [
            entry["total_bytes"] / entry["nominal_bytes"]
            for entry in entries
            if entry["basis"] == "reported" and memory_class(entry) == name
        ]
        assert share == int(100 * statistics.median(ratios)) / 100


@pytest.mark.parametrize(
    ("slug", "total_bytes", "compute_capability"),
    [
        ("t4", 15102 * MIB, (7, 5)),  # Ultralytics banner on Colab
        ("rtx-4090", 24217 * MIB, (8, 9)),  # Ultralytics banner on Linux
        ("rtx-3090", 24260 * MIB, (8, 6)),  # Ultralytics banner, torch 2.1 to 2.3
        ("rtx-3060-12gb", 12622168064, (8, 6)),  # total_memory in the results of Stone-ResearchLife/xMem
        ("rtx-4060", 8318222336, (8, 9)),  # the same
        ("a100-40gb", 42474471424, (8, 0)),  # the same, Colab
        ("a100-80gb", 81153 * MIB, (8, 0)),  # Ultralytics banner, torch 2.7
        ("h100-80gb", int(79.21 * 2**30), (9, 0)),  # OOM text: total capacity of 79.21 GiB
        ("l40s", int(44.39 * 2**30), (8, 9)),  # OOM text: total capacity of 44.39 GiB
    ],
)
def test_totals_are_those_that_were_published(slug: str, total_bytes: int, compute_capability: tuple[int, int]) -> None:
    gpu = find(slug)
    assert (gpu.total_bytes, gpu.compute_capability) == (total_bytes, compute_capability)
    assert gpu.basis == "reported"


def test_cards_come_by_family_then_by_memory() -> None:
    families = list(dict.fromkeys(gpu.family for gpu in gpus()))
    assert list(gpus()) == sorted(gpus(), key=lambda gpu: (families.index(gpu.family), gpu.total_bytes, gpu.slug))


@pytest.mark.parametrize("gpu", gpus(), ids=lambda gpu: gpu.slug)
def test_every_slug_is_found_in_any_case_and_with_spaces_or_nothing_for_hyphens(gpu: Gpu) -> None:
    for spelling in (gpu.slug, gpu.slug.upper(), gpu.slug.replace("-", " "), gpu.slug.replace("-", "")):
        assert find(spelling) is gpu


@pytest.mark.parametrize("gpu", gpus(), ids=lambda gpu: gpu.slug)
def test_a_driver_name_finds_its_card_or_asks_which_size(gpu: Gpu) -> None:
    for name in (gpu.name, *gpu.other_names):
        if error := error_of(name):
            assert "several" in error
            assert gpu.slug in error
        else:
            assert find(name) is gpu


@pytest.mark.parametrize(
    ("spelling", "slug"),
    [
        ("RTX 4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("GeForce RTX 4090 24GB", "rtx-4090"),
        ("  NVIDIA GeForce RTX 4090 ", "rtx-4090"),
        ("RTX 3060 12GB", "rtx-3060-12gb"),
        ("GTX 1060", "gtx-1060-6gb"),
        ("4080 super", "rtx-4080-super"),
        ("Tesla T4", "t4"),
        ("A100 80GB", "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("A6000", "rtx-a6000"),
        ("H100", "h100-80gb"),
        ("RTX PRO 6000", "rtx-pro-6000-blackwell"),
        ("Radeon RX 7900 XTX", "rx-7900-xtx"),
        ("7900xtx", "rx-7900-xtx"),
        ("Instinct MI300X", "mi300x"),
    ],
)
def test_common_spellings_find_their_card(spelling: str, slug: str) -> None:
    assert find(spelling).slug == slug


@pytest.mark.parametrize(
    ("spelling", "candidates"),
    [
        ("A100", ("a100-40gb", "a100-80gb")),
        ("v100", ("v100-16gb", "v100-32gb")),
        ("RTX 3060", ("rtx-3060-8gb", "rtx-3060-12gb")),
        ("4060 ti", ("rtx-4060-ti-8gb", "rtx-4060-ti-16gb")),
    ],
)
def test_a_name_of_several_cards_is_an_error_that_lists_them(spelling: str, candidates: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=f"say which: {', '.join(candidates)}$"):
        find(spelling)


@pytest.mark.parametrize(
    ("spelling", "nearest"), [("RTX 409", "rtx-4090"), ("mi300", "mi300x"), ("4070 Sper", "rtx-4070-super")]
)
def test_an_unknown_name_is_an_error_with_the_nearest_names(spelling: str, nearest: str) -> None:
    with pytest.raises(UsageError, match=rf"the nearest are .*\b{nearest}\b.*'gradplan gpus' lists all"):
        find(spelling)


@pytest.mark.parametrize("spelling", ["", " ", "nvidia", "cuda", "sandwich"])
def test_a_name_like_no_other_is_an_error_without_guesses(spelling: str) -> None:
    with pytest.raises(UsageError, match=r"^no GPU is called '.*'; 'gradplan gpus' lists all$"):
        find(spelling)


@given(st.text())
def test_any_text_is_a_card_or_a_usage_error(text: str) -> None:
    error = error_of(text)
    assert repr(text) in error if error else find(text) in gpus()


def test_common_cards_are_known_by_their_slug_in_order_of_memory() -> None:
    cards = [find(slug) for slug in COMMON]
    assert tuple(card.slug for card in cards) == COMMON
    assert [card.total_bytes for card in cards] == sorted(card.total_bytes for card in cards)


@pytest.mark.parametrize(
    ("slug", "context_mib", "process_mib"), [("rtx-4090", 471, 492), ("rtx-3090", 256, 314), ("a100-40gb", 414, 414)]
)
def test_the_context_leaves_room_for_what_processes_were_seen_to_hold(
    slug: str, context_mib: int, process_mib: int
) -> None:
    allowed = find(slug).context_bytes
    assert context_mib * MIB <= allowed
    assert process_mib * MIB <= allowed <= 1.1 * process_mib * MIB


def test_a_small_card_has_a_small_context() -> None:
    """A run that is published with xMem reserved 7826 MiB on an RTX 4060 of 7933."""
    assert find("rtx-4060").context_bytes <= (7933 - 7826) * MIB


def test_every_nvidia_card_has_its_multiprocessors() -> None:
    for gpu in gpus():
        assert (gpu.multiprocessors is not None) == (gpu.kind == "cuda")
        assert gpu.multiprocessors or gpu.context_bytes == UNKNOWN_CONTEXT_BYTES


def test_the_catalogue_needs_no_torch() -> None:
    code = (
        "import sys; from gradplan.probes.simulator.catalogue import find;find('t4'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
