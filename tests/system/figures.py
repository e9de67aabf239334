"""Figures in the prose of README and docs: those that a result file holds, those that are rules, and older ones without a file."""

import re
from dataclasses import dataclass

MEASURED_ROW = re.compile(r"^\| .* MiB .*$", re.MULTILINE)
"""Row of README's table of tuned models."""


@dataclass(frozen=True)
class Tied:
    """Figure of a page whose numbers are rounded from numbers in a result."""

    page: str
    text: str
    result: str
    """File below `experiments/benchmarks/`."""
    recorded: tuple[str, ...]
    """Numbers as the file has them, one for each number of the text."""


KERNELS = "kernels/results/usual/summary.md"
TRIALS = "trial_cost/results/summary.md"
TUNES, QUIET_TUNES = "repeated_tunes/results/summary.md", "repeated_tunes/results/quiet/summary.md"
FRONTIER = "frontier/results/cpu-amd-epyc-2/summary.md"
FRONTIER_XEON = "frontier/results/cpu-intel-xeon-2/summary.md"
BATCHES = "batch_sizes/results/summary.md"
VARIABLE = "variable_length/results/summary.md"
REPLAYS = "landscape/results/replays/summary.md"
GAINS = "landscape/results/gains/summary.md"
KERNEL_GAINS = "tuned/results/gains/summary.md"
REGIONS = "regions/results/zoo/summary.md"
PRICE = "rebuild_price/results/summary.md"
GPU = "../gpu/results/summary.md"
ALLOCATORS = "allocators/results/summary.md"
LIMITS, DECISIONS = "docs/limits.md", "docs/decisions.md"

TIED = (
    Tied(LIMITS, "1.64 to 19.33 times", BATCHES, ("1.64", "19.33")),
    Tied(LIMITS, "1.129 to 1.487 times", BATCHES, ("1.129", "1.487")),
    Tied(LIMITS, "1.24 times", BATCHES, ("1.24",)),
    Tied(LIMITS, "1.35 times", VARIABLE, ("1.349",)),
    Tied(LIMITS, "2.6 s", VARIABLE, ("2.60",)),
    Tied(LIMITS, "1.037 times", FRONTIER, ("1.037",)),
    Tied(LIMITS, "1.004 times", FRONTIER, ("1.004",)),
    Tied(LIMITS, "1.005 times", FRONTIER, ("1.005",)),
    Tied(LIMITS, "1.015 times", FRONTIER, ("1.015",)),
    Tied(LIMITS, "11.06 %", FRONTIER, ("11.06",)),
    Tied(LIMITS, "1.073 times", FRONTIER_XEON, ("1.073",)),
    Tied(LIMITS, "1.021 times", FRONTIER, ("1.021",)),
    Tied(LIMITS, "1.010 times", FRONTIER, ("1.010",)),
    Tied(LIMITS, "1.106 times", FRONTIER_XEON, ("1.106",)),
    Tied(LIMITS, "1.023 times", FRONTIER, ("1.023",)),
    Tied(LIMITS, "1.009 times", FRONTIER, ("1.009",)),
    Tied(LIMITS, "1.001 times", FRONTIER, ("1.001",)),
    Tied(LIMITS, "1.027 times", FRONTIER, ("1.027",)),
    Tied(LIMITS, "1.035 times", ALLOCATORS, ("1.035",)),
    Tied(LIMITS, "1.018 times", ALLOCATORS, ("1.018",)),
    Tied(LIMITS, "5 s", TRIALS, ("4.86",)),
    Tied(LIMITS, "13 s", TRIALS, ("13.20",)),
    Tied(LIMITS, "44 s", TRIALS, ("43.76",)),
    Tied(LIMITS, "628 to 771 ms", TUNES, ("628", "771")),
    Tied(LIMITS, "360 to 397 ms", QUIET_TUNES, ("360", "397")),
    Tied(LIMITS, "0.93 to 1.04 times", KERNELS, ("0.928", "1.038")),
    Tied(DECISIONS, "1.016 to 1.031 times", PRICE, ("1.016", "1.031")),
    Tied(DECISIONS, "0.998 to 1.043 times", PRICE, ("0.998", "1.043")),
    Tied(DECISIONS, "238 MiB", PRICE, ("238.0 MiB",)),
    Tied(DECISIONS, "246 MiB", PRICE, ("246.0 MiB",)),
    Tied(DECISIONS, "372 MiB", PRICE, ("371.6 MiB",)),
    Tied(DECISIONS, "347 MiB", PRICE, ("347.0 MiB",)),
    Tied(DECISIONS, "18 to 26 s", REGIONS, ("17.6", "26.4")),
    Tied(LIMITS, "0.942 to 1.060 times", GAINS, ("0.942", "1.060")),
    Tied(LIMITS, "0.842 times", KERNEL_GAINS, ("0.842",)),
    Tied(LIMITS, "0.811 times", KERNEL_GAINS, ("0.811",)),
    Tied(LIMITS, "0.648 times", KERNEL_GAINS, ("0.648",)),
    Tied(LIMITS, "0.891 times", KERNEL_GAINS, ("0.891",)),
    Tied(LIMITS, "1.026 times", "fleet/results/ratios/summary.md", ("1.026",)),
    Tied(LIMITS, "0.45 %", GPU, ("-0.45%",)),
    Tied(LIMITS, "0.05 %", GPU, ("-0.05%",)),
    Tied(LIMITS, "0.986 times", GPU, ("0.986",)),
    Tied(LIMITS, "0.969 times", GPU, ("0.969",)),
    Tied(LIMITS, "0.993 times", GPU, ("0.993",)),
    Tied(LIMITS, "1.056 times", GPU, ("1.056",)),
    Tied(LIMITS, "0.935 times", GPU, ("0.935",)),
    Tied(LIMITS, "1.770 times", GPU, ("1.770",)),
    Tied(LIMITS, "0.883 times", GPU, ("0.883",)),
    Tied(LIMITS, "0.814 times", GPU, ("0.814",)),
    Tied(LIMITS, "0.739 times", GPU, ("0.739",)),
    Tied(LIMITS, "0.748 to 1.450 times", GPU, ("0.748", "1.450")),
    Tied(LIMITS, "0.562 times", GPU, ("0.562",)),
    Tied(LIMITS, "0.705 times", GPU, ("0.705",)),
    Tied(LIMITS, "0.852 times", GPU, ("0.852",)),
    Tied(LIMITS, "1.049 times", GPU, ("1.049",)),
    Tied(LIMITS, "0.671 times", GPU, ("0.671",)),
    Tied(LIMITS, "4.9 times", GPU, ("4.86",)),
    Tied(LIMITS, "1.55 times", GPU, ("1.55",)),
    Tied(LIMITS, "2 %", REPLAYS, ("within 2 %",)),
)

