"""Predict bytes and seconds of a step without running it, and prove lower bounds of both.

In: a graph, costs, and a plan or its schedule.
Out: an `Estimate`, a timeline, or a lower bound.
Read first: `simulate`.
"""
