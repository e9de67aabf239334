"""Eager, per-block checkpoint and ours on the same training steps: bytes, seconds and results, one table.

`python experiments/peers/run.py [--models resnet50 gpt2 lstm] [--rounds 12] [--out results/NAME] [--tiny]`
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from table import write

from autotune.candidates import Candidate, answers, smallest
from autotune.costs import Costs
from autotune.devices import this_device
from autotune.graph import TrainGraph
from autotune.harness.child import Child
from autotune.harness.messages import Failed, Spec
from autotune.judge import aim_bytes
from autotune.plan import Plan
from autotune.planners import KINDS
from autotune.records import from_json, to_json
from autotune.space import search_space
from autotune.units import fmt_bytes

HERE = Path(__file__).parent
MODELS: dict[str, dict[str, Any]] = {
    "resnet50": {"batch": 8},
    "gpt2": {"batch": 8, "dropout": 0.1},
    "lstm": {"batch": 32},
}
SHARE = 0.65
STEPS = 3
"""Measured steps of a block; one more before them is not."""
CHARGED_STEPS = 6
TRIES = 3
"""Plans made for one budget: each aims lower by what the one before it was charged too much."""
CHILD_SECONDS = 1800.0


class Peers:
    """One model's variants."""

    def __init__(self, model: str, arguments: dict[str, Any], scratch: Path) -> None:
        self.model, self.arguments, self.scratch = model, arguments, scratch
        self.eager = {"reference": model, "arguments": arguments}
        self.checkpoint = {
            "reference": f"{HERE / 'blocks.py'}:workload",
            "arguments": {"model": model, **arguments},
        }

    def run(self, rounds: int) -> dict[str, Any]:
        """Bytes of every variant, each in processes of its own, then seconds of all in turns in one."""
        began = os.getloadavg()
        found = self.ask(self.eager, {"do": "prepare"}, return_memory=False)
        self.graph = from_json(TrainGraph, found["graph"], where="graph")
        self.costs = from_json(Costs, found["costs"], where="costs")
        variants = {"eager": self.bytes_of(self.eager), "checkpoint": self.bytes_of(self.checkpoint)}
        plans: dict[str, Plan] = {"traced": Plan(Plan.traced(self.graph).order, allocator="arena")}
        variants["traced"] = self.bytes_of(self.eager, plans["traced"])
        budgets = {
            "ours 65 %": int(SHARE * variants["eager"]["step_peak_bytes"]),
            "ours at checkpoint's peak": variants["checkpoint"]["step_peak_bytes"],
        }
        for name, budget in budgets.items():
            plans[name], variants[name] = self.fit(name, budget)
        self.say(f"{rounds} rounds of {', '.join(variants)} in turns")
        timed = self.in_turns(plans, rounds)
        for name, variant in variants.items():
            variant |= {
                "errors": timed["errors"][name],
                "blocks": [block["seconds"] for block in timed["blocks"] if block["variant"] == name],
            }
        return {
            "arguments": self.arguments,
            "graph": {"digest": self.graph.digest, "ops": len(self.graph.ops), "values": len(self.graph.values)},
            "threads": timed["threads"],
            "load": {"began": began, "ended": os.getloadavg()},
            "variants": variants,
            "order_of_blocks": [[block["round"], block["variant"]] for block in timed["blocks"]],
        }

    def fit(self, name: str, budget: int) -> tuple[Plan, dict[str, Any]]:
        """The planners' fastest plan by estimate whose charge was measured to keep the budget."""
        aim, tries, wastes = budget, [], []
        for _ in range(TRIES):
            began = time.perf_counter()
            made = self.fastest(aim)
            seconds = time.perf_counter() - began
            seen = self.bytes_of(self.eager, made.plan)
            tries.append({"aim_bytes": aim, "step_charged_bytes": seen["step_charged_bytes"]})
            self.say(f"{name}: charged {fmt_bytes(seen['step_charged_bytes'])} of {fmt_bytes(budget)}")
            if seen["step_charged_bytes"] <= budget:
                break
            wastes.append(seen["step_charged_bytes"] / made.estimate.peak_bytes - 1)
            aim = aim_bytes(budget, wastes)
        return made.plan, seen | {
            "budget_bytes": budget,
            "tries": tries,
            "planning_seconds": seconds,
            "settings": made.settings,
            "estimate": to_json(made.estimate),
            "recomputed_ops": made.plan.recomputed,
        }

    def fastest(self, aim: int) -> Candidate:
        """Without stores: a checkpoint has none either."""
        settled = {"allocator": {"arena": KINDS["allocator"]["arena"]}, "inplace": {"greedy": KINDS["inplace"]["greedy"]}}
        searched = search_space({**KINDS, **settled}, ())
        made = [one for one in answers(self.graph, self.costs, searched, aim) if one.estimate.peak_bytes <= aim]
        return min(made, key=lambda one: one.estimate.seconds) if made else smallest(self.graph, self.costs, searched)

    def bytes_of(self, workload: dict[str, Any], plan: Plan | None = None) -> dict[str, Any]:
        """Peak while malloc returns memory at once, and charge with the allocator of every day, above the floor."""
        reference = str(self.scratch / ("eager" if plan or workload is self.eager else "checkpoint"))
        request: dict[str, Any] = {"do": "baseline_bytes", "reference": reference}
        daily: dict[str, Any] = {"do": "seconds", "plan": None, "eager": True}
        if plan is not None:
            document = to_json(plan)
            request = {"do": "plan_bytes", "plan": document, "reference": reference, "tolerance": float("inf")}
            daily = {"do": "seconds", "plan": document, "eager": False}
        found = self.ask(workload, request, return_memory=True)
        charged = self.ask(
            workload, {**daily, "samples": CHARGED_STEPS, "patience_seconds": CHILD_SECONDS / 3}, return_memory=False
        )
        if "outcome" in charged:
            raise SystemExit(f"{self.model}: {charged['outcome']}: {charged['detail']}")
        peak, daily_charge = (
            one[key] - one["floor_bytes"] for one, key in ((found, "peak_bytes"), (charged, "charged_bytes"))
        )
        return {
            "step_peak_bytes": peak,
            # an arena's first two steps run on malloc that returns memory at once: they are charged their peak
            "step_charged_bytes": daily_charge if plan is None else max(daily_charge, peak),
            "floor_bytes": found["floor_bytes"],
            "meter": found["meter"],
            "max_error": found.get("max_error"),
        }

    def ask(self, workload: dict[str, Any], request: dict[str, Any], *, return_memory: bool) -> dict[str, Any]:
        """One question to a process of its own."""
        self.say(f"{request['do']} of {workload['reference'].rpartition('/')[2]}")
        spec = Spec(**workload, scratch=str(self.scratch), return_memory=return_memory)
        child = Child.start(spec, self.scratch / "child.log")
        try:
            return child.ask(request, CHILD_SECONDS)
        finally:
            child.end()

    def in_turns(self, plans: dict[str, Plan], rounds: int) -> dict[str, Any]:
        """Seconds and results of all variants, from one process and one model object."""
        documents = {name: to_json(plan) for name, plan in plans.items()}
        request = {
            "model": self.model,
            "arguments": self.arguments,
            "plans": documents,
            "rounds": rounds,
            "steps": STEPS,
        }
        asked, answered = self.scratch / "request.json", self.scratch / "answer.json"
        asked.write_text(json.dumps(request))
        # threads and malloc as they come, as in the processes that bytes are measured in
        plain = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "MKL_", "MALLOC_"))}
        subprocess.run([sys.executable, str(HERE / "turns.py"), str(asked), str(answered)], check=True, env=plain)
        return dict(json.loads(answered.read_text()))

    def say(self, what: str) -> None:
        print(f"{self.model}: {what}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=12, help="a block of every variant each")
    parser.add_argument("--out", type=Path, help="a folder, from here: results/NAME; by default named by the processor")
    parser.add_argument("--tiny", action="store_true", help="models of a blink, to try the script itself")
    options = parser.parse_args()
    device = this_device("cpu")
    out = HERE / (options.out or f"results/{'tiny-' if options.tiny else ''}{device.key}")
    record: dict[str, Any] = {
        "command": shlex.join(["python", "experiments/peers/run.py", *sys.argv[1:]]),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": to_json(device) | {"processors": os.cpu_count()},
        "measured_steps_of_a_block": STEPS,
        "models": {},
    }
    for model in options.models:
        with tempfile.TemporaryDirectory(prefix="peers-") as scratch:
            arguments = _tiny(model) if options.tiny else MODELS[model]
            try:
                record["models"][model] = Peers(model, arguments, Path(scratch)).run(options.rounds)
            except Failed as failure:
                raise SystemExit(f"{model}: {failure.outcome}: {failure.detail}") from None
        write(out, record)
    print((out / "results.md").read_text())


def _tiny(model: str) -> dict[str, Any]:
    sys.path.insert(0, str(HERE.parents[1]))
    from tests.zoo.tiny import TINY

    return TINY[model]


if __name__ == "__main__":
    main()