RULES = {
    "README.md": ("65 %", "95 %"),
    "docs/index.md": ("65 %",),
    "docs/concepts.md": ("0.5 %", "1 %"),
    "docs/limits.md": (
        "10 s", "60 s", "2 %", "64 MiB", "1.03 times", "60 %", "2 or 20 MiB", "1 MiB", "95 %", "10 %", "5 %", "15 %", "50 %", "3 %", "20 minutes",
    ),
    "docs/decisions.md": ("32 x", "96 x", "65 %", "3 %", "1 %", "95 %", "10 %", "20 %", "2 %", "110 %"),
    "docs/guides/batch-size.md": ("2 %", "60 %"),
    "docs/guides/new-device.md": ("1 %", "3 %", "10 %", "15 %", "20 %"),
    "docs/guides/nightly.md": ("1 %",),
    "docs/guides/own-model.md": ("20 to 40 minutes", "70%"),
    "docs/guides/read-results.md": ("3 %", "95 %"),
}  # fmt: skip
"""Budgets, tolerances, limits and defaults by page: chosen, not measured."""

WITHOUT_RESULT = {
    "docs/decisions.md": (
        "10 to 36 ms", "898 and 1,610 times", "0.1 %", "0.36 %", "0.17 %", "0.10 %", "8 %", "5.6 %", "2.2 %",
        "2 to 6 s", "0.8 s", "1.1 times", "2 s", "40 %", "45 %", "5 s", "0.27 s", "4 MiB", "3 to 5 %", "0.4 MiB",
        "1.5 and 17 %", "5 MB", "25 GB/s", "20 times", "240 MB", "11 s",
    ),
}  # fmt: skip
"""Reasons of decisions that were measured once, without a result file. The list only becomes shorter."""
