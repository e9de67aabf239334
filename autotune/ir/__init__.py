"""Plain data about one training step. No framework is imported here.

In: nothing but `errors` and `units`.
Out: `TrainGraph`, `Costs`, `Plan`, `Schedule`, and `check`, which rejects a plan that computes anything else.
Read first: `graph`.
"""
