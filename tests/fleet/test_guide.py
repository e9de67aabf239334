"""The guide's commands for Ray, which no test may run: they would start and stop clusters of the whole machine."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.fleet.fleet_file import load_fleet
from autotune.nightly.config import load_nightly_config

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "fleet.md"


@pytest.mark.slow
def test_the_guide_starts_ray_with_options_that_it_has():
    pytest.importorskip("ray")
    lines = re.findall(r"^    (?:RAY_\w+=\w+ )+(ray start .*)$", GUIDE.read_text(), re.MULTILINE)
    assert len(lines) == 2
    code = "from ray.scripts.scripts import cli; cli(['start', '--help'])"
    helped = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert {option for line in lines for option in re.findall(r"--[a-z-]+", line)} <= set(
        re.findall(r"--[a-z-]+", helped)
    )


def test_the_files_of_the_guide_are_valid(tmp_path: Path):
    found = dict(re.findall(r'^```yaml title="(.+?)"\n(.*?)^```$', GUIDE.read_text(), re.DOTALL | re.MULTILINE))
    assert set(found) == {"fleet.yaml", "elsewhere.yaml", "commands.yaml", "fleet-nightly.yaml"}
    for name, text in found.items():
        (tmp_path / name).write_text(text)
        load = load_nightly_config if "entries:" in text else load_fleet
        assert load(tmp_path / name)
    *ssh, command = load_fleet(tmp_path / "commands.yaml").find("orin").command
    assert ssh == ["ssh", "-o", "BatchMode=yes", "orin-3"], "ssh joins the arguments after the host with blanks"
    assert command.endswith("autotune serve")
