"""Make the training step that a user names.

In: a reference such as `resnet18` or `file.py:factory`, and its arguments.
Out: a `Workload`: model, loss, optimizer and batch.
Read first: `workload`.
"""
