"""Plans on eager's kernels and on compiled regions beside torch.compile and per-block checkpoint, with equal allocators.

`python -m experiments.benchmarks.compiled [--models NAME...] [--rounds 8] [--parts bytes plans seconds]`

Bytes of peers and plans first, each in a process that returns memory at once. Then one session times the peers and, for
the bytes of each, our plans that may be the fastest by estimate. They run in turns, each in a process with tcmalloc
preloaded; plans run in their arena. What is measured is kept: run it again until nothing is missing. Neither plans nor
times are measured while other programs use the CPU.
"""

import argparse
import ctypes.util
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from autotune.ir.plan import REBUILD_PRICE, Plan
from autotune.measure.child import Child
from autotune.measure.device.this_device import this_device
from autotune.measure.interleaving import EAGER, ProcessVariant, RoundLimits, interleave
from autotune.measure.messages import ChildError
from autotune.measure.spec import Spec
from autotune.records.json_codec import from_json, to_json
from autotune.workloads.reference import WorkloadRef
from experiments.benchmarks.compiled.ours import Capture, PlanBench
from experiments.benchmarks.compiled.summary import fast_plans, summarize
from experiments.benchmarks.frontier.bench import ModelBench
from experiments.common.commands import exit_unfinished
from experiments.common.facts import collect_facts, is_same_machine
from experiments.common.result_file import write_result
from experiments.common.turns import describe_failure, remove_paths

HERE = Path(__file__).parent
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet50": ("resnet50", {"batch": 8}),
    "mobilenet_v2": ("mobilenet_v2", {"batch": 8}),
    "gpt2": ("gpt2", {"batch": 8}),
    "gpt2-dropout": ("gpt2", {"batch": 8, "dropout": 0.1}),
    "bert": ("bert", {"batch": 8}),
    "vit": ("vit", {"batch": 8}),
    "lstm": ("lstm", {"batch": 32}),
}
CONVOLUTIONS = ("resnet50", "mobilenet_v2")
"""Models that plans run in channels_last as well; regions in that alone, which inductor chooses for them by itself."""
SMALLEST_PRICE = 0.05
"""Rebuild price of the regions in a second capture, for the lowest peak alone."""
PEERS = ("checkpoint", "inductor 1", "inductor 0.5", "inductor 0.3", "inductor 0.1")
PARTS = ("bytes", "plans", "seconds")
REQUEST_SECONDS = 1800.0
MERGED = 0.01
"""Relative distance of budgets below which the smaller one's plan serves both."""
IDLE_PERCENT = 15.0
"""Share of the CPUs that other programs may use when a session begins."""


