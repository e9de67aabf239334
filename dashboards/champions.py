"""Select the current plan for each model, device, budget and loop: a nightly champion, or the fastest plan of a study."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from autotune.nightly.history import EntryDirectory, plan_identity
from autotune.records import plan_file as planfile
from autotune.records.device import Device
from autotune.records.plan_file import PlanFile
from autotune.records.run_dir import RunDir
from autotune.study.recorded_run import RecordedRun
from autotune.study.verdicts.statistics import Interval
from autotune.units import fmt_seconds, mib
from dashboards.mlflow_studies import LoggedStudy


@dataclass(frozen=True, slots=True)
class Champion:
    """Best plan of a study or of a nightly entry. Bytes exclude the idle process."""

    model: str
    device: str
    budget: str
    origin: str
    """Name of the run directory, or of the nightly entry."""
    nightly: bool = False
    peak_bytes: float | None = None
    charged_bytes: float | None = None
    seconds: float | None = None
    ratio: float | None = None
    """Step time over eager's, re-measured where it was."""
    interval: Interval | None = None
    """Interval of that ratio."""
    recorded: float = 0.0
    """Time of the record, in seconds since the epoch."""
    page: str = ""
    """Path of its MLflow page, to append to the address of MLflow's server."""
    loop: str = ""
    """Training loop that the plan was made for, as `clip,accumulate=4`; empty for updates at once."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Model, device, budget and loop: plans of one key compete."""
        return self.model, self.device, self.budget, self.loop

    @property
    def study(self) -> tuple[str, str, str, str]:
        """Run, model, device and budget of a study; no loop, because MLflow lacks one that the factory sets."""
        return self.origin, self.model, self.device, self.budget

    @property
    def summary(self) -> str:
        """Budget, loop, memory and time, as `65%: 218.0 MiB at 1.02x`."""
        nbytes = self.peak_bytes if self.charged_bytes is None else self.charged_bytes
        time = f"{self.ratio:.2f}x" if self.ratio is not None else fmt_seconds(self.seconds or math.nan)
        if self.interval is not None:
            time += f" ({self.interval.low:.2f} to {self.interval.high:.2f})"
        loop = f", loop {self.loop}" if self.loop else ""
        return f"{self.budget}{loop}: {mib(nbytes)} MiB at {time}"


def read_run_champion(run_dir: Path) -> Champion | None:
    """Return the best plan of a run directory; None if it has no plan yet."""
    path = RunDir(run_dir).plan
    if not path.exists():
        return None
    file = planfile.read(path)
    champion = _from_plan_file(file, run_dir.name, path.stat().st_mtime)
    records = RecordedRun.load(run_dir)
    # the file is written when a session ends, and trials may have a newer winner
    is_its_plan = records.best is not None and records.best.plan == file.plan
    interval = records.time_ratio if is_its_plan else None
    return champion if interval is None else replace(champion, ratio=interval.middle, interval=interval)


def read_entry_champion(directory: Path) -> Champion | None:
    """Return a nightly entry's champion with the figures of its latest night; None before the first night."""
    home = EntryDirectory(directory)
    file = home.read(home.champion)
    if file is None:
        return None
    champion = replace(_from_plan_file(file, directory.name, home.champion.stat().st_mtime), nightly=True)
    for night in reversed(home.history()):
        if night.champion == plan_identity(file) and night.ratio is not None:
            champion = replace(champion, charged_bytes=night.charged_bytes, recorded=night.started)
            if night.has_eager:
                return replace(champion, ratio=night.ratio, interval=night.interval)
            return replace(champion, ratio=None, seconds=night.ratio)
    return champion


def from_logged_study(study: LoggedStudy) -> Champion | None:
    """Return the best plan of a study on MLflow's record; None if it has none."""
    if not study.best:
        return None
    return Champion(
        study.workload,
        study.device,
        study.budget,
        study.identity.rsplit(".", 2)[0],
        peak_bytes=study.best.get("step_peak_bytes"),
        charged_bytes=study.best.get("step_charged_bytes"),
        seconds=study.best.get("step_seconds"),
        ratio=study.best.get("time_ratio"),
        recorded=study.started,
        page=study.page,
        loop=study.loop,
    )


def merge_champions(logged: Iterable[Champion], on_disk: Iterable[Champion]) -> list[Champion]:
    """Return MLflow's champions, then those that only the disk has.

    Of a study that both have, the figures are those of the disk: a resumed study may not have been logged again.
    """
    found = list(on_disk)
    studies = {champion.study: champion for champion in found if not champion.nightly}
    merged = [replace(studies.pop(champion.study, champion), page=champion.page) for champion in logged]
    return [*merged, *(champion for champion in found if champion.nightly or champion.study in studies)]


def select_current(champions: Iterable[Champion]) -> list[Champion]:
    """Return one plan for each key: the nightly champion, since it is verified every night, or else the fastest."""
    ordered = sorted(champions, key=lambda champion: (*champion.key, *_rank(champion)))
    return [next(group) for _, group in groupby(ordered, key=lambda champion: champion.key)]


def build_grid(champions: Sequence[Champion]) -> tuple[list[str], list[list[str]]]:
    """Return (header, rows) with a row per model and a column per device; a cell lists all budgets."""
    devices = sorted({champion.device for champion in champions})
    rows = []
    for model in sorted({champion.model for champion in champions}):
        cells = [
            ", ".join(c.summary for c in champions if (c.model, c.device) == (model, device)) or "-"
            for device in devices
        ]
        rows.append([model, *cells])
    return ["model", *devices], rows


def _rank(champion: Champion) -> tuple[bool, float, float, float]:
    ratio = math.inf if champion.ratio is None else champion.ratio
    seconds = math.inf if champion.seconds is None else champion.seconds
    return not champion.nightly, ratio, seconds, -champion.recorded


def _from_plan_file(file: PlanFile, origin: str, recorded: float) -> Champion:
    measurement = file.measurement
    device = file.device or Device("?", "?", 0, 0, "?")
    return Champion(
        str(file.workload),
        device.title,
        file.budget,
        origin,
        peak_bytes=measurement.step_peak_bytes if measurement else None,
        charged_bytes=measurement.step_charged_bytes if measurement else None,
        seconds=measurement.median_seconds if measurement else None,
        ratio=measurement.time_ratio if measurement else None,
        recorded=recorded,
        loop=file.loop,
    )
