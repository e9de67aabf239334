"""Time ops on a GPU, which runs them after the host has queued them, and run a step as CUDA graphs.

In: calls on tensors of a GPU; a captured step and its schedule.
Out: seconds on the GPU's clock; a step that replays CUDA graphs.
Read first: `graphed_step`.
"""
