"""Differences of two device profiles, and their consequences for plans made on the first device."""

from collections.abc import Iterator
from dataclasses import dataclass

from autotune.measure.device.profile import DeviceProfile

NOTABLE = 1.25
"""Speed ratio from which other plans are likely to be the best ones."""

FIRMWARE_SHARE = 0.01
"""Share of the memory by which two boards with the same silicon differ."""

TUNE_AGAIN = "plans that offload are to be tuned again"
PLANS_STAY_VALID = "plans stay valid, times do not"


@dataclass(frozen=True, slots=True)
class Difference:
    """One figure of both profiles, and its consequence where the two differ significantly."""

    what: str
    first: float | str
    second: float | str
    unit: str = ""
    """`bytes`, `bytes/s`, `flop/s`, `s`, or empty."""
    ratio: float | None = None
    """Second over first."""
    told_apart: bool = True
    """True if the two differ by more than repeated measurements of one device do."""
    meaning: str = ""


def differences(first: DeviceProfile, second: DeviceProfile) -> list[Difference]:
    """Compare every figure of two profiles; equal figures are left out."""
    figures = [*_identity(first, second), *_rates(first, second), *_stores(first, second)]
    return [figure for figure in figures if figure.first != figure.second]


def _identity(first: DeviceProfile, second: DeviceProfile) -> Iterator[Difference]:
    a, b = first.device, second.device
    yield Difference("kind", a.kind, b.kind, meaning="a plan runs only on the kind of device that it was made on")
    yield Difference("silicon", a.silicon, b.silicon, meaning="" if a.key == b.key else "tune there with --seed-from")
    yield _figure("cores", a.cores, b.cores, meaning="times must be measured again")
    what = "a budget in % stays valid, one in bytes is to be checked"
    yield _figure("memory", a.memory_bytes, b.memory_bytes, unit="bytes", noise=FIRMWARE_SHARE, meaning=what)
    yield Difference("torch", a.torch, b.torch, meaning="a graph that is captured differently refuses the plan")
    yield Difference("driver", a.driver, b.driver)


def _rates(first: DeviceProfile, second: DeviceProfile) -> Iterator[Difference]:
    noise = first.noise + second.noise
    for dtype in sorted(first.matmul_flops.keys() | second.matmul_flops.keys()):
        pair = first.matmul_flops.get(dtype), second.matmul_flops.get(dtype)
        yield _figure(f"matmul {dtype}", *pair, unit="flop/s", noise=noise, meaning=PLANS_STAY_VALID)
    for way in sorted(first.copy_bytes_per_second.keys() | second.copy_bytes_per_second.keys()):
        pair = first.copy_bytes_per_second.get(way), second.copy_bytes_per_second.get(way)
        yield _figure(f"copy {way}", *pair, unit="bytes/s", noise=noise, meaning=PLANS_STAY_VALID)
    meaning = f"times that differ by less than {100 * second.noise:.1f} % are a tie there"
    yield Difference("noise", first.noise, second.noise, meaning=meaning)


def _stores(first: DeviceProfile, second: DeviceProfile) -> Iterator[Difference]:
    for name in sorted(first.stores.keys() | second.stores.keys()):
        a, b = first.stores.get(name), second.stores.get(name)
        title = f"store {name}"
        if a is None or b is None:
            missing = (
                "plans that offload to it cannot run there" if b is None else "it may hold values that plans recompute"
            )
            yield Difference(title, "yes" if a else "-", "yes" if b else "-", meaning=missing)
            continue
        noise = sum(profile.noise + profile.store_spread.get(name, 0.0) for profile in (first, second))
        for way in ("write", "read", "write_beside_read", "read_beside_write"):
            rates = (getattr(cost, f"{way}_bytes_per_second") for cost in (a, b))
            yield _figure(f"{title} {way.replace('_', ' ')}", *rates, unit="bytes/s", noise=noise, meaning=TUNE_AGAIN)
        yield _figure(
            f"{title} latency", a.latency_seconds, b.latency_seconds, unit="s", noise=noise, meaning=TUNE_AGAIN
        )
        yield _figure(f"{title} slows ops", a.contention, b.contention, noise=noise, meaning=TUNE_AGAIN)
        first_place, second_place = ("in memory" if cost.holds_memory else "on a disk" for cost in (a, b))
        yield Difference(f"{title} lies", first_place, second_place, meaning="in memory it frees nothing")


def _figure(
    what: str, a: float | None, b: float | None, *, unit: str = "", noise: float = 0.0, meaning: str = ""
) -> Difference:
    """Compare one figure, with the meaning where the difference is notable; None: the device lacks the figure."""
    if a is None or b is None:
        return Difference(
            what, "-" if a is None else a, "-" if b is None else b, unit, meaning="one of the devices has none"
        )
    ratio = b / a if a else None
    factor = max(ratio, 1 / ratio) if ratio else 1.0
    significant = factor > 1 + noise
    always = unit in ("", "bytes")  # capacities do not vary by chance as rates do
    return Difference(
        what,
        float(a),
        float(b),
        unit,
        ratio,
        significant,
        meaning if significant and (always or factor >= NOTABLE) else "",
    )
