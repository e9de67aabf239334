"""Training steps on fake tensors: shapes and types without memory, so that bytes of any size are counted on any machine.

In: a workload's factory.
Out: its captured step, modelled costs of its ops, and the tensor bytes of its eager step.
Read first: `fake_workload`.
"""
