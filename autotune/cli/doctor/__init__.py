"""Checks of this machine: everything that tuning needs, each with its fix, within ten seconds.

A new check is one function, and a line in `run_checks`.

In: this machine.
Out: a `CheckResult` for each check.
Read first: `check_result`.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from autotune.cli.doctor import directories, gpu, kernel, software
from autotune.cli.doctor.check_result import CheckResult
from autotune.errors import AutotuneError
from autotune.measure.device.this_device import open_nvml

__all__ = ["CheckResult", "run_checks"]

Check = Callable[[], CheckResult | None]


def run_checks(stores: Mapping[str, Path], runs: Path = Path("runs")) -> list[CheckResult]:
    """Run all checks, including one for each store's directory; never raises.

    `bad` must be fixed before tuning; `warn` reduces accuracy or speed.
    """
    with ThreadPoolExecutor(1) as pool:
        torch = pool.submit(software.query_torch).result  # all checks share one reply, or one error
        checks: list[tuple[str, Check]] = [
            ("python", software.check_python),
            ("torch", lambda: software.check_torch(torch())),
            ("gpu", lambda: gpu.check_driver(open_nvml, torch)),
            ("gpu memory", lambda: gpu.check_processes(open_nvml, torch)),
            ("gpu state", lambda: gpu.check_state(open_nvml)),
            ("memory", kernel.check_cgroup),
            ("free memory", kernel.check_free_memory),
            ("swap", kernel.check_swap),
            ("huge pages", kernel.check_huge_pages),
            ("cores", kernel.check_cores),
            ("clock", kernel.check_clock),
            ("noise", lambda: software.check_noise(torch())),
            ("compiler", software.check_compiler),
            ("runs", partial(directories.check_runs, runs)),
            *(
                (f"store {name}", partial(directories.check_store, name, Path(directory)))
                for name, directory in stores.items()
            ),
        ]
        results = [_run_check(name, check) for name, check in checks]
    return [result for result in results if result is not None]


def _run_check(name: str, check: Check) -> CheckResult | None:
    """Return the result of a check; an exception becomes a bad result."""
    try:
        return check()
    except (AutotuneError, TimeoutError) as error:
        detail, _, fix = str(error).partition("; ")
        return CheckResult(name, "warn" if isinstance(error, TimeoutError) else "bad", detail, fix)
    except Exception as error:  # noqa: BLE001 - any failure of a check is its result
        return CheckResult(name, "bad", f"cannot be checked: {type(error).__name__}: {error}".splitlines()[0])
