"""Entries at the same time: never more than there are devices, each with its share of the time, none left behind."""

from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.nightly import parallel
from autotune.nightly.config import NightlyEntry
from autotune.nightly.parallel import EntryTime, run_in_parallel, share_time


def entry(name: str, on: str | None = None, **fields: object) -> NightlyEntry:
    return NightlyEntry(workload=name, on=on, **{"time": "10m", **fields})


class Night:
    """Entries that take some ticks of a clock each; what runs at each tick is counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ticks: Mapping[str, int]) -> None:
        self.now, self.ticks = 0.0, ticks
        self.running: dict[str, tuple[NightlyEntry, float]] = {}
        self.most: Counter[str | None] = Counter()
        self.finished: list[tuple[str, int]] = []
        self.times: dict[str, EntryTime] = {}
        self.signals: list[int] = []
        self.interrupts = SimpleNamespace(received=0)
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(parallel, "time", clock)

    def sleep(self, seconds: float) -> None:
        self.now += 1.0

    def start(self, one: NightlyEntry, entry_time: EntryTime) -> SimpleNamespace:
        self.running[one.key] = one, self.now + self.ticks[one.key]
        self.times[one.key] = entry_time
        for on, count in Counter(other.on for other, _ in self.running.values()).items():
            self.most[on] = max(self.most[on], count)
        return SimpleNamespace(
            poll=lambda: self.poll(one.key), send_signal=self.signals.append, kill=lambda: self.end(one.key)
        )

    def poll(self, key: str) -> int | None:
        if self.running[key][1] > self.now and not self.signals:
            return None
        return 0

    def end(self, key: str) -> None:
        self.running[key] = self.running[key][0], 0.0

    def finish(self, one: NightlyEntry, code: int) -> None:
        del self.running[one.key]
        self.finished.append((one.key, code))

    def run(self, entries: list[NightlyEntry], devices: dict[str | None, int], deadline: float = 1e6) -> None:
        run_in_parallel(entries, devices, deadline, start=self.start, finish=self.finish, interrupts=self.interrupts)


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.integers(0, 9)), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_no_class_has_more_entries_at_once_than_devices_and_none_waits_beside_a_free_one(
    plan: list[tuple[str | None, int]], first: int, second: int
):
    devices: dict[str | None, int] = {"a": first, "b": second, None: 1}
    entries = [entry(f"e{number}", on) for number, (on, _) in enumerate(plan)]
    with pytest.MonkeyPatch.context() as patch:
        night = Night(patch, {one.key: ticks for one, (_, ticks) in zip(entries, plan, strict=True)})
        night.run(entries, devices)
    assert Counter(key for key, _ in night.finished) == Counter(one.key for one in entries)
    counts = Counter(one.on for one in entries)
    assert night.most == Counter({on: min(count, devices[on]) for on, count in counts.items()})


def test_four_entries_on_two_devices_take_half_of_the_time_of_one_after_the_other(monkeypatch: pytest.MonkeyPatch):
    entries = [entry(f"e{number}", "a") for number in range(4)]
    spans = {}
    for count in (1, 2):
        night = Night(monkeypatch, dict.fromkeys([one.key for one in entries], 100))
        night.run(entries, {"a": count})
        spans[count] = night.now
    assert spans[2] <= 0.51 * spans[1]


def test_an_entry_gets_its_share_of_the_time_on_the_devices_of_its_class():
    entries = [entry("x", "a", time="1h"), entry("y", "a", share=3.0, time="1h"), entry("z", "b", time="1h")]
    devices: dict[str | None, int] = {"a": 1, "b": 1}
    assert [share_time(one, entries, devices, 400.0) for one in entries] == [100.0, 300.0, 400.0]
    assert [share_time(one, entries, {"a": 2, "b": 1}, 400.0) for one in entries] == [200.0, 400.0, 400.0]
    assert share_time(entry("x", time="30s"), entries[:1] and [entry("x")], {None: 1}, 400.0) == 30.0


def test_after_the_time_is_up_no_entry_starts(monkeypatch: pytest.MonkeyPatch):
    entries = [entry(f"e{number}", "a") for number in range(3)]
    night = Night(monkeypatch, dict.fromkeys([one.key for one in entries], 50))
    night.run(entries, {"a": 1}, deadline=60.0)
    assert [key for key, _ in night.finished] == ["e0@a", "e1@a"]
    assert night.times["e1@a"] == EntryTime(5.0, 10.0)


def test_a_signal_is_passed_on_and_nothing_is_left_running(monkeypatch: pytest.MonkeyPatch):
    entries = [entry(f"e{number}", "a") for number in range(3)]
    night = Night(monkeypatch, dict.fromkeys([one.key for one in entries], 10**6))
    sleep = night.sleep

    def interrupt(seconds: float) -> None:
        sleep(seconds)
        if night.now == 5:
            night.interrupts.received = 2

    monkeypatch.setattr(parallel.time, "sleep", interrupt)
    night.run(entries, {"a": 2})
    assert night.signals == [2, 2]
    assert not night.running
    assert len(night.finished) == 2
