"""Test your own planner, store or meter with the suites and builders that the project's own tests use.

In: graphs and plans.
Out: small graphs with bytes to count by hand, random graphs, a runner without a device, and contract suites.
Read first: `graphs`.
"""
