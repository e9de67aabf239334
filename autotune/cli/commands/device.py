"""`autotune device probe` and `autotune device diff`: profile a device, and compare two profiles."""

from pathlib import Path
from typing import TYPE_CHECKING, get_args

from autotune.cli.output import answer_stream, print_json, print_note
from autotune.errors import ConfigError, nearest
from autotune.fleet.local import check_store_directories
from autotune.measure.device import profile as device_profile
from autotune.measure.device.diff import Difference, differences
from autotune.measure.device.this_device import this_device
from autotune.records.config import StoreName
from autotune.records.json_codec import to_json
from autotune.records.run_dir import check_file_place
from autotune.units import fmt_bytes, fmt_seconds

if TYPE_CHECKING:
    from autotune.measure.device.profile import DeviceProfile


def probe(kind: str, stores: dict[str, str], out: Path | None, *, json: bool) -> None:
    """Measure this device and write its profile, under runs/ unless a file is named."""
    for name in stores:
        if name not in get_args(StoreName):
            raise ConfigError(f"--store {name}: no such store{nearest(name, get_args(StoreName))}")
    directories = {name: Path(directory) for name, directory in stores.items()}
    check_store_directories(directories)
    device = this_device(kind)  # an unknown device is refused before anything slow starts
    check_file_place(out or device_profile.profile_path(Path("runs"), device))
    with answer_stream() as answer:
        print_note("measuring this device: about ten seconds, and up to twenty for each store")
        from autotune.measure.device.probe import probe as measure

        profile = measure(kind, directories)
        path = out or device_profile.profile_path(Path("runs"), profile.device)
        device_profile.write(path, profile)
        if json:
            print_json(to_json(profile) | {"profile_path": str(path)}, answer)
        else:
            answer.write("\n".join([*_describe(profile), f"profile     {path}"]) + "\n")


def diff(first: Path, second: Path, *, json: bool) -> None:
    """Print the figures in which two device profiles differ by more than noise, and the number of those below it."""
    changes = differences(device_profile.read(first), device_profile.read(second))
    with answer_stream() as out:
        if json:
            print_json({"differences": [to_json(change) for change in changes]}, out)
        else:
            out.write("\n".join(_table(changes)) + "\n")


def _describe(profile: "DeviceProfile") -> list[str]:
    device = profile.device
    lines = [
        f"device      {device.silicon}, {device.cores} cores, {fmt_bytes(device.memory_bytes)}",
        f"software    torch {device.torch}, {device.driver}",
        *(f"{'matmul':<12}{rate / 1e9:.0f} Gflop/s in {dtype}" for dtype, rate in profile.matmul_flops.items()),
        *(f"{'copy':<12}{rate / 1e9:.1f} GB/s, {way}" for way, rate in profile.copy_bytes_per_second.items()),
        f"noise       repeated work varies by {100 * profile.noise:.1f} %: smaller differences are noise",
    ]
    for name, cost in profile.stores.items():
        lines.append(
            f"{'store':<12}{name}: {cost.write_bytes_per_second / 1e9:.2f} GB/s written, "
            f"{cost.read_bytes_per_second / 1e9:.2f} read, both at once {cost.write_beside_read_bytes_per_second / 1e9:.2f} and "
            f"{cost.read_beside_write_bytes_per_second / 1e9:.2f}; concurrent ops take {cost.contention:.2f}x; "
            f"repeatable within {100 * profile.store_spread[name]:.0f} %"
        )
    return lines


def _table(changes: list[Difference]) -> list[str]:
    significant = [change for change in changes if change.told_apart]
    rows = [("", "first", "second", "ratio", "")] + [
        (change.what, _format_value(change.first, change.unit), _format_value(change.second, change.unit),
         "" if change.ratio is None else f"{change.ratio:.2f}x", change.meaning)
        for change in significant
    ]  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows
    ]
    lines = [line.rstrip() for line in lines] if significant else ["the profiles differ by no more than noise"]
    if noise := len(changes) - len(significant):
        lines.append(f"{noise} more differ by no more than repeated measurements of one device")
    return lines


def _format_value(value: float | str, unit: str) -> str:
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
