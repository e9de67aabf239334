"""Serve batches of many shapes with the plans of a few.

`buckets` pads a batch to one of the user's sizes. `padding_check` compares padded with unpadded eager steps first, since not every loss
ignores padding. `batch_padding` does both for a training loop. `step_costs` scales the costs of one shape to others.

In: a batch, the sizes, and the values to pad with.
Out: a batch of one of the sizes, or the name of the first result or gradient that padding changes.
Read first: `buckets`.
"""
