"""Every peer and ours on the same training steps: bytes, seconds and gradients; a frontier for each model.

`python experiments/frontier/run.py [--models NAME...] [--peers NAME...] [--parts peers plans seconds] [--rounds 6] [--time 900] [--again plans]`

A run does only what the results do not hold yet, and writes after every number: run it again until nothing is missing.
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

from bench import Bench, exact
from ours import Ours
from peers import PEERS
from summary import summarize

from autotune.ir.plan import Plan
from autotune.measure.device.this_device import this_device
from autotune.measure.messages import Failed
from autotune.measure.worker.bench import UNMEASURED_STEPS
from autotune.records.json_codec import to_json

sys.path.insert(0, str(Path(__file__).parents[1]))
from turns import How, reason

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
"""Of eager's step bytes: ours is measured there too."""
MERGED = 0.01
"""A budget so little above another's gets no plan of its own: the smaller one's serves it."""
BYTES_SHARE, PLANS_SHARE = 0.4, 0.65
"""Of a model's time, until the peers' bytes are measured, and ours."""
PARTS = ("peers", "plans", "seconds")
"""Bytes of the peers mind no other work on the machine; the profile that plans are made by does, and seconds do."""
LEAST_ROUNDS = 3


class Frontier:
    """One model's results, and what is still missing of them."""

    def __init__(self, name: str, out: Path, options: argparse.Namespace, scratch: Path) -> None:
        self.name, self.options = name, options
        self.path, self.plans_path = out / f"{name}.json", out / f"{name}.plans.json"
        self.began = time.monotonic()
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
            known = json.loads(self.path.read_text())
            for key in ("arguments", "machine"):
                if known[key] != self.record[key]:
                    raise SystemExit(f"{self.path} is of another {key}: choose another --out, or take it away")
            self.record, self.plans = known, json.loads(self.plans_path.read_text())
            forget(self.record, options.again)
        self.bench = Bench(name, model, arguments, scratch)

    def run(self) -> None:
        """Bytes of every peer, then ours where they stand, then seconds of all in turns."""
        command = shlex.join(["python", "experiments/frontier/run.py", *sys.argv[1:]])
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.record["commands"].append({"command": command, "started": started, "load": os.getloadavg()})
        peers = self.record["peers"]
        if "eager" not in peers:
            peers["eager"] = self.bench.peer("eager", self.options.time)
            self.write()
        if "rounding" not in self.record and "peers" in self.options.parts:
            self.record["rounding"] = self.bench.rounding(self.options.time)
            self.write()
        for name in self.options.peers if "peers" in self.options.parts else ():
            if name in peers or self.spent > BYTES_SHARE:
                continue
            try:
                peers[name] = self.bench.peer(name, self.options.time)
            except Failed as failure:
                peers[name] = {"failed": reason(failure)}
            self.write()
        if "plans" in self.options.parts:
            self.plan()
        tried: list[str] = []
        # one session after the other, where memory is short for all in one
        while "seconds" in self.options.parts and self.spent < 1:
            if not (missing := self.untimed()) or missing == tried:
                break
            self.time_in_turns(missing)
            tried = missing

    @property
    def spent(self) -> float:
        """Part of this model's time."""
        return (time.monotonic() - self.began) / self.options.time

    def wanted(self) -> list[int]:
        """Budgets at which ours is to be measured, the highest first."""
        seen = [p["step_peak_bytes"] for p in self.record["peers"].values() if "step_peak_bytes" in p]
        eager = self.record["peers"]["eager"]["step_peak_bytes"]
        return thinned([*seen, *(int(share * eager) for share in SHARES)], eager)

    @property
    def lowest_bytes(self) -> int:
        """Peak of our lowest plan; 0 where none ran."""
        lowest: int = self.record["ours"].get("lowest", {}).get("step_peak_bytes", 0)
        return lowest

    def plan(self) -> None:
        """Ours at every wanted budget that it can keep, and its lowest."""
        made = self.record["ours"]
        known = [one["budget_bytes"] for one in made.values() if "budget_bytes" in one]
        todo = [b for b in self.wanted() if not any(b / (1 + MERGED) <= k <= b for k in known)]
        # what a budget got that cannot be kept is the lowest
        todo = [budget for budget in todo if budget > self.lowest_bytes]
        if not todo and "lowest" in made and "traced" in made:
            return
        with Ours(self.bench, self.options.planning) as ours:
            self.record["graph"] = ours.graph_summary()
            if "traced" not in made:
                plan = Plan(Plan.traced(ours.graph).order, allocator="arena")
                self.plans["traced"], made["traced"] = to_json(plan), ours.peak(plan)
                self.write()
            for budget in [*([0] if "lowest" not in made else []), *todo]:
                if self.spent > PLANS_SHARE and made:
                    break
                if 0 < budget <= self.lowest_bytes:
                    continue
                name = f"ours {budget / 2**20:.3f} MiB" if budget else "lowest"
                try:
                    plan, made[name] = ours.fit(name, budget)
                except Failed as failure:
                    made[name] = {"budget_bytes": budget, "failed": reason(failure)}
                else:
                    self.plans[name] = to_json(plan)
                self.write()

    def untimed(self) -> list[str]:
        """Ours and the peers asked for whose bytes are known and whose seconds are not."""
        timed = {name for session in self.record["sessions"] for name in (*session["errors"], *session["failed"])}
        peers = {name: seen for name, seen in self.record["peers"].items() if name in self.options.peers}
        known = {**peers, **self.record["ours"]}
        return [name for name, seen in known.items() if name not in timed | {"eager"} and "failed" not in seen]

    def time_in_turns(self, missing: list[str]) -> None:
        """One session. Its ratios to eager are what sessions are compared by."""
        begun = os.getloadavg()
        left = max(60.0, (1 - self.spent) * self.options.time)
        # plans first: nothing is compiled for them
        plans = {name: self.plans[name] for name in missing if name in self.record["ours"]}
        peers = dict.fromkeys(name for name in missing if name in self.record["peers"])
        how = How(self.options.rounds, LEAST_ROUNDS, seconds=left, limit=self.options.time)
        session = self.bench.in_turns({"eager": None, **plans, **peers}, how)
        for name, charged in session.pop("charged").items():
            seen = self.record["ours"].get(name) or self.record["peers"][name]
            seen["step_charged_bytes"] = charged
        timed = {block["variant"] for block in session["blocks"]} - {"eager"}
        session["errors"] = {
            name: exact(self.record["ours"][name]) if name in plans else self.record["peers"][name]["errors"]
            for name in timed
        }
        session["load"] = {"began": begun, "ended": os.getloadavg()}
        session["unmeasured"] = UNMEASURED_STEPS
        self.record["sessions"].append(session)
        self.write()

    def write(self) -> None:
        for path, content in ((self.plans_path, self.plans), (self.path, self.record)):
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(".draft")
            # one line for each part: plans are thousands of numbers
            parts = [f"{json.dumps(key)}: {json.dumps(part)}" for key, part in content.items()]
            draft.write_text("{\n" + ",\n".join(parts) + "\n}\n")
            draft.replace(path)


