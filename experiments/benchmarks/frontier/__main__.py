"""Every peer and our plans on the same training steps: bytes, seconds and gradients; a Pareto front per model.

`python -m experiments.benchmarks.frontier [--models NAME...] [--peers NAME...] [--parts peers plans seconds] [--rounds 6] [--time 900] [--again plans]`

Measures what the results do not have yet, and writes after every number: run it again until nothing is missing. The exit
status is 75 if time ended before that.
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from autotune.ir.plan import Plan
from autotune.measure.device.this_device import this_device
from autotune.measure.interleaving import RoundLimits
from autotune.measure.messages import UNMEASURED_STEPS, ChildError
from autotune.records.json_codec import from_json, to_json
from experiments.benchmarks.frontier.bench import ModelBench, exact_errors
from experiments.benchmarks.frontier.ours import PlanBench
from experiments.benchmarks.frontier.peers import PEERS
from experiments.benchmarks.frontier.summary import summarize
from experiments.common.commands import exit_unfinished
from experiments.common.facts import collect_facts, is_same_machine
from experiments.common.result_file import write_result
from experiments.common.turns import describe_failure

HERE = Path(__file__).parent
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet50": ("resnet50", {"batch": 8}),
    "gpt2-dropout": ("gpt2", {"batch": 8, "dropout": 0.1}),
    "gpt2": ("gpt2", {"batch": 8}),
    "lstm": ("lstm", {"batch": 32}),
    "resnet152": ("resnet152", {"batch": 2}),
    "mobilenet_v2": ("mobilenet_v2", {"batch": 8}),
    "bert": ("bert", {"batch": 8}),
    "vit": ("vit", {"batch": 8}),
}
SHARES = (0.745, 0.72, 0.65, 0.5, 0.4)
"""Additional budgets of ours, as shares of eager's step bytes."""
MERGED = 0.01
"""Relative distance of budgets below which the smaller one's plan serves both."""
BYTES_SHARE, PLANS_SHARE = 0.4, 0.65
"""Shares of a model's time until the peers' bytes, and ours, are measured."""
PARTS = ("peers", "plans", "seconds")
"""Parts of a run. Other work on the machine disturbs the profile for our plans and the seconds, not the peers' bytes."""
LEAST_ROUNDS = 3


