"""What differs between two device profiles, and what that means for plans made on the first."""

from collections.abc import Iterator
from dataclasses import dataclass

from autotune.measure.device.profile import DeviceProfile

NOTABLE = 1.25
"""Times faster or slower, from which on other plans are likely to be the best ones."""

KEPT_BY_FIRMWARE = 0.01
"""Part of the memory that differs between two boards with the same silicon."""

TUNE_ANEW = "plans that offload are to be tuned anew"
PLANS_HOLD = "plans hold, times do not"


@dataclass(frozen=True, slots=True)
class Difference:
    """One line: a figure of both profiles, and what it means where the two can be told apart."""

    what: str
    first: float | str
    second: float | str
    unit: str = ""
    """`bytes`, `bytes/s`, `flop/s`, `s`, or empty."""
    ratio: float | None = None
    """Second over first."""
    told_apart: bool = True
    """False where the two differ by no more than repeated measurements of one device do."""
    meaning: str = ""


def differences(first: DeviceProfile, second: DeviceProfile) -> list[Difference]:
    """Every figure that both have or one lacks; those that are equal are left out."""
    found = [*_identity(first, second), *_rates(first, second), *_stores(first, second)]
    return [one for one in found if one.first != one.second]


def _identity(first: DeviceProfile, second: DeviceProfile) -> Iterator[Difference]:
    a, b = first.device, second.device
    yield Difference("kind", a.kind, b.kind, meaning="a plan runs on the kind that it was made on")
    yield Difference("silicon", a.silicon, b.silicon, meaning="" if a.key == b.key else "tune there with --seed-from")
    yield _figure("cores", a.cores, b.cores, meaning="times are to be measured anew")
    what = "a budget in % holds, one in bytes is to be checked"
    yield _figure("memory", a.memory_bytes, b.memory_bytes, unit="bytes", noise=KEPT_BY_FIRMWARE, meaning=what)
    yield Difference("torch", a.torch, b.torch, meaning="a graph that is captured otherwise refuses the plan")
    yield Difference("driver", a.driver, b.driver)


def _rates(first: DeviceProfile, second: DeviceProfile) -> Iterator[Difference]:
    noise = first.noise + second.noise
    for dtype in sorted(first.matmul_flops.keys() | second.matmul_flops.keys()):
        pair = first.matmul_flops.get(dtype), second.matmul_flops.get(dtype)
        yield _figure(f"matmul {dtype}", *pair, unit="flop/s", noise=noise, meaning=PLANS_HOLD)
    for way in sorted(first.copy_bytes_per_second.keys() | second.copy_bytes_per_second.keys()):
        pair = first.copy_bytes_per_second.get(way), second.copy_bytes_per_second.get(way)
        yield _figure(f"copy {way}", *pair, unit="bytes/s", noise=noise, meaning=PLANS_HOLD)
    told = f"times nearer than {100 * second.noise:.1f} % are a tie there"
    yield Difference("noise", first.noise, second.noise, meaning=told)


def _stores(first: DeviceProfile, second: DeviceProfile) -> Iterator[Difference]:
    for name in sorted(first.stores.keys() | second.stores.keys()):
        a, b = first.stores.get(name), second.stores.get(name)
        title = f"store {name}"
        if a is None or b is None:
            missing = (
                "plans that offload to it cannot run there" if b is None else "it may hold what plans compute again"
            )
            yield Difference(title, "yes" if a else "-", "yes" if b else "-", meaning=missing)
            continue
        noise = sum(one.noise + one.store_spread.get(name, 0.0) for one in (first, second))
        for way in ("write", "read", "write_beside_read", "read_beside_write"):
            rates = (getattr(cost, f"{way}_bytes_per_second") for cost in (a, b))
            yield _figure(f"{title} {way.replace('_', ' ')}", *rates, unit="bytes/s", noise=noise, meaning=TUNE_ANEW)
        yield _figure(
            f"{title} latency", a.latency_seconds, b.latency_seconds, unit="s", noise=noise, meaning=TUNE_ANEW
        )
        yield _figure(f"{title} slows ops", a.contention, b.contention, noise=noise, meaning=TUNE_ANEW)
        one, other = ("in memory" if cost.holds_memory else "on a disk" for cost in (a, b))
        yield Difference(f"{title} lies", one, other, meaning="in memory it frees nothing")


def _figure(
    what: str, a: float | None, b: float | None, *, unit: str = "", noise: float = 0.0, meaning: str = ""
) -> Difference:
    """With its ratio, and with the meaning where that is notable. None: the device does nothing of the kind."""
    if a is None or b is None:
        return Difference(what, "-" if a is None else a, "-" if b is None else b, unit, meaning="one of them has none")
    ratio = b / a if a else None
    factor = max(ratio, 1 / ratio) if ratio else 1.0
    told = factor > 1 + noise
    always = unit in ("", "bytes")  # what a device has, unlike how fast it is, is never a little different
    return Difference(
        what, float(a), float(b), unit, ratio, told, meaning if told and (always or factor >= NOTABLE) else ""
    )
