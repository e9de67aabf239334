"""Time and prepare ops on a GPU, which runs them after the host has queued them.

In: calls on tensors of a GPU.
Out: their seconds on the GPU's clock.
Read first: `event_timing`.
"""
