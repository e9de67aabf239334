"""Identify and probe the device of this machine.

In: nothing, or the directories of stores.
Out: a `Device`, a `DeviceProfile`, or the difference of two.
Read first: `this_device`.
"""
