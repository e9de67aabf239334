"""Experiments: `claims` of papers beside our numbers, `benchmarks` of our own, and what both share in `common`."""
