"""Sizes of memory: what is read, what is refused, what is printed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradplan.probes.errors import UsageError
from gradplan.units import format_bytes, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("24GiB", 24 * 2**30),
        ("8GB", 8 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5 GiB", 3 * 2**29),
        ("0.1GB", 10**8),
        ("  16gib ", 16 * 2**30),
        ("2TB", 2 * 10**12),
        ("1TiB", 2**40),
        ("4KB", 4000),
        ("4KiB", 4096),
        ("300MB", 300 * 10**6),
        ("4096B", 4096),
        ("1.9B", 1),
    ],
)
def test_sizes_are_bytes(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        *("0", "-3", "12XB", "", " ", "nan", "nanGiB", "infGB", "0GiB", "0.0MB", "0.5B", "-1GiB", "+1GiB"),
        *("24", "GiB", "8e9", "8e9B", "1,5GiB", "1.GiB", ".5GiB", "1 000MiB", "24G", "24iB", "24GiBs"),
        *("24GiB 1MiB", "24GiB\n;", "\u0663GiB", "1\u212aB", "9" * 5000 + "GiB"),
    ],
)
def test_anything_else_is_wrong_usage_with_examples(text: str) -> None:
    with pytest.raises(UsageError, match="24GiB, 8GB, 512MiB") as error:
        parse_size(text)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (23_944_888_320, "22.3 GiB"),
        (2**20 - 1, "1.0 MiB"),
        (2**30, "1.0 GiB"),
        (5 * 2**40, "5.0 TiB"),
        (2**52, "4096.0 TiB"),
    ],
)
def test_printed_sizes_have_one_decimal(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_a_negative_size_is_not_printed() -> None:
    with pytest.raises(ValueError, match="-1"):
        format_bytes(-1)


@given(st.integers(1, 2**45))
def test_what_is_printed_reads_back_to_within_its_last_digit(num_bytes: int) -> None:
    number, unit = format_bytes(num_bytes).split()
    assert float(number) < 1024
    tolerance_bytes = 0 if unit == "B" else parse_size(f"1{unit}") * 0.051
    assert abs(parse_size(f"{number}{unit}") - num_bytes) <= tolerance_bytes
