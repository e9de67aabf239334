"""The child process: run steps under a meter; it may die.

In: a `Spec`, then requests of the coordinator.
Out: one reply for each request.
Read first: `main`.
"""
