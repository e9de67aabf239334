"""Run the steps of a first hour on a GPU; each result is saved as its step ends.

`python -m experiments.gpu.run --minutes 9 [--out FILE] [--start FILE] [--only WORD...] [--list] [--fake]`

It begins with the most valuable step that has no result, and ends before a step that would not fit into the minutes. Run
it again until nothing is missing. Failed steps are tried again last: those that raised, and those
whose command exited with another code than 0.
"""

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.gpu.machine import FakeMachine, GpuMachine, Machine
from experiments.gpu.steps import Step, all_steps
from experiments.gpu.summary import write_summary

RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what fits; return 0 if no step failed, else 1."""
    options = _parse(arguments)
    chosen = [step for step in all_steps() if all(word in step.name.split() for word in options.only)]
    out: Path = options.out or RESULTS / ("fake.json" if options.fake else "gpu.json")
    document = _read(out) or _read(options.start or out) or {"steps": {}}
    if options.list:
        for step in chosen:
            print(f"{step.seconds:5.0f} s  {_state(document, step):7} {step.name}")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        place = options.scratch or Path(scratch)
        place.mkdir(parents=True, exist_ok=True)
        machine: Machine = FakeMachine(place) if options.fake else GpuMachine(place)
        facts = machine.facts()
        document = _keep_same_device(document, facts)
        code = run_steps(chosen, machine, document, out, 60 * options.minutes)
        if not options.fake:
            write_summary(document, out.parent / "summary.md")
        return code


def run_steps(
    steps: Sequence[Step],
    machine: Machine,
    document: dict[str, Any],
    out: Path,
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Run the steps without a result, then those that failed, until the time is short; save after each."""
    end, failures = clock() + seconds, 0
    facts = machine.facts()
    new = [step for step in steps if step.name not in document["steps"]]
    failed = [step for step in steps if _state(document, step) == "failed"]
    for step in (*new, *failed):
        left = end - clock()
        if left < step.seconds:
            print(f"{step.name}: {left:.0f} s are left, it may take {step.seconds:.0f} s; run again", file=sys.stderr)
            break
        print(f"{step.name} ({left:.0f} s left)", file=sys.stderr, flush=True)
        begin = clock()
        try:
            data = step.run(machine, step.seconds)
            result: dict[str, Any] = {"ok": data.get("exit", 0) == 0, "data": data}
        except Exception as error:  # noqa: BLE001 - one step's failure is a finding, and the next may still be of use
            result = {"ok": False, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-4000:]}
        failures += int(not result["ok"])
        document["steps"][step.name] = {**result, "seconds": round(clock() - begin, 2), "facts": facts}
        document |= {name: facts[name] for name in ("commit", "date", "command")}  # each step has its own
        _write(out, document)
    return int(failures > 0)


def _state(document: dict[str, Any], step: Step) -> str:
    result = document["steps"].get(step.name)
    return "missing" if result is None else "done" if result["ok"] else "failed"


def _keep_same_device(document: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """Return the document if all of its results are of this device; figures of two GPUs do not belong in one table."""
    name = facts["device"]["silicon"]
    others = {result["facts"]["device"]["silicon"] for result in document["steps"].values()} - {name}
    if others:
        raise SystemExit(f"the results are of {', '.join(sorted(others))}, this is {name}: pass another --out")
    return {"device": name, **document}


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _write(path: Path, document: dict[str, Any]) -> None:
    """Write the results in one step, because the machine may be gone at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=40.0, help="time of this run")
    parser.add_argument("--out", type=Path, help="file of the results")
    parser.add_argument("--start", type=Path, help="earlier results, where --out does not exist yet")
    parser.add_argument(
        "--scratch", type=Path, help="directory of temporary files and tuning runs, kept for a later run"
    )
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="only steps whose names have these words")
    parser.add_argument("--list", action="store_true", help="list the steps and their state")
    parser.add_argument("--fake", action="store_true", help="run on a made-up GPU")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
