"""Trace the Python around the tensors: the values that a step reads, and the objects that it changes.

In: the user's step.
Out: an FX graph with its guards, and a list of side effects.
Read first: `python_trace`.
"""
