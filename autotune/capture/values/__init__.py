"""Follow the values that a step's tensors have whatever the data: constants, and the batch's own numbers.

In: the calls of a recorded run on fake tensors.

Out: values for the Python that reads them, each that depends on the batch with a condition of the captured step.

Read first: `batch_values`.
"""
