"""Run the nightly job: verify each champion plan beside eager, search for a faster one, and diagnose regressions.

A challenger becomes the champion after it was faster in two nights.

In: `nightly.yaml` and the recorded champions.
Out: verdicts, a history for each entry, and result files for the night.
Read first: `night`.
"""
