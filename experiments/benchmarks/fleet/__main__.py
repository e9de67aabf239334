"""Measure what a fleet adds to a trial: time until a device is up, and time of a request beyond the runner's own, by engine."""

import argparse
import contextlib
import dataclasses
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from autotune.fleet import ENGINES
from autotune.fleet.channel import Reach
from autotune.fleet.messages import MeasureCall, NodeFacts, OpenDevice, code_identity, encode_message
from autotune.ir.plan import Plan
from autotune.records.run_dir import write_text
from autotune.study.verdicts.statistics import median_interval
from autotune.testing.fake_far_end import OPENER
from autotune.testing.fake_runner import FakeRunner
from autotune.testing.runner_contract import make_config
from experiments.common.facts import collect_facts, format_origin
from experiments.common.result_file import write_result

HERE = Path(__file__).parent
FAR_END = (sys.executable, "-m", "autotune.testing.fake_far_end")
LARGE_BYTES = 1_000_000
"""Size of the large request, whose reply is as large."""
ASKED_UP_SECONDS, ASKED_SECONDS, ASKED_SECONDS_PER_100_KB = 2.0, 0.02, 0.001
"""Maximum time that a fleet may add to a trial: a fixed part and a part by size."""


@contextlib.contextmanager
def start_cluster() -> Iterator[None]:
    """Run a cluster of Ray on this machine, with one device."""
    import ray

    ray.init(
        num_cpus=1, resources={"fake": 1}, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False,
        _system_config={"worker_niceness": 0},
    )  # fmt: skip
    try:
        yield
    finally:
        ray.shutdown()


def time_call(work: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure_engine(engine: str, directory: Path, repeats: int) -> dict[str, Any]:
    """Return the seconds until a device is up, and those of small and large requests beyond the runner's own."""
    config = make_config(directory).model_dump(mode="json")
    request = OpenDevice(code_identity(), "fake", config)
    reach = Reach("fake", directory, command=FAR_END, resource="fake", opener=OPENER)
    runner = FakeRunner()
    plan = Plan.traced(runner.graph)
    call = MeasureCall(plan, 10**9)
    large = dataclasses.replace(request, device_class="x" * LARGE_BYTES)
    up, small, own, round_trip = [], [], [], []
    for _ in range(5):
        began = time.perf_counter()
        channel = ENGINES[engine](reach, _ignore)
        assert isinstance(channel.ask(request, _ignore), NodeFacts)
        up.append(time.perf_counter() - began)
        for _ in range(repeats):
            own.append(time_call(partial(runner.measure, plan, budget_bytes=10**9)))
            small.append(time_call(partial(channel.ask, call, _ignore)))
        for _ in range(5):
            round_trip.append(time_call(partial(channel.ask, large, _ignore)))
        channel.close()
    overhead = [there - here for there, here in zip(small, own, strict=True)]
    interval = median_interval(overhead)
    return {
        "device_up_seconds": up,
        "request_bytes": len(encode_message(call)),
        "overhead_seconds": dataclasses.asdict(interval),
        "large_bytes": LARGE_BYTES,
        "large_request_seconds": statistics.median(round_trip),
        "large_seconds_per_100_kB": max(0.0, statistics.median(round_trip) - interval.middle) * 1e5 / LARGE_BYTES,
    }


def _ignore(text: str) -> None:
    del text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=40, help="Requests to each of five far ends.")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    document = collect_facts() | {"engines": {}}
    with tempfile.TemporaryDirectory(prefix="autotune-fleet-") as directory, start_cluster():
        for engine in ENGINES:
            document["engines"][engine] = measure_engine(engine, Path(directory), options.repeats)
            print(engine, json.dumps(document["engines"][engine]), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    write_result(options.out / "overhead.json", document, graphs={})
    write_text(options.out / "summary.md", summarize(document))


def summarize(document: dict[str, Any]) -> str:
    """Format a table of the engines."""
    lines = [
        "| engine | until a device is up, s | per request, ms | per 100 kB of messages, ms |",
        "|---|--:|--:|--:|",
    ]
    for engine in ENGINES:
        found = document["engines"][engine]
        ups = sorted(found["device_up_seconds"])
        request = found["overhead_seconds"]
        interval = f"{1e3 * request['middle']:.2f} ({1e3 * request['low']:.2f} to {1e3 * request['high']:.2f})"
        large = 1e3 * found["large_seconds_per_100_kB"]
        lines.append(f"| {engine} | {statistics.median(ups):.2f} (up to {ups[-1]:.2f}) | {interval} | {large:.2f} |")
    kept = [
        largest_message(found["overhead_seconds"]["middle"], found["large_seconds_per_100_kB"])
        for found in document["engines"].values()
    ]
    asked = "Asked: a device up in 2 s, and at most 20 ms and 1 ms per 100 kB for a trial"
    sizes = f"kept by messages of up to {min(kept) / 1e6:.1f} MB" if min(kept) < math.inf else "kept by all messages"
    latest = max(max(found["device_up_seconds"]) for found in document["engines"].values())
    up = f"{'kept' if latest <= ASKED_UP_SECONDS else 'missed'} (up to {latest:.2f} s)"
    verdict = f"the first {up}, the others {sizes if min(kept) > 0 else 'missed'}"
    return "\n".join([*lines, "", f"{asked}: {verdict}.", "", format_origin(document)]) + "\n"


def largest_message(seconds: float, seconds_per_100_kb: float) -> float:
    """Return the size in bytes up to which messages take at most 20 ms and 1 ms per 100 kB; infinity if all of them do.

    >>> [largest_message(seconds, per_100_kb) for seconds, per_100_kb in ((0.01, 0.002), (0.03, 0.002), (0.03, 0.0))]
    [1000000.0, 0.0, 0.0]
    """
    if seconds > ASKED_SECONDS:
        return 0.0
    beyond = seconds_per_100_kb - ASKED_SECONDS_PER_100_KB
    return math.inf if beyond <= 0 else 1e5 * (ASKED_SECONDS - seconds) / beyond


if __name__ == "__main__":
    main()
