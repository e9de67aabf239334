"""The child process: it runs steps under a meter and may die.

In: requests of the coordinator.
Out: one reply for each request.
Read first: `main`.
"""
