"""`autotune doctor`: check what this machine can measure."""

import os
from pathlib import Path

from autotune.cli import doctor
from autotune.cli.console import print_check_results
from autotune.cli.output import answer_stream, print_json
from autotune.errors import ConfigError
from autotune.fleet.fleet_file import load_fleet
from autotune.fleet.open_runner import FLEET_VARIABLE


def run(*, stores: dict[str, str], fleet: str | None, on: str | None, json: bool) -> None:
    """Print the result of every check, of this machine or of a fleet; ConfigError where one must be fixed before tuning.

    Raises ConfigError for `stores` with a fleet, whose file names the stores of each class.
    """
    if fleet is None and on is None:
        results = doctor.run_checks({name: Path(directory) for name, directory in stores.items()})
    elif stores:
        names = ", ".join(f"--store {name}={directory}" for name, directory in stores.items())
        raise ConfigError(
            f"{names}: a fleet's classes name their own stores; write it under `stores` of the class in the fleet's file"
        )
    else:
        results = _check_fleet(fleet or os.environ.get(FLEET_VARIABLE), on)
    with answer_stream() as out:
        if json:
            print_json({"findings": [_document(result) for result in results]}, out)
        else:
            print_check_results(results, out)
    if bad := [result.name for result in results if result.status == "bad"]:
        raise ConfigError(f"{', '.join(bad)}: must be fixed before tuning, see above")


def _check_fleet(path: str | None, on: str | None) -> list[doctor.CheckResult]:
    from autotune.cli.doctor.fleet import check_fleet

    if not path:
        raise ConfigError(f"--on {on}: no fleet is named; add --fleet FILE, or set {FLEET_VARIABLE}")
    fleet = load_fleet(Path(path))
    return check_fleet(fleet, [on] if on is not None else list(fleet.classes))


def _document(result: doctor.CheckResult) -> dict[str, str]:
    return {"name": result.name, "status": result.status, "detail": result.detail, "fix": result.fix}
