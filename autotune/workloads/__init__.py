"""Create the training step that a reference names.

In: a reference such as `resnet18` or `file.py:factory`, and its arguments.
Out: a `Workload`: model, loss, optimizer and batch.
Read first: `workload`.
"""
