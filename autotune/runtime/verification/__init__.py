"""Compare a captured step with eager, tensor by tensor.

In: the results of both steps.
Out: each tensor's error relative to eager's own rounding error, or NumericsError.
Read first: `gates`.
"""
