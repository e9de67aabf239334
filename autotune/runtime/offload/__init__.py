"""Move values to a store and back while the step runs.

In: the schedule's offload and prefetch instructions, and an open store (`runtime/stores`).
Out: the same values in memory when an op reads them, the transfers of each step, and a window that adapts to them.
Read first: `engine`.
"""