class Model:
    """One model's record, and its missing measurements."""

    def __init__(self, name: str, out: Path, options: argparse.Namespace, scratch: Path) -> None:
        self.name, self.options, self.scratch, self.path = name, options, scratch, out / f"{name}.json"
        model, arguments = MODELS[name]
        arguments = _tiny(model, arguments) if options.tiny else arguments
        self.workload = WorkloadRef(model, arguments)
        self.bench = ModelBench(name, model, arguments, scratch)
        self.record: dict[str, Any] = collect_facts() | {
            "model": model, "arguments": arguments, "peers": {}, "captures": {}, "plans": {}, "sessions": [],
        }  # fmt: skip
        if self.path.exists():
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            if stored["arguments"] != to_json(self.record["arguments"]):
                raise SystemExit(f"{self.path} is of other arguments: choose another --out, or take it away")
            if not is_same_machine(stored["machine"], self.record["machine"]):
                raise SystemExit(f"{self.path} is of another machine: choose another --out, or take it away")
            facts = ("machine", "commit", "date", "command", "load_before")
            self.record = stored | {key: self.record[key] for key in facts}
        for part in options.again:
            self.forget(part)

    def forget(self, part: str) -> None:
        """Drop a part of the record, so that it is measured again."""
        self.record["sessions"] = []
        if part == "plans":
            self.record["plans"], self.record["captures"] = {}, {}

    def run(self) -> None:
        """Measure what is missing."""
        if "bytes" in self.options.parts:
            self.measure_peers()
        if "plans" in self.options.parts:
            for capture in self.captures():
                self.measure_plans(capture)
        if "seconds" in self.options.parts and not self.record["sessions"]:
            self.time_session()

    def captures(self) -> list[Capture]:
        """Return the captures that plans are made for."""
        formats = ("", "channels_last") if self.record["model"] in CONVOLUTIONS else ("",)
        regions = Capture("inductor", formats[-1])
        return [*(Capture("", form) for form in formats), regions, replace(regions, rebuild_price=SMALLEST_PRICE)]

    def measure_peers(self) -> None:
        """Measure the peak of eager and of every peer above its floor, and the distance of its gradients to eager's."""
        for name in (EAGER, *self.options.peers):
            if name not in self.record["peers"]:
                try:
                    self.record["peers"][name] = self.bench.peer(name, REQUEST_SECONDS)
                except ChildError as failure:
                    self.record["peers"][name] = {"failed": describe_failure(failure)}
                self.write()
        if "rounding" not in self.record:
            self.record["rounding"] = self.bench.rounding_errors(REQUEST_SECONDS)
            self.write()

    def budgets(self) -> list[int]:
        """Return the peers' peaks, the highest first; near ones are served by the smaller plan."""
        kept: list[int] = []
        peers = {name: peer for name, peer in self.record["peers"].items() if name != EAGER}
        peaks = [peer["step_peak_bytes"] for peer in peers.values() if "step_peak_bytes" in peer]
        for peak in sorted(peaks):
            if not kept or peak > kept[-1] * (1 + MERGED):
                kept.append(peak)
        return kept[::-1]

    def measure_plans(self, capture: Capture) -> None:
        """Plan the lowest peak and each budget above it; measure peaks."""
        plans = self.record["plans"]
        budgets = self.budgets() if capture.rebuild_price == REBUILD_PRICE else []
        wanted = {f"{capture.name} lowest": 0} | {f"{capture.name} {b / 2**20:.1f} MiB": b for b in budgets}
        if not [name for name in wanted if name not in plans] and capture.name in self.record["captures"]:
            return
        refuse_busy_machine(anyway=self.options.anyway)  # plans depend on the seconds of the profile
        self.bench.log(capture.name)
        with tempfile.TemporaryDirectory(dir=self.scratch) as own:
            try:
                costs = self.scratch / "profile.json"
                with PlanBench(capture, self.workload, Path(own), self.options.planning, costs) as bench:
                    self.record["captures"][capture.name] = bench.summary() | asdict(capture)
                    self.keep(f"{capture.name} traced", *bench.traced())
                    lowest = 0
                    for name, budget in wanted.items():
                        if name not in plans and budget >= lowest:
                            self.keep(name, *bench.fit(budget))
                        if not budget:
                            lowest = plans[name]["step_peak_bytes"]
            except ChildError as failure:
                self.record["captures"][capture.name] = {"failed": describe_failure(failure)} | asdict(capture)
        self.write()

    def keep(self, name: str, plan: Plan, measured: dict[str, Any]) -> None:
        self.bench.log(f"{name}: {measured['step_peak_bytes'] / 2**20:.1f} MiB")
        self.record["plans"][name] = measured | {"plan": to_json(plan)}
        self.write()

    def time_session(self) -> None:
        """Time the peers and our plans in turns, and record the blocks."""
        refuse_busy_machine(anyway=self.options.anyway)
        with tempfile.TemporaryDirectory(dir=self.scratch) as own:
            variants = {EAGER: ProcessVariant(self.starter(self.bench.workload(EAGER), Path(own), EAGER))}
            for name, plan in self.plans_to_time().items():
                spec = Capture.of(plan).spec(self.workload, Path(own))
                variants[name] = ProcessVariant(self.start_with_tcmalloc(spec, name), plan)
            for name in self.options.peers:
                if "failed" not in self.record["peers"].get(name, {"failed": ""}):
                    start = self.starter(self.bench.workload(name), Path(own), name)
                    variants[name] = ProcessVariant(start, compiles=name.startswith("inductor"))
            limits = RoundLimits(self.options.rounds, self.options.rounds, 1e6, REQUEST_SECONDS)
            load_before = os.getloadavg()
            times = asdict(interleave(variants, limits, self.bench.log))
        times["failed"] = {name: remove_paths(text) for name, text in times["failed"].items()}
        self.record["sessions"].append(times | {"load": {"began": load_before, "ended": os.getloadavg()}})
        self.write()

    def plans_to_time(self) -> dict[str, Plan]:
        """Return the plans to time: named ones, or those that may be the fastest within a peer's bytes."""
        names = self.options.plans or fast_plans(self.record)
        return {name: from_json(Plan, self.record["plans"][name]["plan"], where=name) for name in names}

    def starter(self, workload: WorkloadRef, scratch: Path, name: str) -> Callable[[], Child]:
        return self.start_with_tcmalloc(Spec(workload, scratch, scratch=scratch), name)

    def start_with_tcmalloc(self, spec: Spec, name: str) -> Callable[[], Child]:
        """Return a function that starts a child with tcmalloc in place of glibc's malloc."""
        log = spec.log_dir / f"{name.replace(' ', '-')}.log"
        return partial(Child.start, spec, log, {"LD_PRELOAD": find_tcmalloc()})

    def write(self) -> None:
        captures = self.record["captures"].items()
        write_result(
            self.path, self.record, {name: capture["digest"] for name, capture in captures if "digest" in capture}
        )


def find_tcmalloc() -> str:
    """Return the name of tcmalloc's library; SystemExit without one."""
    library = ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")
    if library is None:
        sys.exit("tcmalloc is missing; install it: apt-get install libtcmalloc-minimal4")
    return library


def refuse_busy_machine(*, anyway: bool) -> None:
    """Raise SystemExit with `UNFINISHED` while other programs use the CPU."""
    used = psutil.cpu_percent(interval=5.0)
    if used > IDLE_PERCENT and not anyway:
        exit_unfinished(f"other programs use {used:.0f} % of the CPUs: end them and run the command again")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--plans", nargs="+", metavar="NAME", help="plans to time, as the record names them")
    parser.add_argument("--rounds", type=int, default=8, help="blocks of every variant")
    parser.add_argument("--planning", type=float, default=20.0, help="seconds after which no other planner is tried")
    parser.add_argument("--again", nargs="+", choices=("plans", "seconds"), default=[], help="measure these again")
    parser.add_argument("--out", type=Path, help="directory; by default results/ and the processor's name")
    parser.add_argument("--tiny", action="store_true", help="models of milliseconds, to try the script")
    parser.add_argument("--anyway", action="store_true", help="time on a busy machine, too")
    parser.add_argument("--summary", action="store_true", help="measure nothing, write the tables again")
    options = parser.parse_args()
    find_tcmalloc()
    out = options.out or HERE / f"results/{'tiny-' if options.tiny else ''}{this_device('cpu').key}"
    for name in () if options.summary else options.models:
        with tempfile.TemporaryDirectory(prefix="compiled-") as scratch:
            Model(name, out, options, Path(scratch)).run()
        summarize(out)
    print(summarize(out))


def _tiny(model: str, arguments: dict[str, Any]) -> dict[str, Any]:
    from tests.workloads.zoo.tiny import TINY

    return {**TINY[model], **{key: arguments[key] for key in ("dropout",) if key in arguments}}


if __name__ == "__main__":
    main()