def forget(record: dict[str, Any], what: Collection[str]) -> None:
    """Take out our plans, with their seconds, or all seconds, so that they are measured again."""
    if "seconds" in what:
        record["sessions"] = []
    if "plans" in what:
        ours, record["ours"] = record["ours"], {}
        for session in record["sessions"]:
            session["blocks"] = [block for block in session["blocks"] if block["variant"] not in ours]
            for part in ("errors", "failed"):
                session[part] = {name: found for name, found in session[part].items() if name not in ours}


def thinned(budgets: list[int], eager: int) -> list[int]:
    """Budgets up to eager's bytes, highest first, without those that a slightly smaller one serves as well."""
    kept: list[int] = []
    for budget in sorted(budgets):
        if budget <= eager and (not kept or budget > kept[-1] * (1 + MERGED)):
            kept.append(budget)
    return kept[::-1]


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
    failed = []
    for name in () if options.summary else options.models:
        with tempfile.TemporaryDirectory(prefix="frontier-") as scratch:
            try:
                Frontier(name, out, options, Path(scratch)).run()
            except Failed as failure:
                failed.append(f"{name}: {reason(failure)}")
        summarize(out)
    print(summarize(out))
    if failed:
        raise SystemExit("\n".join(failed))


def _tiny(model: str, arguments: dict[str, Any]) -> dict[str, Any]:
    sys.path.insert(0, str(HERE.parents[1]))
    from tests.zoo.tiny import TINY

    dropout = {key: arguments[key] for key in ("dropout",) if key in arguments}
    return {**TINY[model], **dropout} | ({"depth": 4} if model in ("gpt2", "bert", "vit") else {})


if __name__ == "__main__":
    main()
