"""Measure plans in child processes that may die; the coordinator's side imports no torch.

In: a `Spec` (workload and conditions), and plans.
Out: a `Measurement` for each plan.
Read first: `harness`.
"""
