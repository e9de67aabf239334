"""Run a planned step in the user's own process.

In: a `Program` and a `Plan`.
Out: the step's results, the same bits as eager, and what was profiled.
Read first: `train_step`.
"""
