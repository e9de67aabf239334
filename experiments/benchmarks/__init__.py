"""Measurements of our own, one folder each: `python -m experiments.benchmarks.NAME`."""
