"""Runs plans for real, in child processes that may die; the coordinator's side imports no torch."""
