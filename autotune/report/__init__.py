"""Render what a study recorded. Made from records alone.

In: a run directory.
Out: an HTML page, charts, tables, and MLflow runs.
Read first: `html`.
"""
