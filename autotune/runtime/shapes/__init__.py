"""Serve batches of many shapes with the plans of a few, or with plans made beside the training.

`buckets` pads a batch to one of the user's sizes. `padding_check` compares padded with unpadded eager steps first, since not every loss
ignores padding. `batch_padding` does both for a training loop. `background` captures and plans other shapes in another process
(`background_worker`), which answers with a `program_change`. `step_costs` scales the costs of one shape to others.

In: a batch, the sizes, and the values to pad with; or the first shape's program and a batch of another shape.
Out: a batch of one of the sizes, or the name of the first result or gradient that padding changes; a program and its plan.
Read first: `buckets`.
"""
