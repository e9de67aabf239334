"""Measure one plan in this process and through each fleet engine, alternately, and compare the time ratios to eager.

`python -m experiments.benchmarks.fleet.ratios`

The engine `command` runs `autotune serve` on this machine, `ray` an actor of a local Ray cluster. The ratio of each should differ from
this process's by at most 2 %.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from autotune.errors import ConfigError
from autotune.fleet import ENGINES
from autotune.fleet.channel import Reach
from autotune.fleet.local import LocalRunner, open_harness
from autotune.fleet.messages import DevicePromise, OpenDevice, code_identity
from autotune.fleet.remote_runner import RemoteRunner
from autotune.ir.plan import Plan
from autotune.records.config import Config, load_config
from autotune.records.run_dir import write_text
from autotune.study.runner import Runner
from autotune.study.verdicts.statistics import Interval, median_interval
from experiments.benchmarks.fleet.__main__ import start_cluster
from experiments.common.facts import collect_facts, format_origin
from experiments.common.result_file import write_result

HERE = Path(__file__).parent
MODEL, ARGUMENTS = "lstm", {"batch": 32}
"""Of the zoo's models, the one whose ratio varies least from process to process: 2 %, where others vary by 5 to 7 %."""
TINY = "resnet18", {"batch": 2, "size": 64}
HERE_NAME = "here"
"""Name of the measurements in this process."""
MAX_DIFFERENCE = 0.02
"""Maximum relative difference between an engine's ratio and this process's."""


@contextmanager
def open_remote(engine: str, config: Config, directory: Path) -> Iterator[Runner]:
    """Open a runner whose far end is on this machine."""
    request = OpenDevice(code_identity(), "here", config.model_dump(mode="json"), DevicePromise("cpu"))
    reach = Reach("here", directory, command=(sys.executable, "-m", "autotune", "serve"), resource="fake")
    runner = RemoteRunner(lambda report: ENGINES[engine](reach, report), request)
    try:
        yield runner
    finally:
        runner.close()


def measure_in_turns(
    runners: Mapping[str, Runner], rounds: int, *, seconds: float = float("inf")
) -> dict[str, list[float]]:
    """Measure the traced plan on every runner in each round, in new processes.

    Return the time ratios of each runner, one for each round. A far end is ended after its turn: it locks the device, which
    the next one needs. After the seconds no round begins. Raises ConfigError if a measurement has no ratio.
    """
    end = time.monotonic() + seconds
    plans: dict[str, Plan] = {}
    for name, runner in runners.items():
        prepared = runner.prepare()
        plans[name] = Plan.traced(prepared.graph)
        if isinstance(runner, RemoteRunner):
            runner.reuse_baseline(runner.baseline(), prepared.device)
            runner.close()
    ratios: dict[str, list[float]] = {name: [] for name in runners}
    names = list(runners)
    for number in range(rounds):
        if time.monotonic() > end:
            break
        # the order changes, so that none always runs first
        for name in names if number % 2 == 0 else reversed(names):
            runners[name].renew()
            result = runners[name].measure(plans[name], budget_bytes=1 << 50)
            if result.time_ratio is None:
                raise ConfigError(f"{name}: {result.outcome.value}: {result.detail}; choose a smaller workload")
            ratios[name].append(result.time_ratio)
            if isinstance(runners[name], RemoteRunner):
                runners[name].close()
            print(f"round {number + 1} of {rounds}, {name}: {result.time_ratio:.3f}", flush=True)
    return ratios


def summarize(document: Mapping[str, Any]) -> str:
    """Format a table: the time ratios of each engine, also divided by the ratio of this process in the same round."""
    ratios: Mapping[str, Sequence[float]] = document["ratios"]
    lines = ["| measured | time over eager's | over this process's of the same round |", "|---|--:|--:|"]
    verdicts = []
    for name, values in ratios.items():
        interval = median_interval(values)
        text = f"{interval.middle:.3f} ({interval.low:.3f} to {interval.high:.3f})"
        if name == HERE_NAME:
            lines.append(f"| {name} | {text} | - |")
            continue
        beside = median_interval([there / here for there, here in zip(values, ratios[HERE_NAME], strict=True)])
        lines.append(f"| {name} | {text} | {beside.middle:.3f} ({beside.low:.3f} to {beside.high:.3f}) |")
        verdicts.append(f"{name}: {judge(beside)}")
    rounds, asked = len(ratios[HERE_NAME]), f"{100 * MAX_DIFFERENCE:.0f} %"
    lines += ["", f"Asked: a difference of at most {asked}. {'; '.join(verdicts)}. Rounds: {rounds}.", ""]
    return "\n".join([*lines, format_origin(dict(document))]) + "\n"


def judge(beside: Interval) -> str:
    """Return whether the interval of a ratio is within the maximum difference from 1, beyond it, or undecided."""
    least, most = 1 - MAX_DIFFERENCE, 1 + MAX_DIFFERENCE
    if least <= beside.low and beside.high <= most:
        return "kept"
    return "exceeded" if beside.high < least or beside.low > most else "not decided, the interval is wider"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--minutes", type=float, default=60.0, help="after them no further round begins")
    parser.add_argument("--tiny", action="store_true", help="a small model and two rounds, to test the command")
    parser.add_argument("--engines", nargs="*", choices=["command", "ray"], default=["command", "ray"])
    parser.add_argument("--out", type=Path, default=HERE / "results" / "ratios")
    options = parser.parse_args()
    model, arguments = TINY if options.tiny else (MODEL, ARGUMENTS)
    document = collect_facts()
    with tempfile.TemporaryDirectory(prefix="autotune-ratios-") as folder, ExitStack() as stack:
        directory = Path(folder)
        overrides = {"arguments": arguments, "samples": 4 if options.tiny else 20, "runs": folder}
        config = load_config(model, overrides=overrides)
        if "ray" in options.engines:
            stack.enter_context(start_cluster())
        runners: dict[str, Runner] = {HERE_NAME: LocalRunner(stack.enter_context(open_harness(config, directory)))}
        for engine in options.engines:
            runners[engine] = stack.enter_context(open_remote(engine, config, directory))
        rounds, seconds = 2 if options.tiny else options.rounds, 60 * options.minutes
        document["ratios"] = measure_in_turns(runners, rounds, seconds=seconds)
        graphs = {model: runners[HERE_NAME].prepare().graph.digest}
    write_result(options.out / "ratios.json", document | {"model": model, "arguments": arguments}, graphs)
    write_text(options.out / "summary.md", summarize(document))
    print(summarize(document))


if __name__ == "__main__":
    main()
