"""Follow the Python around the tensors: values that a step reads, and what it changes besides.

In: the user's step.
Out: an FX graph with its guards, and a list of side effects.
Read first: `python_trace`.
"""
