"""Time and memory of one training step: plain PyTorch, its own methods with less memory, and our plans.

`python -m experiments.benchmarks.frontier [--models NAME...] [--rounds 8] [--parts bytes plans seconds]`

Bytes of peers and plans come first, each in a process that returns memory at once. Then a session times them in turns,
each in a process of its own: peers with tcmalloc and with glibc's malloc, plans in their arena. What is measured is kept:
run it again until nothing is missing. Neither plans nor times are measured while other programs use the CPU.
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
from experiments.benchmarks.frontier.bench import ModelBench
from experiments.benchmarks.frontier.models import CONVOLUTIONS, MODELS, TINY
from experiments.benchmarks.frontier.ours import SECONDS, Capture, PlanBench
from experiments.benchmarks.frontier.peers import PEERS, Compiled
from experiments.benchmarks.frontier.records import (
    CHANNELS_LAST,
    GLIBC,
    SHARES,
    SLOWER,
    fast_plans,
    make_budgets,
    method_of,
    thin_plans,
    timed_variants,
)
from experiments.benchmarks.frontier.summary import TRIED, draw_machines, summarize
from experiments.common.commands import refuse_busy_machine
from experiments.common.facts import collect_facts
from experiments.common.result_file import write_result
from experiments.common.resumption import refuse_other_machine
from experiments.common.turns import describe_failure, remove_paths

HERE = Path(__file__).parent
LOW_PRICE = 0.05
"""Rebuild price of the regions in a second capture, as `tune --kernels any` also tries it."""
PARTS = ("bytes", "plans", "seconds")
MEMORY_SHARE = 0.7
"""Share of the machine's memory that the processes of one session may hold."""


