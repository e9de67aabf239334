"""Compare a captured step with eager, tensor by tensor.

In: the results of both steps.
Out: each tensor's error relative to a bound, or NumericsError; for compiled regions, each region's own error.
Read first: `gates`.
"""
