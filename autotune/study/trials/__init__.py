"""Choose, plan and measure the trials of a study: one after the other, or in parallel on several equal devices.

In: a study's rules, planners and records, and its runners.
Out: trials, each with its plan, its estimate and its measurement.
Read first: `next_trial`.
"""
