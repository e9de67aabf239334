"""Answer questions from records and forecasts, without a device.

In: a graph with costs, or a finished run.
Out: forecasts with error bars, and replayed searches.
Read first: `forecast`.
"""
