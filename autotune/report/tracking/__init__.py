"""Fields of the runs that a tracking server holds.

In: trials, a graph and a config.

Out: metrics, params, tags, notes and the batch as a dataset.

Read first: `fields`.
"""
