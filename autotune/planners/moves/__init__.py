"""Changes of one plan: single edits, combined moves, and their ranking by what measurements say about costs.

In: a plan, costs, a target of the peak, and measured plans.
Out: checked plans near it, each with a text of the change, the most promising first.
Read first: `plan_edits`.
"""
