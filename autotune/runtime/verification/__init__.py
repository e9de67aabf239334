"""Compare a captured step with eager, tensor by tensor.

In: the results of both steps.
Out: each tensor's error relative to eager's own rounding error, or NumericsError. Where the gate of the whole step refuses,
each compiled region is compared on its own (`region_gate`).
Read first: `gates`.
"""
