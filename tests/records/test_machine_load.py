"""When other work disturbs a measurement: shares of CPU time, load, disk faults, and eager beside itself."""

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.measure.machine_counters import MachineCounters, machine_load, read_counters
from autotune.records.machine_load import MachineLoad, explain_disturbance

NOISE = json.loads((Path(__file__).parents[1] / "data" / "noise.json").read_text())["ratios"]
IDLE = MachineLoad(seconds=3.0, other_share=0.02, stolen_share=0.0, load_per_cpu=1.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"other_share": 0.5}, "other processes used 50 % of the CPUs"),
        ({"stolen_share": 0.07}, "7 % of the CPUs were stolen by the host"),
        ({"load_per_cpu": 2.4}, "the load was 2.4 per CPU"),
        ({"disk_faults": 230}, "230 page faults read from a disk"),
        ({"other_share": 0.5, "disk_faults": 230}, "of the CPUs, 230 page faults"),
    ],
)
def test_each_sign_of_other_work_is_a_reason(change, reason):
    assert explain_disturbance(IDLE) == ""
    assert reason in explain_disturbance(replace(IDLE, **change))


def test_shares_of_a_short_measurement_are_no_reason():
    assert explain_disturbance(replace(IDLE, seconds=0.1, other_share=1.0, stolen_share=1.0)) == ""


@pytest.mark.parametrize("model", ["vit", "resnet152"])
def test_recorded_eager_blocks_are_disturbed_only_where_two_of_three_changes_are(model):
    """Four blocks are one measurement; vit's record holds one disturbed stretch, resnet152's none."""
    blocks = list(itertools.accumulate(NOISE[model], lambda seconds, ratio: seconds * ratio, initial=1.0))
    disturbed = [
        start for start in range(len(blocks) - 3) if explain_disturbance(IDLE, blocks[start : start + 4])
    ]  # fmt: skip
    assert disturbed == ([1, 2] if model == "vit" else [])


def test_eager_much_slower_than_at_the_baseline_is_disturbed_however_even_it_is():
    assert explain_disturbance(None, [2.0] * 4, 1.0) == "eager takes 100 % longer than at the baseline"
    assert explain_disturbance(None, [1.2] * 4, 1.0) == explain_disturbance(None, [2.0] * 4) == ""


def counters(
    proc: Path, *, busy: int, stolen: int, own: int, faults: int, interrupts: int = 0
) -> MachineCounters | None:
    """A kernel whose CPU 0 counts these ticks, and whose process 77 took `own` of them."""
    row = f"{busy} 0 0 500 0 {interrupts} {interrupts} {stolen} 0 0"
    (proc / "stat").write_text(f"cpu  9 9 9 9\ncpu0 {row}\ncpu4095 9 9 9 9\nintr 1\n")
    for pid, (ticks, major) in {77: (own, faults), "self": (0, 0)}.items():
        folder = proc / (str(pid) if pid != "self" else str(os.getpid()))
        folder.mkdir(exist_ok=True)
        fields = ["S", "1", "1", "1", "0", "-1", "0", "5", "0", str(major), "0", str(ticks), "0", *["0"] * 20]
        (folder / "stat").write_text(f"{pid} (a) b) {' '.join(fields)}\n")
    return read_counters([77], proc)


def test_the_load_is_what_the_kernel_counts_beyond_the_measured_processes_and_interrupts(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    before = counters(tmp_path, busy=100, stolen=10, own=50, faults=3)
    after = counters(tmp_path, busy=280, stolen=30, own=150, faults=7, interrupts=40)
    assert before is not None
    assert after is not None
    load = machine_load(replace(before, moment=0.0), replace(after, moment=2.0))
    assert load is not None
    assert (load.seconds, load.other_share, load.stolen_share) == (2.0, pytest.approx(0.4), pytest.approx(0.1))
    assert load.disk_faults == 4


def test_without_the_kernels_counters_or_with_another_process_there_is_no_load(tmp_path):
    assert read_counters([77], tmp_path / "nowhere") is None
    one = MachineCounters((77,), 0.0, 2, 1.0, 0.0, 1.0, 0, 1.0)
    other = replace(one, moment=2.0, pids=(78,))
    assert machine_load(one, None) is machine_load(None, one) is machine_load(one, other) is None
    assert machine_load(one, replace(other, pids=(77,))) is not None
