"""A small `runs/` without a device: studies, nights, and directories that a crash left behind."""

import json
import os
from dataclasses import replace
from pathlib import Path

from autotune.nightly.diagnosis import Cause, Conditions
from autotune.nightly.history import EntryDirectory, NightRecord, NightVerdict, plan_identity
from autotune.records import plan_file as planfile
from autotune.records.config import Config
from autotune.records.run_dir import write_json
from autotune.study.outcome import write_plan
from autotune.study.recorded_run import RecordedRun
from autotune.study.verdicts.ranking import Rules
from autotune.study.verdicts.statistics import RatioInterval
from tests.nightly.fakes import CHAMPION, plan_file
from tests.report.test_html import DEVICE, FLOOR, full_run


def study(root: Path, name: str) -> Path:
    """Write a finished run: a best plan, and one trial of every failure."""
    root.mkdir(parents=True, exist_ok=True)
    run_dir = full_run(root / name)
    records = RecordedRun.load(run_dir)
    assert records.best is not None
    assert records.graph is not None
    rules = Rules(records.budget_step_bytes or 0, FLOOR, 0.0, 0.0)
    config = Config(workload="chain", arguments={"layers": 12}, plans=str(root / "plans"))
    write_plan(config, run_dir, DEVICE, rules, records.best, graph=records.graph)
    write_json(run_dir / "study.json", {"best": records.best.number, "interrupted": 0})
    return run_dir


def begin(run_dir: Path) -> None:
    """Write the lock of a study that this process runs now."""
    (run_dir / "lock").write_text(str(os.getpid()))
    (run_dir / "study.json").unlink(missing_ok=True)


def nights(root: Path, entry: str = "chain", *, has_eager: bool = True) -> Path:
    """Write four good nights of a champion and a regression; without eager, times are seconds."""
    directory = root / "nightly" / entry
    directory.mkdir(parents=True)
    file = plan_file(CHAMPION)
    planfile.write(directory / "champion.json", file)
    home, name = EntryDirectory(directory), plan_identity(file)
    good = NightRecord("n", entry, NightVerdict.SAME, champion=name, turns=(0.95, 0.96, 0.97), charged_bytes=800_000)
    good = replace(good, conditions=Conditions(baseline_seconds=2.0 if has_eager else None))
    for number in range(4):
        home.record(replace(good, night=f"n{number}", started=1e9 + 86400.0 * number))
    home.record(
        replace(
            good, night="n4", started=1e9 + 86400.0 * 4, verdict=NightVerdict.REGRESSION, turns=(1.1, 1.2, 1.3),
            detail="time +25.0 % vs. its record (torch 2.12 -> 2.13)", causes=(Cause.ENVIRONMENT,),
            change=RatioInterval(1.25, 1.2, 1.3),
        )
    )  # fmt: skip
    return directory


def broken(root: Path) -> dict[str, str]:
    """Write directories that cannot be read; return a part of the expected reason of each."""
    for name in ("cut", "wild", "other", "begun"):
        (root / name).mkdir(parents=True)
        (root / name / "config.yaml").write_text("workload: chain\nbudget: 65%\n")
    (root / "cut" / "trials.jsonl").write_text('{"number": 0, "kind": \n{"number": 1}\n')
    (root / "wild" / "config.yaml").write_text("workload: [chain\n  budget: {")
    (root / "other" / "plan.json").write_text(json.dumps({"schema": 99}))
    (root / "begun" / "config.yaml").unlink()
    (root / "begun" / "lock").write_text("999999999")
    entry = root / "nightly" / "torn"
    entry.mkdir(parents=True)
    (entry / "history.jsonl").write_text("not a night\n")
    return {"cut": "not JSON", "wild": "expected", "other": "schema", "begun": "no run is recorded", "torn": "not JSON"}
