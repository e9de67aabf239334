"""Committed results that are older than the rules for results: the lists only become shorter, as commands run again."""

EVERYTHING = ("machine", "commit", "graphs", "date", "command")
LACKING: dict[str, tuple[str, ...]] = {
    "benchmarks/coverage/results/results.json": ("graphs",),
    "benchmarks/fleet/results/overhead.json": ("graphs",),
    "benchmarks/guards/results/results.json": ("graphs",),
    "benchmarks/integrations/results/results.json": ("graphs",),
    "benchmarks/kernels/results/usual/results.json": ("graphs",),
    "benchmarks/kills/results/fleet.json": ("graphs",),
    "benchmarks/kills/results/kills.json": ("graphs",),
    "benchmarks/landscape/results/replays/resnet18.json": ("graphs",),
    "benchmarks/landscape/results/resnet18.json": ("commit", "date", "command"),
    "benchmarks/loops/results/results.json": ("graphs",),
    "benchmarks/repeated_tunes/results/results.json": ("graphs",),
    **{
        f"claims/{name}/results/result.json": EVERYTHING
        for name in ("nntrainer_offload",)
    },
    "gpu/results/gpu.json": ("graphs",),  # a graph of a GPU has other sizes, so its digest cannot be compared here
    "claims/nntrainer_offload/results/results.json": ("commit", "graphs", "date"),
}  # fmt: skip
"""Facts that a result file lacks, by its path below `experiments/`."""

OF_ANOTHER_GRAPH = frozenset(
    [
        ("benchmarks/landscape/results/resnet18.json", "resnet18(batch=16, size=112, width=32)"),
    ]
)
"""Recorded graphs whose step is captured as another graph today: the figures of these files are of older code.

Each is a pair of the file's path below `experiments/` and the graph's name in it.
"""

NOT_CAPTURED: frozenset[tuple[str, str]] = frozenset()
"""Recorded graphs that no test captures again, because nothing names workload and arguments; pairs like those of `OF_ANOTHER_GRAPH`."""

TABLES_ALONE = frozenset(["benchmarks/planning/results/cpu-amd-epyc-2/results.csv"])
"""Tables of figures without a result file that holds their facts. That of `planning` has nine runs, none of which names its commit."""
