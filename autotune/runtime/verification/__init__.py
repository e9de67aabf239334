"""Compare a captured step with eager, tensor by tensor.

In: results of both.
Out: an error relative to eager's own rounding, or a refusal.
Read first: `gates`.
"""
