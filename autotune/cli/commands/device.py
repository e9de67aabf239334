"""`autotune device probe` and `autotune device diff`: what a device is, and how two of them differ."""

from pathlib import Path
from typing import TYPE_CHECKING

from autotune.cli.commands.session import answering, check_stores, print_json, say
from autotune.errors import ConfigError, nearest
from autotune.measure.device import profile as device_profile
from autotune.measure.device.diff import Difference, differences
from autotune.measure.device.this_device import this_device
from autotune.records.json_codec import to_json
from autotune.units import fmt_bytes, fmt_seconds

if TYPE_CHECKING:
    from autotune.measure.device.profile import DeviceProfile


def probe(kind: str, stores: dict[str, str], out: Path | None, *, json: bool) -> None:
    """Measure this device and write its profile, under runs/ unless a file is named."""
    from autotune.runtime.stores import FOR

    for name in stores:
        if name not in FOR:
            raise ConfigError(f"--store {name}: no such store{nearest(name, FOR)}")
    directories = {name: Path(directory) for name, directory in stores.items()}
    check_stores(directories)
    this_device(kind)  # refused before anything slow begins
    with answering() as answer:
        say("measuring this device: some ten seconds, and up to twenty for each store")
        from autotune.measure.device.probe import probe as measure

        profile = measure(kind, directories)
        path = out or device_profile.place(Path("runs"), profile.device)
        device_profile.write(path, profile)
        if json:
            print_json(to_json(profile) | {"profile_path": str(path)}, answer)
        else:
            answer.write("\n".join([*_described(profile), f"profile     {path}"]) + "\n")


def diff(first: Path, second: Path, *, json: bool) -> None:
    """A line for each figure that can be told apart; the rest are counted."""
    found = differences(device_profile.read(first), device_profile.read(second))
    with answering() as out:
        if json:
            print_json({"differences": [to_json(one) for one in found]}, out)
        else:
            out.write("\n".join(_table(found)) + "\n")


def _described(profile: "DeviceProfile") -> list[str]:
    device = profile.device
    lines = [
        f"device      {device.silicon}, {device.cores} cores, {fmt_bytes(device.memory_bytes)}",
        f"software    torch {device.torch}, {device.driver}",
        *(f"{'matmul':<12}{rate / 1e9:.0f} Gflop/s in {dtype}" for dtype, rate in profile.matmul_flops.items()),
        *(f"{'copy':<12}{rate / 1e9:.1f} GB/s, {way}" for way, rate in profile.copy_bytes_per_second.items()),
        f"noise       the same work varies by {100 * profile.noise:.1f} %: less cannot be told apart",
    ]
    for name, cost in profile.stores.items():
        lines.append(
            f"{'store':<12}{name}: {cost.write_bytes_per_second / 1e9:.2f} GB/s written, "
            f"{cost.read_bytes_per_second / 1e9:.2f} read, at once {cost.write_beside_read_bytes_per_second / 1e9:.2f} and "
            f"{cost.read_beside_write_bytes_per_second / 1e9:.2f}; ops beside it take {cost.contention:.2f}x; "
            f"again within {100 * profile.store_spread[name]:.0f} %"
        )
    return lines


def _table(found: list[Difference]) -> list[str]:
    told = [one for one in found if one.told_apart]
    rows = [("", "first", "second", "ratio", "")] + [
        (one.what, _words(one.first, one.unit), _words(one.second, one.unit),
         "" if one.ratio is None else f"{one.ratio:.2f}x", one.meaning)
        for one in told
    ]  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows
    ]
    lines = [line.rstrip() for line in lines] if told else ["the two profiles cannot be told apart"]
    if same := len(found) - len(told):
        lines.append(f"{same} more differ by no more than measurements of one device do")
    return lines


def _words(value: float | str, unit: str) -> str:
    if isinstance(value, str):
        return value or "-"
    match unit:
        case "bytes":
            return fmt_bytes(value)
        case "bytes/s":
            return f"{value / 1e9:.2f} GB/s"
        case "flop/s":
            return f"{value / 1e9:.0f} Gflop/s"
        case "s":
            return fmt_seconds(value)
    return f"{value:g}" if value == int(value) else f"{value:.3f}"
