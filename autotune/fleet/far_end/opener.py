"""Find the function that opens the runner at the far end, by its name."""

import importlib

from autotune.errors import ConfigError
from autotune.fleet.far_end.device_server import OpenDeviceRunner

OPEN_DEVICE = "autotune.fleet.local:open_device"
"""Name of the function that opens the machine's own device."""


def find_opener(name: str) -> OpenDeviceRunner:
    """Return the function `module:function`; the machine's own device for an empty name.

    Raises ConfigError where it cannot be imported.
    """
    module, _, function = (name or OPEN_DEVICE).partition(":")
    try:
        opener: OpenDeviceRunner = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"opener {name!r}: {error}; write module:function") from None
    return opener
