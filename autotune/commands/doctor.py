"""`autotune doctor`: what this machine can measure."""

from pathlib import Path

from autotune import devices
from autotune.commands.session import answering, print_json
from autotune.console import print_findings
from autotune.errors import ConfigError
from autotune.records import to_json


def run(*, stores: dict[str, str], json: bool) -> None:
    """One line a finding; exit code 2 where something must be mended first."""
    findings = devices.doctor(stores={name: Path(directory) for name, directory in stores.items()})
    with answering() as out:
        if json:
            print_json({"findings": [to_json(finding) for finding in findings]}, out)
        else:
            print_findings(findings, out)
    if bad := [finding for finding in findings if finding.status == "bad"]:
        raise ConfigError(f"{', '.join(finding.name for finding in bad)}: to be mended before tuning, see above")
