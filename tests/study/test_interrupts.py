"""A wait ends at a limit of time or at a signal."""

import math
import signal
import threading
import time

import pytest

from autotune.study.interrupts import Expired, Interrupts, expire_after, interrupt_on_signals


def test_a_wait_ends_at_its_limit_and_a_shorter_one_is_left_alone():
    before = signal.getsignal(signal.SIGALRM)
    began = time.monotonic()
    with pytest.raises(Expired), expire_after(0.05):
        time.sleep(30)
    with pytest.raises(Expired), expire_after(-1.0):
        time.sleep(30)
    assert time.monotonic() - began < 10
    with expire_after(0.05):
        pass
    with expire_after(math.inf):
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    time.sleep(0.1)
    assert signal.getsignal(signal.SIGALRM) == before


def test_a_wait_in_another_thread_has_no_limit():
    ended: list[str] = []

    def wait() -> None:
        with expire_after(0.01):
            time.sleep(0.1)
        ended.append("whole")

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert ended == ["whole"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_the_process_ignores_stays_ignored_in_a_study(number: signal.Signals):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(number)
            assert signal.getsignal(number) is signal.SIG_IGN
        assert interrupts.received == 0
        with interrupt_on_signals():
            signal.raise_signal(number)
    finally:
        signal.signal(number, before)
