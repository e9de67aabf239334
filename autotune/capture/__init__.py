"""Trace one training step with PyTorch and read it as a graph.

In: a `Workload`.
Out: a `Program`: the `TrainGraph`, the call behind each op, and the guards.
Read first: `tracer`.
"""
