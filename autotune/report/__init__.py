"""Render the records of a study as pages, charts, tables and MLflow runs.

In: a run directory.
Out: an HTML page, charts, tables, and MLflow runs.
Read first: `html`.
"""
