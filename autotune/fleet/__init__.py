"""Measure on other machines: runners whose device is at the far end of a pipe or of a Ray actor.

To add an engine, write a function in a file of this folder that opens a channel, and add it to `ENGINES`. The file of
the fleet, the command line and the contract tests read that table.

In: a `Config`, and a class of devices.
Out: a `Runner` that measures on a device of that class.
Read first: `remote_runner`.
"""

from autotune.fleet import command, local, ray
from autotune.fleet.channel import OpenChannel

ENGINES: dict[str, OpenChannel] = {
    "local": local.open_channel,
    "command": command.open_channel,
    "ray": ray.open_channel,
}
"""Function that reaches a device, by the name of its engine."""