class ModelFrontier:
    """One model's results, and its missing measurements."""

    def __init__(self, name: str, out: Path, options: argparse.Namespace, scratch: Path) -> None:
        self.name, self.options = name, options
        self.path, self.plans_path = out / f"{name}.json", out / f"{name}.plans.json"
        self.began, self.facts = time.monotonic(), collect_facts()
        model, arguments = MODELS[name]
        arguments = _tiny(model, arguments) if options.tiny else arguments
        device = this_device("cpu")
        self.record: dict[str, Any] = {
            "model": model,
            "arguments": arguments,
            "machine": to_json(device) | {"processors": os.cpu_count()},
            "commands": [],
            "peers": {},
            "ours": {},
            "sessions": [],
        }
        self.plans: dict[str, Any] = {}
        if self.path.exists():
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            if stored["arguments"] != self.record["arguments"]:
                raise SystemExit(f"{self.path} is of other arguments: choose another --out, or take it away")
            if not is_same_machine(stored["machine"], self.record["machine"]):
                raise SystemExit(f"{self.path} is of another machine: choose another --out, or take it away")
            self.record, self.plans = stored, json.loads(self.plans_path.read_text(encoding="utf-8"))
            drop_results(self.record, options.again)
        self.bench = ModelBench(name, model, arguments, scratch)

    def run(self) -> list[str]:
        """Measure the bytes of every peer, then ours at the same bytes, then seconds of all, interleaved.

        Return the names of what is left for a further run, because the time of this one ended.
        """
        command = shlex.join(["python", "-m", "experiments.benchmarks.frontier", *sys.argv[1:]])
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.record["commands"].append({"command": command, "started": started, "load": os.getloadavg()})
        peers = self.record["peers"]
        if "eager" not in peers:
            peers["eager"] = self.bench.peer("eager", self.options.time)
            self.write()
        if "rounding" not in self.record and "peers" in self.options.parts:
            self.record["rounding"] = self.bench.rounding_errors(self.options.time)
            self.write()
        for name in self.options.peers if "peers" in self.options.parts else ():
            if name in peers or self.time_share > BYTES_SHARE:
                continue
            try:
                peers[name] = self.bench.peer(name, self.options.time)
            except ChildError as failure:
                peers[name] = {"failed": describe_failure(failure)}
            self.write()
        if "plans" in self.options.parts:
            self.measure_plans()
        tried: list[str] = []
        # one session after the other, where memory is short for all in one
        while "seconds" in self.options.parts and self.time_share < 1:
            if not (missing := self.untimed()) or missing == tried:
                break
            self.time_session(missing)
            tried = missing
        return self.find_unmeasured()

    def find_unmeasured(self) -> list[str]:
        """Return the names of missing peers, plans and seconds.

        Before the time ends, only variants that lack memory have no seconds. They are not returned.
        """
        parts, records, names = self.options.parts, self.record["ours"], list[str]()
        if "peers" in parts:
            names += [name for name in self.options.peers if name not in self.record["peers"]]
        if "plans" in parts:
            names += [name for name in ("traced", "lowest") if name not in records]
            names += [f"plan for {budget / 2**20:.3f} MiB" for budget in self.unplanned_budgets()]
        if "seconds" in parts and self.time_share >= 1:
            names += [f"seconds of {name}" for name in self.untimed()]
        return names

    @property
    def time_share(self) -> float:
        """Elapsed share of this model's time."""
        return (time.monotonic() - self.began) / self.options.time

    def missing_budgets(self) -> list[int]:
        """Return the budgets for our plans, the highest first."""
        peaks = [p["step_peak_bytes"] for p in self.record["peers"].values() if "step_peak_bytes" in p]
        eager = self.record["peers"]["eager"]["step_peak_bytes"]
        return thin_budgets([*peaks, *(int(share * eager) for share in SHARES)], eager)

    @property
    def lowest_bytes(self) -> int:
        """Peak of our lowest plan; 0 where none ran."""
        lowest: int = self.record["ours"].get("lowest", {}).get("step_peak_bytes", 0)
        return lowest

    def unplanned_budgets(self) -> list[int]:
        """Return the budgets without a plan that is tried, the highest first."""
        budgets = [record["budget_bytes"] for record in self.record["ours"].values() if "budget_bytes" in record]
        todo = [b for b in self.missing_budgets() if not any(b / (1 + MERGED) <= k <= b for k in budgets)]
        # what a budget got that cannot be kept is the lowest
        return [budget for budget in todo if budget > self.lowest_bytes]

    def measure_plans(self) -> None:
        """Measure our plan for every budget that it can reach, and the lowest."""
        records = self.record["ours"]
        todo = self.unplanned_budgets()
        if not todo and "lowest" in records and "traced" in records:
            return
        with PlanBench(self.bench, self.options.planning) as ours:
            self.record["graph"] = ours.graph_summary()
            if "traced" not in records:
                plan = Plan(Plan.traced(ours.graph).order, allocator="arena")
                self.plans["traced"], records["traced"] = to_json(plan), ours.peak(plan)
                self.write()
            for budget in [*([0] if "lowest" not in records else []), *todo]:
                if self.time_share > PLANS_SHARE and records:
                    break
                if 0 < budget <= self.lowest_bytes:
                    continue
                name = f"ours {budget / 2**20:.3f} MiB" if budget else "lowest"
                try:
                    plan, records[name] = ours.fit(name, budget)
                except ChildError as failure:
                    records[name] = {"budget_bytes": budget, "failed": describe_failure(failure)}
                else:
                    self.plans[name] = to_json(plan)
                self.write()

    def untimed(self) -> list[str]:
        """Return our plans and the selected peers whose bytes are measured and whose seconds are not."""
        timed = {name for session in self.record["sessions"] for name in (*session["errors"], *session["failed"])}
        peers = {name: record for name, record in self.record["peers"].items() if name in self.options.peers}
        records = {**peers, **self.record["ours"]}
        return [name for name, record in records.items() if name not in timed | {"eager"} and "failed" not in record]

    def time_session(self, missing: list[str]) -> None:
        """Measure one session; sessions are compared by their ratios to eager."""
        load_before = os.getloadavg()
        left = max(60.0, (1 - self.time_share) * self.options.time)
        # plans first: nothing is compiled for them
        plans = {name: from_json(Plan, self.plans[name], where=name) for name in missing if name in self.record["ours"]}
        peers = dict.fromkeys(name for name in missing if name in self.record["peers"])
        limits = RoundLimits(self.options.rounds, LEAST_ROUNDS, seconds=left, request_seconds=self.options.time)
        session = self.bench.interleave_variants({"eager": None, **plans, **peers}, limits)
        for name, charged in session.pop("charged").items():
            record = self.record["ours"].get(name) or self.record["peers"][name]
            record["step_charged_bytes"] = charged
        timed = {block["variant"] for block in session["blocks"]} - {"eager"}
        session["errors"] = {
            name: exact_errors(self.record["ours"][name]) if name in plans else self.record["peers"][name]["errors"]
            for name in timed
        }
        session["load"] = {"began": load_before, "ended": os.getloadavg()}
        session["unmeasured"] = UNMEASURED_STEPS
        self.record["sessions"].append(session)
        self.write()

    def write(self) -> None:
        """Write plans and results; after a crash in between no result lacks its plan."""
        graphs = {self.name: graph["digest"]} if (graph := self.record.get("graph")) else {}
        self.plans_path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.plans_path.with_suffix(".draft")
        # one line for each plan: plans are thousands of numbers
        parts = [f"{json.dumps(key)}: {json.dumps(plan)}" for key, plan in self.plans.items()]
        draft.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
        draft.replace(self.plans_path)
        write_result(self.path, self.record | self.facts, graphs)


