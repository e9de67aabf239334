"""Rewrite parts of a trace into the kernels that eager runs, or into ops that can be planned separately.

In: an FX graph.
Out: the same graph, changed in place.
Read first: `dropout`.
"""
