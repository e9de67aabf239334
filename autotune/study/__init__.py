"""Search for the fastest plan within a budget.

In: a `Config` and a `Runner`.
Out: trials on disk, and a `StudyResult` with the best plan.
Read first: `session`.
"""
