"""Train 50 steps inside each framework, plain and under a plan, and compare every bit and the charged bytes.

`python -m experiments.benchmarks.integrations [--only hf]` takes about 3 minutes each on two cores and writes `results/`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import autotune
from autotune.records import plan_file as planfile
from experiments.benchmarks.integrations.record import BUDGET, STEPS, Record
from experiments.common.facts import ROOT, collect_facts, format_origin
from experiments.common.result_file import ORIGINS, capture_digests, join_digests, read_origins, write_result

HERE = Path(__file__).parent
INTEGRATIONS: dict[str, str] = {
    "hf": "Hugging Face Trainer",
    "lightning": "Lightning",
    "accelerate": "Accelerate, bf16",
}
"""Title of each integration by the name of its module, which has `factory() -> Workload` and `run(plan) -> Record`."""
TARGET = 0.70
"""Largest accepted ratio of the planned step's bytes to those of the plain one."""
REMARK = (
    "A step's bytes are above the floor of its own process. The floor of a planned process holds the capture and the modules that it "
    "needs: these models are small, so their planned processes are larger as a whole."
)
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=list(INTEGRATIONS), default=list(INTEGRATIONS))
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    path = options.out / "results.json"
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"integrations": {}}
    facts = collect_facts()
    origins = read_origins(stored, {name: name for name in stored["integrations"]})
    document: dict[str, Any] = facts | {"integrations": stored["integrations"], ORIGINS: origins}
    for name in options.only:
        document["integrations"][name] = compare(*measure(name)) | {"origin": format_origin(facts)}
        graphs = capture_digests({name: (f"{__package__}.{name}:factory", {})})
        origins[name] = {**facts, "graphs": graphs}
    write_result(path, document, join_digests(origins))
    (options.out / "summary.md").write_text(summary(document["integrations"]), encoding="utf-8")


def measure(name: str) -> tuple[Record, Record]:
    """Return the records of the plain and of the planned run, each of a fresh process."""
    with tempfile.TemporaryDirectory(prefix="integrations-") as folder:
        plan = Path(folder) / "plan.json"
        log(f"{name}: plan for {BUDGET}")
        reference = f"experiments.benchmarks.integrations.{name}:factory"
        planfile.write(plan, autotune.plan(reference, budget=BUDGET))
        return run_child(name, Path(folder)), run_child(name, Path(folder), plan)


def run_child(name: str, folder: Path, *plan: Path) -> Record:
    """Run an integration in a process of its own."""
    log(f"{name}: {STEPS} steps {'under the plan' if plan else 'plain'}")
    out = folder / "record.json"
    command = [sys.executable, "-m", "experiments.benchmarks.integrations.child", name, out, *plan]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # the bits of a sum depend on the threads that share it
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{name} ended with code {done.returncode}\n{done.stderr[-3000:]}")
    fields = json.loads(out.read_text(encoding="utf-8"))
    return Record(**fields | {"losses": tuple(fields["losses"]), "norms": tuple(fields["norms"])})


def compare(plain: Record, planned: Record) -> dict[str, Any]:
    """Return the figures of both runs, and what differs between them in any bit."""
    differs = sorted(
        name for name in plain.state.keys() | planned.state.keys() if plain.state.get(name) != planned.state.get(name)
    )
    if plain.gradients != planned.gradients:
        differs.insert(0, "gradients")
    return {
        "losses": {"plain": plain.losses, "planned": planned.losses},
        "norms": {"plain": plain.norms, "planned": planned.norms},
        "tensors": len(plain.state),
        "differs": differs,
        "step_bytes": {"plain": plain.step_bytes, "planned": planned.step_bytes},
        "floor_bytes": {"plain": plain.floor_bytes, "planned": planned.floor_bytes},
    }


def is_equal(result: Mapping[str, Any]) -> bool:
    """Return True if every loss, norm, gradient and tensor of the runs is equal, over all steps."""
    losses, norms = result["losses"], result["norms"]
    is_complete = len(losses["plain"]) == len(norms["plain"]) == STEPS
    return (
        is_complete
        and losses["plain"] == losses["planned"]
        and norms["plain"] == norms["planned"]
        and not result["differs"]
    )


def bytes_ratio(result: Mapping[str, Any]) -> float:
    """Return the planned step's bytes over the plain one's."""
    return float(result["step_bytes"]["planned"] / result["step_bytes"]["plain"])


def summary(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Format a table of all integrations."""
    lines = [
        f"| loop | steps | loss, first to last | plain: step | planned: step | ratio, at most {TARGET:.2f} | whole process: plain, planned | losses, gradients, state |",
        "|---|--:|---|--:|--:|--:|--:|---|",
    ]
    for name, result in results.items():
        losses, ratio = result["losses"]["plain"], bytes_ratio(result)
        sizes = [f"{result['step_bytes'][kind] / MIB:.1f} MiB" for kind in ("plain", "planned")]
        whole = ", ".join(
            f"{(result['step_bytes'][kind] + result['floor_bytes'][kind]) / MIB:.0f} MiB"
            for kind in ("plain", "planned")
        )
        lines.append(
            f"| {INTEGRATIONS[name]} | {len(losses)} | {losses[0]:.3f} to {losses[-1]:.3f} | {' | '.join(sizes)} "
            f"| {ratio:.3f}{'' if ratio <= TARGET else ', missed'} | {whole} | {'identical' if is_equal(result) else 'different'} |"
        )
    origins = [f"- {INTEGRATIONS[name]}: {result['origin']}" for name, result in results.items()]
    return "\n".join([*lines, "", REMARK, "", *origins]) + "\n"


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