class ModelFrontier:
    """One model's record, and its missing measurements."""

    def __init__(self, name: str, out: Path, options: argparse.Namespace, scratch: Path) -> None:
        self.name, self.options, self.scratch, self.path = name, options, scratch, out / f"{name}.json"
        model, arguments = MODELS[name]
        arguments = _tiny(model, arguments) if options.tiny else arguments
        self.bench = ModelBench(name, model, arguments, scratch)
        self.record: dict[str, Any] = collect_facts() | {
            "model": model, "arguments": arguments, "peers": {}, "captures": {}, "plans": {}, "sessions": [],
        }  # fmt: skip
        if self.path.exists():
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            if stored["arguments"] != to_json(self.record["arguments"]):
                raise SystemExit(f"{self.path} is of other arguments: choose another --out, or take it away")
            refuse_other_machine(self.path, stored, self.record)
            for part in (*stored["peers"].values(), *stored["plans"].values(), *stored["sessions"]):
                part.setdefault("commit", stored["commit"])
            facts = ("machine", "commit", "date", "command", "load_before")
            self.record = stored | {key: self.record[key] for key in facts}
        self.origin = {key: self.record[key] for key in ("commit", "command")}
        for part in options.again:
            self.forget(part)

    def forget(self, part: str) -> None:
        """Drop a part of the record, so that it is measured again."""
        self.record["sessions"] = []
        if part == "plans":
            self.record["plans"], self.record["captures"] = {}, {}
        if part == "bytes":
            self.record["peers"] = {}
            self.record.pop("rounding", None)

    def run(self) -> None:
        """Measure what is missing."""
        if "bytes" in self.options.parts:
            self.measure_peers()
        if "plans" in self.options.parts:
            for capture in self.captures():
                self.measure_plans(capture)
        # a second session of a format times what memory was short for in the first one
        for form in self.formats() * 2 if "seconds" in self.options.parts else ():
            if missing := self.find_untimed(form):
                self.time_session(missing)

    def formats(self) -> list[str]:
        """Return the ends of the names of peers, one for each memory format that the model leaves a choice of."""
        return ["", CHANNELS_LAST] if self.record["model"] in CONVOLUTIONS else [""]

    def name_peers(self, form: str) -> list[str]:
        """Return the names of the wanted peers in one memory format, eager in another format than the model's own among them."""
        return [f"{peer}{form}" for peer in ([EAGER] if form else []) + self.options.peers]

    def captures(self) -> list[Capture]:
        """Return the captures that plans are made for."""
        formats = ("", "channels_last") if self.record["model"] in CONVOLUTIONS else ("",)
        regions = Capture("inductor", formats[-1])
        return [*(Capture("", form) for form in formats), regions, replace(regions, rebuild_price=LOW_PRICE)]

    def measure_peers(self) -> None:
        """Measure the peak of eager and of every peer above its floor, and the distance of its gradients to eager's."""
        for name in (EAGER, *(name for form in self.formats() for name in self.name_peers(form))):
            if name not in self.record["peers"]:
                try:
                    self.record["peers"][name] = self.bench.peer(name, SECONDS)
                except ChildError as failure:
                    self.record["peers"][name] = {"failed": describe_failure(failure)}
                self.record["peers"][name] |= self.origin
                self.write()
        if "rounding" not in self.record:
            self.record["rounding"] = self.bench.rounding_errors(SECONDS)
            self.write()

    def measure_plans(self, capture: Capture) -> None:
        """Plan the lowest peak and each budget above it; measure peaks."""
        plans = self.record["plans"]
        budgets = self.choose_budgets(capture)
        wanted = {f"{capture.name} lowest": 0} | {f"{capture.name} {b / 2**20:.1f} MiB": b for b in budgets}
        lowest = plans.get(f"{capture.name} lowest", {}).get("step_peak_bytes", 0)
        if not [name for name, b in wanted.items() if name not in plans and (not b or b >= lowest)]:
            return
        refuse_busy_machine(anyway=self.options.anyway)  # plans depend on the seconds of the profile
        self.bench.log(capture.name)
        with tempfile.TemporaryDirectory(dir=self.scratch) as own:
            try:
                costs = self.scratch / "profile.json"
                workload = self.bench.workload(EAGER)
                with PlanBench(capture, workload, Path(own), self.options.planning, costs) as bench:
                    self.keep_capture(capture, bench.summary())
                    if f"{capture.name} traced" not in plans:
                        self.keep(f"{capture.name} traced", *bench.traced())
                    smallest = f"{capture.name} lowest"
                    if smallest not in plans:
                        self.keep(smallest, *bench.fit(0))
                    lowest = plans[smallest]["step_peak_bytes"]
                    missing = {name: b for name, b in wanted.items() if name not in plans and b >= lowest}
                    for name, planned in zip(missing, bench.fit_all([*missing.values()]), strict=True):
                        self.keep(name, *planned)
            except ChildError as failure:
                described = self.record["captures"].setdefault(capture.name, asdict(capture))
                described["failed"] = describe_failure(failure)
        self.write()

    def choose_budgets(self, capture: Capture) -> list[int]:
        """Return the budgets to make plans of a capture for; the plan with the lowest peak is made in any case.

        A record with times gets no more plans of the low rebuild price. They would be timed without the peers, and times are
        compared within one session alone.
        """
        is_timed = bool(self.record["sessions"])
        return [] if is_timed and capture.rebuild_price != REBUILD_PRICE else make_budgets(self.record, SHARES)

    def keep_capture(self, capture: Capture, summary: dict[str, Any]) -> None:
        """Keep the description of a capture; SystemExit where plans of another graph or rebuild price are stored."""
        described = summary | asdict(capture)
        stored = self.record["captures"].get(capture.name, described)
        if any(stored.get(key) != described[key] for key in ("digest", "rebuild_price") if "digest" in stored):
            sys.exit(
                f"{self.path}: the plans of {capture.name} are of another graph; run the command with --again plans"
            )
        self.record["captures"][capture.name] = described

    def keep(self, name: str, plan: Plan, measured: dict[str, Any]) -> None:
        self.bench.log(f"{name}: {measured['step_peak_bytes'] / 2**20:.1f} MiB")
        self.record["plans"][name] = measured | {"plan": to_json(plan)} | self.origin
        self.write()

    def find_untimed(self, form: str) -> list[str]:
        """Return the variants without seconds: eager, peers of one format that run, with either malloc, and plans that may be fast.

        Plans are compared with peers of the same session. So they are timed again beside peers of the second format.
        """
        peers = [
            name for name in self.name_peers(form) if "failed" not in self.record["peers"].get(name, {"failed": ""})
        ]
        timed = timed_variants(self.record)
        names = [name for name in peers if name not in timed]
        plans = self.choose_plans(len(peers), form)
        names = [*(plans if form and names else [name for name in plans if name not in timed]), *names]
        glibc = [f"{name}{GLIBC}" for name in (*([] if form else [EAGER]), *peers)]
        return [*names, *(name for name in glibc if name not in timed)]

    def choose_plans(self, peers: int, form: str = "") -> list[str]:
        """Return the plans to time beside a number of peers in one memory format.

        Plans in the same format as the peers are among them, and on both kinds of kernels: estimates that rank these may be
        wrong. Where memory is too small for all, fewer plans with nearly equal estimates are timed, then plans for fewer budgets,
        and then none in another format. A process that waits is counted with eager's bytes, of which tcmalloc keeps a part.
        """
        eager = self.record["peers"][EAGER]
        most = int(MEMORY_SHARE * psutil.virtual_memory().total / (eager["floor_bytes"] + eager["step_peak_bytes"]))
        for slower, every in ((SLOWER, 1), (1 + (SLOWER - 1) / 3, 1), (1.0, 1), (1.0, 2), (1.0, 3)):
            alike = thin_plans(self.record, fast_plans(self.record, slower, form), every)
            plans = list(dict.fromkeys([*alike, *thin_plans(self.record, fast_plans(self.record, slower), every)]))
            if len(plans) + peers + 1 <= most:
                return plans
        return alike

    def time_session(self, names: list[str]) -> None:
        """Time variants in turns with eager, and record the blocks."""
        refuse_busy_machine(anyway=self.options.anyway)
        with tempfile.TemporaryDirectory(dir=self.scratch) as own:
            variants = {name: self.make_variant(name, Path(own)) for name in (EAGER, *names)}
            limits = RoundLimits(self.options.rounds, self.options.rounds, 1e6, SECONDS)
            load_before = os.getloadavg()
            times = asdict(interleave(variants, limits, self.bench.log))
        times["failed"] = {name: remove_paths(text) for name, text in times["failed"].items()}
        load = {"began": load_before, "ended": os.getloadavg()}
        self.record["sessions"].append(times | self.origin | {"load": load})
        self.write()

    def make_variant(self, name: str, scratch: Path) -> ProcessVariant:
        """Return the process of a plan, of a peer, or of eager."""
        if name in self.record["plans"]:
            plan = from_json(Plan, self.record["plans"][name]["plan"], where=name)
            return ProcessVariant(start_child(Capture.of(plan).spec(self.bench.workload(EAGER), scratch), name), plan)
        peer = name.removesuffix(GLIBC)
        spec = Spec(self.bench.workload(peer), scratch, scratch=scratch)
        return ProcessVariant(start_child(spec, name), compiles=isinstance(PEERS.get(method_of(peer)), Compiled))

    def write(self) -> None:
        captures = self.record["captures"].items()
        write_result(
            self.path, self.record, {name: capture["digest"] for name, capture in captures if "digest" in capture}
        )


