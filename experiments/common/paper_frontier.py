"""Claims of a paper about time and memory at its budgets, beside plans of this project for the same budgets.

An experiment builds one `PaperFrontier` from its networks and its own claims, and calls `main`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.capture.fake.modelled_costs import DeviceRates
from autotune.report.claims import Claim
from autotune.workloads.workload import Workload
from experiments.common.measured import build_measured_claim, measure_plan, run_parts
from experiments.common.simulated import FrontierPoint, plan_frontier, read_rows, write_rows


@dataclass(frozen=True, slots=True)
class SmallRun:
    """Overhead of a paper that is also measured, at a size that fits this machine."""

    factory: str
    """Reference of the factory that makes the small workload, as `package.module:factory`."""
    arguments: Mapping[str, int]
    """Arguments of the factory."""
    share: float
    """Budget of the plan, as a share of eager's peak."""
    claim: Claim
    """Published overhead in percent, without a figure of ours."""

    def measure(self) -> Claim:
        """Measure the plan beside plain eager, and return the claim with the measured overhead."""
        return build_measured_claim(self.claim, measure_plan(self.factory, dict(self.arguments), self.share))


@dataclass(frozen=True, slots=True)
class PaperFrontier:
    """Networks of a paper with their budgets, and the claims about them."""

    folder: Path
    """Folder of the experiment; its files are in `results/`."""
    description: str | None
    """Help text of the command."""
    networks: Mapping[str, Callable[[], Workload]]
    """Functions that make the workload at the paper's size, by name of the network."""
    card: DeviceRates
    """Device of the modelled times."""
    budgets: Callable[[str, int], Iterable[int]]
    """Function from a network's name and the peak bytes of its traced step to the budgets in bytes."""
    derive_claims: Callable[[Mapping[str, Sequence[FrontierPoint]]], Sequence[Claim]]
    """Function from the points of all networks to the simulated claims."""
    small_run: Callable[[], SmallRun]
    """Function that returns the measured part; it may read the points file."""
    draw: Callable[[Sequence[Claim]], None]
    """Function that draws the picture from the points file and the measured claims."""

    @property
    def points_path(self) -> Path:
        """File of the simulated points."""
        return self.folder / "results" / "points.csv"

    def picture(self, name: str) -> Path:
        """Return the file of a picture."""
        return self.folder / "results" / f"{name}.png"

    def simulate_network(self, name: str) -> list[FrontierPoint]:
        """Return the traced step of a network, then one plan per budget."""
        return plan_frontier(
            self.networks[name], name, lambda traced_bytes: self.budgets(name, traced_bytes), self.card
        )

    def simulate(self) -> dict[str, list[FrontierPoint]]:
        """Return the points of every network."""
        return {name: self.simulate_network(name) for name in self.networks}

    def read_points(self, name: str | None = None) -> list[FrontierPoint]:
        """Read the stored points of one network, or of all."""
        return [point for point in read_rows(self.points_path, FrontierPoint) if name in (None, point.net)]

    def claims(self) -> list[Claim]:
        """Simulate every network and return its claims; no file is written."""
        return list(self.derive_claims(self.simulate()))

    def write_points(self) -> list[Claim]:
        """Simulate every network, write the points file and return the claims."""
        points = self.simulate()
        write_rows(self.points_path, [point for rows in points.values() for point in rows])
        return list(self.derive_claims(points))

    def main(self) -> None:
        """Run the parts that the command line names."""
        run_parts(self.folder, self.description, self.write_points, lambda: [self.small_run().measure()], self.draw)
