"""Committed results that are older than the rules for results: the lists only become shorter, as commands run again."""

LACKING: dict[str, tuple[str, ...]] = {
    "benchmarks/coverage/results/results.json": ("graphs",),
    "benchmarks/fleet/results/overhead.json": ("graphs",),
    "benchmarks/guards/results/results.json": ("graphs",),
    "benchmarks/integrations/results/results.json": ("graphs",),
    "benchmarks/kernels/results/usual/results.json": ("graphs",),
    "benchmarks/kills/results/fleet.json": ("graphs",),
    "benchmarks/kills/results/kills.json": ("graphs",),
    "benchmarks/loops/results/results.json": ("graphs",),
    "benchmarks/repeated_tunes/results/results.json": ("graphs",),
    "gpu/results/gpu.json": ("graphs",),  # a graph of a GPU has other sizes, so its digest cannot be compared here
}  # fmt: skip
"""Facts that a result file lacks, by its path below `experiments/`."""

OF_ANOTHER_GRAPH: frozenset[tuple[str, str]] = frozenset()
"""Recorded graphs whose step is captured as another graph today: the figures of these files are of older code.

Each is a pair of the file's path below `experiments/` and the graph's name in it.
"""

NOT_CAPTURED: frozenset[tuple[str, str]] = frozenset()
"""Recorded graphs that no test captures again, because nothing names workload and arguments; pairs like those of `OF_ANOTHER_GRAPH`."""

TABLES_ALONE = frozenset(["benchmarks/planning/results/cpu-amd-epyc-2/results.csv"])
"""Tables of figures without a result file that holds their facts. That of `planning` has nine runs, none of which names its commit."""
