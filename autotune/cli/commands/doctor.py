"""`autotune doctor`: check what this machine can measure."""

from pathlib import Path

from autotune.cli import doctor
from autotune.cli.console import print_check_results
from autotune.cli.output import answer_stream, print_json
from autotune.errors import ConfigError


def run(*, stores: dict[str, str], json: bool) -> None:
    """Print the result of every check; ConfigError where one must be fixed before tuning."""
    results = doctor.run_checks({name: Path(directory) for name, directory in stores.items()})
    with answer_stream() as out:
        if json:
            print_json({"findings": [_document(result) for result in results]}, out)
        else:
            print_check_results(results, out)
    if bad := [result.name for result in results if result.status == "bad"]:
        raise ConfigError(f"{', '.join(bad)}: must be fixed before tuning, see above")


def _document(result: doctor.CheckResult) -> dict[str, str]:
    return {"name": result.name, "status": result.status, "detail": result.detail, "fix": result.fix}
