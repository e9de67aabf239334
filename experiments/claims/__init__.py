"""Published claims, one folder each: `python -m experiments.claims.NAME`."""
