"""Kill coordinators and workers at random moments, continue, and check that nothing is lost, repeated or left behind."""

import argparse
import contextlib
import ctypes
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from autotune.errors import WorkerError
from autotune.records.trial import TrialKind, load_trials
from autotune.study.verdicts.ranking import plan_hash
from experiments.benchmarks.kills.sessions import TRIALS, WORKERS, import_everything, start_session
from experiments.common.facts import collect_facts
from experiments.common.result_file import write_result

HERE = Path(__file__).parent
RECORDS = ("trials.jsonl", "history.jsonl")
MODES = ("tune", "confirm", "nightly")
TARGETS = ("coordinator", "worker", "both")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
END_SECONDS = 60.0
"""Time within which a session ends after a signal, on a busy machine too."""
_PR_SET_CHILD_SUBREAPER = 36


class Job:
    """One study or night, killed and continued until it is complete."""

    seconds = dict.fromkeys(MODES, 0.3)
    """Time by mode that a session took to end by itself: kills are spread over it."""

    def __init__(self, root: Path, mode: str) -> None:
        self.root, self.mode = root, mode
        self.code: int | None = None
        """Exit code of the last session."""

    def records(self) -> dict[Path, bytes]:
        """Return the complete lines of every file of records."""
        contents = {path: path.read_bytes() for name in RECORDS for path in self._find(name)}
        return {path: data[: data.rfind(b"\n") + 1] for path, data in contents.items()}

    def kill_once(self, dice: random.Random, target: str, number: signal.Signals) -> tuple[bool, list[str]]:
        """Run a session, kill it at a random moment, and return whether it was killed and what is wrong afterwards."""
        before, workers = self.records(), self._workers()
        coordinator = start_session(self.root, self.mode)
        begun = time.monotonic()
        if self.mode == "confirm":
            self._wait_for_trials(coordinator, begun)
            begun = time.monotonic()
        time.sleep(dice.uniform(0, self.seconds[self.mode]))
        new = self._workers()[len(workers) :]
        victims = ([coordinator] if target != "worker" else []) + (new[-1:] if target != "coordinator" else [])
        hit = [_send(pid, number) for pid in victims]
        code, problems = _wait_for_end(coordinator)
        self.code = code
        if code == 0:
            # a session that outlived the sleep took longer than it; one that did not was over before
            self.seconds[self.mode] = min(1.2 * self.seconds[self.mode], time.monotonic() - begun) * 0.9
        else:
            self.seconds[self.mode] *= 1.02
        allowed = {0, -number, 128 + number} if target != "worker" else {0, WorkerError.exit_code}
        if code is not None and code not in allowed:
            problems.append(f"the coordinator ended with {code}")
        # a signal to a session that had just ended kills nothing
        return any(hit) and (target == "worker" or code != 0), problems + self._compare(before, code)

    def _find(self, pattern: str) -> list[Path]:
        """Return the paths of a pattern; a session may remove its scratch directory while this one lists it."""
        while True:
            with contextlib.suppress(FileNotFoundError):
                return list(self.root.rglob(pattern))

    def is_complete(self) -> bool:
        """Return whether a session ended by itself with every record."""
        if self.mode == "nightly":
            return sum(path.read_bytes().count(b"\n") for path in self._find("history.jsonl")) >= 2
        return bool(self._find("study.json") and self._find("confirmed.json"))

    def _compare(self, before: dict[Path, bytes], code: int | None) -> list[str]:
        after, problems = self.records(), []
        for path, lines in before.items():
            if not after.get(path, b"").startswith(lines):
                problems.append(f"{path.relative_to(self.root)}: finished records are lost")
        for path in after:
            if path.name == "trials.jsonl":
                problems += _find_repeats(path)
        for _ in range(200):
            living = [pid for pid in self._workers() if Path(f"/proc/{pid}").exists()]
            _reap()
            if not living:
                break
            time.sleep(0.01)
        problems += [f"worker {pid} is alive" for pid in living]
        problems += [f"swap file {path.name}" for path in (self.root / "store").iterdir()]
        logs = {path.parent for path in self._find("scratch-*")}
        for folder in logs:
            # a killed session leaves its own, which the next one removes
            if len(scratch := list(folder.glob("scratch-*"))) > (0 if code is None or code >= 0 else 1):
                problems.append(f"{len(scratch)} scratch directories in {folder.relative_to(self.root)}")
        return problems

    def _wait_for_trials(self, coordinator: int, begun: float) -> None:
        while time.monotonic() < begun + END_SECONDS and Path(f"/proc/{coordinator}/exe").exists():
            if any(lines.count(b"\n") >= TRIALS for lines in self.records().values()):
                return
            time.sleep(0.002)

    def _workers(self) -> list[int]:
        path = self.root / WORKERS
        return [int(line) for line in path.read_text(encoding="utf-8").split()] if path.exists() else []


