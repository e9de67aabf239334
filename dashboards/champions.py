"""Per model, device and budget the plan that stands: a night's champion, else the fastest that a study won with."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from autotune.nightly.history import Home, identity
from autotune.records import plan_file as planfile
from autotune.records.device import Device
from autotune.records.plan_file import PlanFile
from autotune.units import fmt_seconds, mib
from dashboards.logged import Logged


@dataclass(frozen=True, slots=True)
class Champion:
    """A plan that won somewhere. Bytes are the step's own, above the process's floor."""

    model: str
    device: str
    budget: str
    origin: str
    """The run's directory, or the night's entry."""
    nightly: bool = False
    peak_bytes: float | None = None
    charged_bytes: float | None = None
    seconds: float | None = None
    ratio: float | None = None
    """Its time over plain eager's."""
    at: float = 0.0
    """Seconds since the epoch."""
    page: str = ""
    """Behind the address of MLflow's pages."""

    @property
    def key(self) -> tuple[str, str, str]:
        """Plans of one key compete."""
        return self.model, self.device, self.budget

    @property
    def words(self) -> str:
        """`65%: 218.0 MiB at 1.02x`."""
        taken = self.peak_bytes if self.charged_bytes is None else self.charged_bytes
        time = f"{self.ratio:.2f}x" if self.ratio is not None else fmt_seconds(self.seconds or math.nan)
        return f"{self.budget}: {mib(taken)} MiB at {time}"


def of_study(run_dir: Path) -> Champion | None:
    """What a run directory hands back; None where nothing has won yet."""
    path = run_dir / "plan.json"
    return _of_plan(planfile.read(path), run_dir.name, path.stat().st_mtime) if path.exists() else None


def of_entry(directory: Path) -> Champion | None:
    """A night's champion, with its figures of the last night that measured it; None before the first."""
    home = Home(directory)
    file = home.read(home.champion)
    if file is None:
        return None
    champion = replace(_of_plan(file, directory.name, home.champion.stat().st_mtime), nightly=True)
    for night in reversed(home.history()):
        if night.champion == identity(file) and night.ratio is not None:
            return replace(champion, ratio=night.ratio, charged_bytes=night.charged_bytes, at=night.started)
    return champion


def of_logged(logged: Logged) -> Champion | None:
    """What a study that MLflow has won with."""
    if not logged.best:
        return None
    return Champion(
        logged.workload,
        logged.silicon,
        logged.budget,
        logged.identity.rsplit(".", 2)[0],
        peak_bytes=logged.best.get("step_peak_bytes"),
        charged_bytes=logged.best.get("step_charged_bytes"),
        seconds=logged.best.get("step_seconds"),
        ratio=logged.best.get("time_ratio"),
        at=logged.started,
        page=logged.page,
    )


def once(logged: Iterable[Champion], on_disk: Iterable[Champion]) -> list[Champion]:
    """Every study once: as MLflow has it, and those that only the disk has."""
    recorded = list(logged)
    known = {(one.origin, *one.key) for one in recorded}
    return [*recorded, *(one for one in on_disk if one.nightly or (one.origin, *one.key) not in known)]


def reigning(found: Iterable[Champion]) -> list[Champion]:
    """Of each key the night's champion, which is verified every night; else the fastest."""
    by_key = sorted(found, key=lambda one: (*one.key, *_rank(one)))
    return [next(same) for _, same in groupby(by_key, key=lambda one: one.key)]


def grid(champions: Sequence[Champion]) -> tuple[list[str], list[list[str]]]:
    """(header, rows): a row a model, a column a device, in a cell all budgets."""
    devices = sorted({one.device for one in champions})
    rows = []
    for model in sorted({one.model for one in champions}):
        cells = [
            ", ".join(one.words for one in champions if (one.model, one.device) == (model, device)) or "-"
            for device in devices
        ]
        rows.append([model, *cells])
    return ["model", *devices], rows


def _rank(one: Champion) -> tuple[bool, float, float, float]:
    ratio = math.inf if one.ratio is None else one.ratio
    seconds = math.inf if one.seconds is None else one.seconds
    return not one.nightly, ratio, seconds, -one.at


def _of_plan(file: PlanFile, origin: str, at: float) -> Champion:
    seen = file.measurement
    device = file.device or Device("?", "?", 0, 0, "?")
    return Champion(
        str(file.workload),
        device.silicon,
        file.budget,
        origin,
        peak_bytes=seen.step_peak_bytes if seen else None,
        charged_bytes=seen.step_charged_bytes if seen else None,
        seconds=seen.median_seconds if seen else None,
        ratio=seen.time_ratio if seen else None,
        at=at,
    )
