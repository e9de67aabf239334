"""Search for a Pareto front of bytes and time: the budget is a variable of the study.

In: the trials of a study with `objective: pareto`, and its planners.
Out: plans for budgets between the smallest plan and eager, and files of the verified front.
Read first: `budget_levels`.
"""