def _find_repeats(path: Path) -> list[str]:
    trials = load_trials(path)
    lines = path.read_bytes().count(b"\n")
    problems = [] if lines == len(trials) else [f"{lines} lines hold {len(trials)} trials"]
    searched = Counter(
        plan_hash(trial.plan)
        for trial in trials
        if trial.plan and trial.was_run and trial.kind not in (TrialKind.REPEAT, TrialKind.CONFIRM)
        if not (trial.measurement and trial.measurement.was_killed)  # measured again where no plan won
    )
    return problems + [f"plan {plan} ran {count} times" for plan, count in searched.items() if count > 1]


def _send(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _wait_for_end(coordinator: int) -> tuple[int | None, list[str]]:
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        pid, status = os.waitpid(coordinator, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status), []
        time.sleep(0.002)
    os.kill(coordinator, signal.SIGKILL)
    os.waitpid(coordinator, 0)
    return None, [f"the coordinator did not end within {END_SECONDS:g} s"]


def _reap() -> None:
    """Collect the workers whose coordinator has died; this process inherits them."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _write(path: Path, document: dict[str, Any]) -> None:
    """Write the results, with the origin of the latest session in front."""
    origin = {key: document["sessions"][-1][key] for key in ("machine", "commit", "date", "command")}
    ordered = document | {"by_kind": dict(sorted(document["by_kind"].items()))}
    write_result(path, origin | ordered, graphs={})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--kills", type=int, default=1000, help="Number of kills in all, those of the result file included."
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "kills.json"
    empty: dict[str, Any] = {
        "kills": 0,
        "attempts": 0,
        "seconds": 0.0,
        "completed": 0,
        "by_kind": {},
        "problems": [],
        "sessions": [],
    }
    document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else empty
    if document["kills"] < options.kills:
        document["sessions"].append(collect_facts() | {"from_kill": document["kills"]})
    with tempfile.TemporaryDirectory(prefix="autotune-kills-") as folder:
        import_everything(Path(tempfile.mkdtemp(dir=folder)))
        jobs: dict[str, Job] = {}
        while document["kills"] < options.kills:
            number = document["kills"]
            document["attempts"] += 1
            dice = random.Random(f"{options.seed} {document['attempts']}")
            mode, target, sent = dice.choice(MODES), dice.choice(TARGETS), dice.choice(SIGNALS)
            job = jobs.setdefault(mode, Job(Path(tempfile.mkdtemp(dir=folder)), mode))
            begun = time.monotonic()
            hit, problems = job.kill_once(dice, target, sent)
            document["seconds"] += time.monotonic() - begun
            if hit:
                kind = f"{mode}, {target}, {sent.name}"
                document["by_kind"][kind] = document["by_kind"].get(kind, 0) + 1
                document["kills"] += 1
            document["problems"] += [f"kill {number} ({mode}, {target}, {sent.name}): {text}" for text in problems]
            for text in problems:
                log = (job.root / "log").read_text(encoding="utf-8")[-2000:]
                print(f"{mode}, {target}, {sent.name}: {text}\n{log}", flush=True)
            if job.is_complete() or problems or job.code == WorkerError.exit_code:
                document["completed"] += not problems
                shutil.rmtree(job.root)
                del jobs[mode]
            _write(path, document)
    _write(path, document)
    print(f"{document['kills']} kills, {document['completed']} jobs completed, {len(document['problems'])} problems")
    raise SystemExit(bool(document["problems"]))


if __name__ == "__main__":
    main()
