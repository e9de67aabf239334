"""Rank measured trials. Pure functions of records.

In: trials and the rules of a study.
Out: the plans that fit, the leader, and the re-measured plans with confidence intervals.
Read first: `ranking`.
"""
