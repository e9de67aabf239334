"""Whether all that tuning needs is here: one finding a thing that was looked at, each with its cure, within ten seconds.

A check that finds something new out is one function, and a line in `findings`.

In: this machine.
Out: a `Finding` for each thing that was checked.
Read first: `finding`.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from autotune.cli.doctor import gpu, kernel, places, software
from autotune.cli.doctor.finding import Finding
from autotune.errors import AutotuneError
from autotune.measure.device.this_device import nvml

__all__ = ["Finding", "findings"]

Check = Callable[[], Finding | None]


def findings(stores: Mapping[str, Path], runs: Path = Path("runs")) -> list[Finding]:
    """Look at everything; never raises. `bad` must be mended first, `warn` costs truth or comfort."""
    with ThreadPoolExecutor(1) as pool:
        torch = pool.submit(software.ask_torch).result  # whoever asks gets the one answer, or the one error
        checks: list[tuple[str, Check]] = [
            ("python", software.python),
            ("torch", lambda: software.torch(torch())),
            ("gpu", lambda: gpu.driver(nvml, torch)),
            ("gpu memory", lambda: gpu.processes(nvml, torch)),
            ("gpu state", lambda: gpu.state(nvml)),
            ("memory", kernel.cgroup),
            ("free memory", kernel.free_memory),
            ("swap", kernel.swap),
            ("huge pages", kernel.huge_pages),
            ("cores", kernel.cores),
            ("clock", kernel.clock),
            ("noise", lambda: software.noise(torch())),
            ("compiler", software.compiler),
            ("runs", partial(places.runs, runs)),
            *((f"store {name}", partial(places.store, name, Path(directory))) for name, directory in stores.items()),
        ]
        found = [_survive(name, check) for name, check in checks]
    return [finding for finding in found if finding is not None]


def _survive(name: str, check: Check) -> Finding | None:
    try:
        return check()
    except (AutotuneError, TimeoutError) as error:
        detail, _, cure = str(error).partition("; ")
        return Finding(name, "warn" if isinstance(error, TimeoutError) else "bad", detail, cure)
    except Exception as error:  # noqa: BLE001 - whatever is broken here is the finding
        return Finding(name, "bad", f"cannot be looked at: {type(error).__name__}: {error}".splitlines()[0])
