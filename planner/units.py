"""Sizes of memory, as people write them and as they read them."""

from __future__ import annotations

import re
from fractions import Fraction

from gradplan.probes.errors import UsageError

_DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS = _DECIMAL | _BINARY
_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([KMGT]?I?B)\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes, from a number and a unit in any case: ``24GiB``, ``8GB``, ``1.5 GiB``, ``512MiB``, ``4096B``.

    KiB, MiB, GiB and TiB are powers of 1024; KB, MB, GB and TB are powers of 1000. A fraction of a byte is
    dropped.

    Raises:
        UsageError: anything else, a number without a unit included, or less than one byte.
    """
    match = _SIZE.fullmatch(text)
    scale = _UNITS.get(match[2].upper()) if match else None
    if match is None or scale is None:
        raise UsageError(f"{text!r} is not a size of memory; write a number and a unit: 24GiB, 8GB, 512MiB")
    size_bytes = int(Fraction(match[1]) * scale)
    if size_bytes < 1:
        raise UsageError(f"{text!r} is less than one byte; write a size above zero: 24GiB, 8GB, 512MiB")
    return size_bytes


def format_bytes(num_bytes: int) -> str:
    """A size for people, with one decimal: ``22.3 GiB``; below 1 KiB in whole bytes: ``512 B``.

    Raises:
        ValueError: ``num_bytes`` is negative.
    """
    if num_bytes < 0:
        raise ValueError(f"a size of {num_bytes} bytes")
    if num_bytes < 1024:
        return f"{num_bytes} B"
    size = float(num_bytes)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if round(size, 1) < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"
