"""Times as files have them, in ISO 8601, and as turns have them, in seconds since 1970. Nothing asks for the time of the day."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any


def seconds(text: Any) -> float | None:
    """Seconds since 1970 of a time in ISO 8601, UTC where it names no zone; None of anything else."""
    try:
        time = datetime.fromisoformat(text)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def iso(since: float) -> str:
    """A time in ISO 8601 to the millisecond, UTC, of seconds since 1970; of those that no calendar has, 1970."""
    try:
        time = datetime.fromtimestamp(since, UTC)
    except (ValueError, OverflowError, OSError):
        time = datetime.fromtimestamp(0, UTC)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