def drop_results(record: dict[str, Any], parts: Collection[str]) -> None:
    """Remove our plans with their seconds, or all seconds, so that they are re-measured."""
    if "seconds" in parts:
        record["sessions"] = []
    if "plans" in parts:
        ours, record["ours"] = record["ours"], {}
        for session in record["sessions"]:
            session["blocks"] = [block for block in session["blocks"] if block["variant"] not in ours]
            for part in ("errors", "failed"):
                session[part] = {name: value for name, value in session[part].items() if name not in ours}


def thin_budgets(budgets: list[int], eager: int) -> list[int]:
    """Return the budgets up to eager's bytes, highest first, without those that a slightly smaller one serves as well."""
    budgets_kept: list[int] = []
    for budget in sorted(budgets):
        if budget <= eager and (not budgets_kept or budget > budgets_kept[-1] * (1 + MERGED)):
            budgets_kept.append(budget)
    return budgets_kept[::-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="peers' bytes, ours, or seconds of all"
    )
    parser.add_argument("--rounds", type=int, default=6, help="a block of every variant each")
    parser.add_argument("--time", type=float, default=900.0, help="seconds for a model in this run, about")
    parser.add_argument("--planning", type=float, default=30.0, help="seconds after which no other planner is tried")
    parser.add_argument("--out", type=Path, help="a folder, from here: results/NAME; by default named by the processor")
    parser.add_argument(
        "--again", nargs="+", choices=("plans", "seconds"), default=[],
        help="measure these anew: plans, after a planner has changed; seconds, to have all variants in one session",
    )  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="models of a blink, to try the script itself")
    parser.add_argument("--summary", action="store_true", help="measure nothing, write the tables and plots anew")
    options = parser.parse_args()
    out = HERE / (options.out or f"results/{'tiny-' if options.tiny else ''}{this_device('cpu').key}")
    failed, unfinished = [], []
    for name in () if options.summary else options.models:
        with tempfile.TemporaryDirectory(prefix="frontier-") as scratch:
            try:
                missing = ModelFrontier(name, out, options, Path(scratch)).run()
            except ChildError as failure:
                failed.append(f"{name}: {describe_failure(failure)}")
            else:
                unfinished += [f"{name}: {', '.join(missing)}"] if missing else []
        summarize(out)
    print(summarize(out))
    if failed:
        raise SystemExit("\n".join(failed))
    if unfinished:
        exit_unfinished("\n".join(["not measured yet; run the command again:", *unfinished]))


def _tiny(model: str, arguments: dict[str, Any]) -> dict[str, Any]:
    from tests.workloads.zoo.tiny import TINY

    dropout = {key: arguments[key] for key in ("dropout",) if key in arguments}
    return {**TINY[model], **dropout} | ({"depth": 4} if model in ("gpt2", "bert", "vit") else {})


if __name__ == "__main__":
    main()
