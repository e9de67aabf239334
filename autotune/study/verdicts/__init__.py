"""Judge measured trials. Pure functions of records.

In: trials and the rules of a study.
Out: who fits, who leads, who is confirmed, with confidence intervals.
Read first: `ranking`.
"""
