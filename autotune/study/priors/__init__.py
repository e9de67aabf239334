"""Start the sampler with observations that this study did not measure: simulated settings, and trials of another run.

In: a `Planning`, the rules of the study, and the trials of another run.
Out: a sampler that reads these observations beside the measured trials; no stored trial changes.
Read first: `phase`.
"""