def start_child(spec: Spec, name: str) -> Callable[[], Child]:
    """Return a function that starts a child with tcmalloc, or with glibc's malloc if the name says so."""
    preload = "" if name.endswith(GLIBC) else find_tcmalloc()
    return partial(Child.start, spec, spec.log_dir / f"{name.replace(' ', '-')}.log", {"LD_PRELOAD": preload})


def find_tcmalloc() -> str:
    """Return the name of tcmalloc's library; SystemExit without one."""
    library = ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")
    if library is None:
        sys.exit("tcmalloc is missing; install it: apt-get install libtcmalloc-minimal4")
    return library


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=8, help="blocks of every variant")
    parser.add_argument("--planning", type=float, default=20.0, help="seconds after which no other planner is tried")
    parser.add_argument(
        "--again", nargs="+", choices=PARTS, default=[],
        help="measure these and the seconds again; leave it out to continue such a run",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="directory; by default results/ and the processor's name")
    parser.add_argument("--tiny", action="store_true", help="models of milliseconds, to try the script")
    parser.add_argument("--anyway", action="store_true", help="time on a busy machine, too")
    parser.add_argument("--summary", action="store_true", help="measure nothing, write tables and pictures again")
    options = parser.parse_args()
    out = options.out or HERE / f"results/{TRIED if options.tiny else ''}{this_device('cpu').key}"
    for name in () if options.summary else options.models:
        find_tcmalloc()
        with tempfile.TemporaryDirectory(prefix="frontier-") as scratch:
            try:
                ModelFrontier(name, out, options, Path(scratch)).run()
            finally:
                summarize(out)
    print(summarize(out))
    if not options.out:
        draw_machines(HERE / "results")


def _tiny(model: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if model in TINY:
        return TINY[model]
    from tests.workloads.zoo.tiny import TINY as TINY_ZOO

    return {**TINY_ZOO[model], **{key: arguments[key] for key in ("dropout",) if key in arguments}}


if __name__ == "__main__":
    main()
