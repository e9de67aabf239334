"""The nightly job: champions verified beside plain eager, refined, replaced after two nights, regressions told with a cause.

In: `nightly.yaml` and the champions on record.
Out: verdicts, history, and a page for the night.
Read first: `night`.
"""
