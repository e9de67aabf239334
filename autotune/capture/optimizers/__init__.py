"""Learn what an optimizer does without changing it: what it copies, keeps, and looks at.

In: the user's optimizer.
Out: update ops for the graph, and snapshots of the optimizer's state.
Read first: `optimizer`.
"""
