"""`autotune doctor`: what this machine can measure."""

from pathlib import Path

from autotune.cli import doctor
from autotune.cli.commands.session import answering, print_json
from autotune.cli.console import print_findings
from autotune.errors import ConfigError
from autotune.records.json_codec import to_json


def run(*, stores: dict[str, str], json: bool) -> None:
    """One line a finding; exit code 2 where something must be mended first."""
    found = doctor.findings({name: Path(directory) for name, directory in stores.items()})
    with answering() as out:
        if json:
            print_json({"findings": [to_json(finding) for finding in found]}, out)
        else:
            print_findings(found, out)
    if bad := [finding for finding in found if finding.status == "bad"]:
        raise ConfigError(f"{', '.join(finding.name for finding in bad)}: to be mended before tuning, see above")
