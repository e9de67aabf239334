"""Runs plans for real, in child processes that may die; the coordinator's side imports no torch.

In: a workload's reference, and plans.
Out: a `Measurement` for each plan.
Read first: `harness`.
"""
