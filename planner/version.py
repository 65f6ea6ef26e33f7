"""Which gradplan this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """``unknown`` where it is run from a folder that was never installed."""
    try:
        return version("gradplan")
    except PackageNotFoundError:
        return "unknown"
