"""Table of all benchmarks and claims: command lines, durations, result files, and which of them continue their results."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.common.result_file import PLANS


@dataclass(frozen=True, slots=True)
class Experiment:
    """One benchmark or claim, run by its own command."""

    name: str
    arguments: tuple[str, ...] = ()
    minutes: float = 10.0
    """Expected duration on two cores, in minutes. A session with less time left starts it only if it `resumes`."""
    is_timed: bool = True
    """True if the experiment measures seconds, so that nothing may run beside it."""
    results: str = "results/**/*.json"
    """Pattern of its result files, below its folder; `{device}` stands for the key of the device that measured them."""
    resumes: bool = False
    """True if a second call of its command continues its stored results."""
    work: str = ""
    """Folder of interrupted work that its command continues, below the checkout."""
    needs: tuple[str, ...] = ()
    """Names of the experiments whose results it reads."""

    @property
    def short_name(self) -> str:
        """Name without its folder of `experiments/`."""
        return self.name.partition("/")[2]

    @property
    def command(self) -> tuple[str, ...]:
        """Arguments of Python: its module, then its options."""
        return ("-m", f"experiments.{self.name.replace('/', '.')}", *self.arguments)

    def find_results(self, root: Path, device: str = "*") -> list[Path]:
        """Return its result files in a checkout, of one device or of all, without files of plans."""
        folder = root / "experiments" / Path(*self.name.split("/")[:2])
        pattern = self.results.replace("{device}", device)
        return sorted(path for path in folder.glob(pattern) if not path.name.endswith(PLANS))

    def find_stored(self, root: Path, device: str) -> list[Path]:
        """Return the files and folders that its command would continue on a device."""
        results = self.find_results(root, device)
        plans = [plan for path in results if (plan := path.with_suffix(PLANS)).exists()]
        return [*results, *plans, *([root / self.work] if self.work and (root / self.work).exists() else [])]


def _benchmark(
    name: str, *arguments: str, minutes: float, is_timed: bool = True, results: str = "**/*.json", resumes: bool = False,
    work: str = "", needs: Sequence[str] = (),
) -> Experiment:  # fmt: skip
    needed = tuple(f"benchmarks/{other}" for other in needs)
    return Experiment(f"benchmarks/{name}", arguments, minutes, is_timed, f"results/{results}", resumes, work, needed)


def _claim(name: str, *arguments: str, minutes: float, is_timed: bool = True) -> Experiment:
    return Experiment(f"claims/{name}", arguments, minutes, is_timed, "results/result.json")


EXPERIMENTS = (
    _claim("model_olla", minutes=2, is_timed=False),
    _claim("nntrainer_order", minutes=5, is_timed=False),
    _claim("sublinear", minutes=10),
    _claim("dtr", minutes=10),
    _claim("echo", minutes=10),
    _claim("monet", minutes=10),
    _claim("memonger", minutes=5),
    _claim("pytorch_budget", minutes=10),
    _claim("nntrainer_offload", "--full", minutes=30),
    _benchmark("tuned", minutes=120, results="*.json"),
    _benchmark("tuned/gains", minutes=20, results="gains/*.json", resumes=True, needs=["tuned"]),
    _benchmark("no_fit", minutes=6),
    _benchmark("trial_cost", minutes=3),
    _benchmark("early_stop", minutes=1, is_timed=False, needs=["trial_cost"]),
    _benchmark("allocators", minutes=24, results="results.json", resumes=True),
    _benchmark("kernels", minutes=10),
    _benchmark("guards", minutes=6),
    _benchmark("regions", minutes=15),
    _benchmark("rebuild_price", minutes=8),
    _benchmark("frontier", minutes=300, results="{device}/*.json", resumes=True),
    _benchmark("pareto", minutes=45, results="{device}/*.json", needs=["frontier"]),
    _benchmark("batch_sizes", minutes=60),
    _benchmark("offload", minutes=30, resumes=True),
    _benchmark("planning", minutes=60, results="{device}/results.csv", resumes=True),
    _benchmark("layout", minutes=10),
    _benchmark("integrations", minutes=9, is_timed=False),
    _benchmark("variable_length", minutes=5),
    _benchmark("fleet", minutes=5, results="*.json"),
    _benchmark("fleet/ratios", "--minutes", "40", minutes=45, results="ratios/*.json"),
    _benchmark("transfer", minutes=30, resumes=True, work="runs/transfer-benchmark"),
    _benchmark("nights", minutes=120, resumes=True, work="runs/nights-benchmark"),
    _benchmark("repeated_tunes", minutes=60, resumes=True),
    _benchmark("landscape/record_all", minutes=75, results="*.json", resumes=True, work="runs/landscapes"),
    _benchmark(
        "landscape/gains",
        minutes=25,
        results="gains/*.json",
        resumes=True,
        needs=["landscape/record_all"],
    ),
    _benchmark(
        "landscape/replays",
        minutes=60,
        is_timed=False,
        results="replays/*.json",
        resumes=True,
        needs=["landscape/record_all"],
    ),
    _benchmark("loops", minutes=8, is_timed=False),
    _benchmark("coverage", minutes=100, is_timed=False, resumes=True),
    _benchmark("kills", "--kills", "1000", minutes=20, is_timed=False, results="kills.json", resumes=True),
    _benchmark("kills/fleet", "--kills", "100", minutes=10, is_timed=False, results="fleet.json"),
)
"""All experiments in execution order: each one after those that it needs."""
