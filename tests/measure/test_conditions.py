"""The clock among the conditions of a machine, as psutil reports it."""

from types import SimpleNamespace

import pytest

from autotune.measure.device.conditions import read_clock_mhz


@pytest.mark.parametrize(
    ("clocks", "expected"), [((2000.0, 0.0, 3000.0), 2500.0), ((0.0, 0.0), None), ((), None)], ids=str
)
def test_the_clock_is_the_mean_of_the_cores_that_are_switched_on(
    monkeypatch: pytest.MonkeyPatch, clocks: tuple[float, ...], expected: float | None
):
    cores = [SimpleNamespace(current=clock) for clock in clocks]
    mean = SimpleNamespace(current=sum(clocks) / len(clocks)) if clocks else None
    monkeypatch.setattr("psutil.cpu_freq", lambda percpu=False: cores if percpu else mean)
    assert read_clock_mhz() == expected


@pytest.mark.parametrize("error", [NotImplementedError, OSError])
def test_a_clock_that_cannot_be_read_is_none(monkeypatch: pytest.MonkeyPatch, error: type[Exception]):
    def refuse(percpu: bool = False) -> None:
        raise error("no frequency file")

    monkeypatch.setattr("psutil.cpu_freq", refuse)
    assert read_clock_mhz() is None
