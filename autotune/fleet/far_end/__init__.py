"""Serve this machine's device to a study elsewhere.

In: requests as JSON, from a pipe or from an actor of Ray.
Out: replies as JSON, measured by this machine's harness.
Read first: `device_server`.
"""
