"""Kill far ends and whole studies of a fleet at random moments, continue, and check that nothing is lost or left behind.

The device at the far end is simulated; its process, the pipe, the records and the lock on the device are real.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from autotune.errors import DeviceLostError
from autotune.fleet import ENGINES
from autotune.fleet.channel import Reach
from autotune.fleet.messages import OpenDevice, code_identity
from autotune.fleet.remote_runner import RemoteRunner
from autotune.records.run_dir import RunDir
from autotune.records.trial import TrialKind, load_trials
from autotune.study.session import tune
from autotune.study.verdicts.ranking import plan_hash
from autotune.testing.runner_contract import make_config, wait_for_death
from experiments.common.facts import collect_facts
from experiments.common.result_file import write_result

HERE = Path(__file__).parent
TRIALS = 12
FAR_END = (sys.executable, "-m", "autotune.testing.fake_far_end")
FAR_ENDS = "far_ends"
"""File of the process ids of all far ends, one a line."""


def run_study(root: Path) -> None:
    """Run or continue the study of a directory over a pipe; every far end is noted in a file."""
    config = make_config(root, trials=TRIALS)
    environment = {"FAKE_SECONDS": "0.03", "FAKE_LOCKS": str(root / "locks")}
    document = config.model_dump(mode="json")
    request = OpenDevice(code_identity(), "fake", document, environment=environment)
    reach = Reach("fake", root / "logs", command=FAR_END)

    def open_channel(report: Any) -> Any:
        channel = ENGINES["command"](reach, report)
        with (root / FAR_ENDS).open("a", encoding="utf-8") as file:
            file.write(f"{channel._process.pid}\n")  # type: ignore[attr-defined]
        return channel

    tune(config, RemoteRunner(open_channel, request, pause_seconds=0.0), root / "run", lasting=False)


def kill_once(root: Path, dice: random.Random, target: str, seconds: float) -> tuple[bool, int | None, list[str]]:
    """Run a session and kill its driver or its far end; return whether something was hit, its exit code and problems."""
    before = read_records(root)
    with (root / "log").open("ab") as log:
        driver = subprocess.Popen(
            [sys.executable, "-m", "experiments.benchmarks.kills.fleet", "--session", str(root)],
            stdout=log, stderr=log,
        )  # fmt: skip
    known = len(list_far_ends(root))
    while len(list_far_ends(root)) == known and driver.poll() is None:
        time.sleep(0.01)
    time.sleep(dice.uniform(0.0, seconds))
    victim = driver.pid if target == "driver" else list_far_ends(root)[-1]
    hit = driver.poll() is None
    try:
        os.kill(victim, signal.SIGKILL)
    except ProcessLookupError:
        hit = False
    try:
        code = driver.wait(120)
    except subprocess.TimeoutExpired:
        driver.kill()
        return hit, None, ["the driver did not end within 120 s"]
    problems = [f"far end {pid} is alive" for pid in list_far_ends(root) if not wait_for_death(pid, 3.0)]
    if code not in (0, -signal.SIGKILL, DeviceLostError.exit_code):
        problems.append(f"the driver ended with {code}")
    if not read_records(root).startswith(before):
        problems.append("finished records are lost")
    return hit, code, problems + find_repeats(root)


def read_records(root: Path) -> bytes:
    """Return the complete lines of the study's records."""
    path = RunDir(root / "run").trials
    text = path.read_bytes() if path.exists() else b""
    return text[: text.rfind(b"\n") + 1]


def list_far_ends(root: Path) -> list[int]:
    """Return the process ids of all far ends so far."""
    path = root / FAR_ENDS
    return [int(line) for line in path.read_text(encoding="utf-8").split()] if path.exists() else []


def find_repeats(root: Path) -> list[str]:
    """Return what is wrong with the records: gaps in their numbers, and plans that were recorded twice."""
    trials = load_trials(RunDir(root / "run").trials)
    lines = read_records(root).count(b"\n")
    problems = [] if lines == len(trials) else [f"{lines} lines hold {len(trials)} trials"]
    if [trial.number for trial in trials] != list(range(len(trials))):
        problems.append("the numbers of the trials have gaps")
    searched = Counter(
        plan_hash(trial.plan)
        for trial in trials
        if trial.plan and trial.was_run and trial.kind not in (TrialKind.REPEAT, TrialKind.CONFIRM)
    )
    return problems + [f"plan {plan} is recorded {count} times" for plan, count in searched.items() if count > 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="Number of kills.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--session", type=Path, help="Directory of the study to run: used by this program itself.")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    if options.session is not None:
        run_study(options.session)
        return
    document: dict[str, Any] = collect_facts() | {"kills": {"driver": 0, "far end": 0}, "completed": 0, "problems": []}
    root, seconds, attempt, began = Path(tempfile.mkdtemp(prefix="autotune-kills-")), 1.0, 0, time.monotonic()
    while sum(document["kills"].values()) < options.kills:
        dice = random.Random(f"{options.seed} {attempt}")
        attempt += 1
        target = dice.choice(("driver", "far end"))
        begun = time.monotonic()
        hit, code, problems = kill_once(root, dice, target, seconds)
        document["kills"][target] += hit
        document["problems"] += [f"attempt {attempt} ({target}): {text}" for text in problems]
        if code == 0:
            document["completed"] += 1
            seconds = 0.9 * seconds + 0.1 * (time.monotonic() - begun)
            if not problems:
                shutil.rmtree(root, ignore_errors=True)
            root = Path(tempfile.mkdtemp(prefix="autotune-kills-"))
        for text in problems:
            print(f"{target}: {text}\n{(root / 'log').read_text(encoding='utf-8')[-1500:]}", flush=True)
        options.out.mkdir(parents=True, exist_ok=True)
        document["attempts"], document["seconds"] = attempt, round(time.monotonic() - began)
        write_result(options.out / "fleet.json", document, graphs={})
    print(f"{document['kills']}, {document['completed']} studies completed, {len(document['problems'])} problems")
    raise SystemExit(bool(document["problems"]))


if __name__ == "__main__":
    main()
