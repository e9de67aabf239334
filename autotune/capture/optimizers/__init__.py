"""Analyze an optimizer without changing it, and run its update within a captured step.

In: the user's optimizer.
Out: update ops for the graph, and snapshots of the optimizer's state.
Read first: `optimizer`.
"""
