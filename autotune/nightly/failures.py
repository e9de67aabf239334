"""Classify and describe the errors that end an entry's night, or its search for a challenger."""

import traceback

from autotune.errors import AutotuneError, DeviceLostError, DeviceRefusedError, StoreError, WorkerError


def is_inconclusive(error: AutotuneError) -> bool:
    """Return true for an error of a store, a device or a killed process, which is no evidence against a champion."""
    return isinstance(error, StoreError | DeviceLostError | DeviceRefusedError | WorkerError)


def describe_failure(error: Exception) -> str:
    """Return an error as text. An unexpected error is an internal error, whose traceback is printed."""
    if isinstance(error, AutotuneError):
        return f"{error}"
    traceback.print_exception(error)
    return f"internal error: {type(error).__name__}: {error}".splitlines()[0]
