"""A plan file names code: only that of the zoo and of the working directory is run without a word of the user."""

from pathlib import Path

import pytest

from autotune.api import launch
from autotune.errors import ConfigError
from autotune.records import plan_file as planfile
from autotune.workloads.reference import WorkloadRef, lies_here
from tests.system.test_cli import plan_file


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with a file and a package."""
    directory = tmp_path / "here"
    (directory / "package").mkdir(parents=True)
    (directory / "package" / "__init__.py").touch()
    (directory / "net.py").touch()
    (tmp_path / "outside.py").touch()
    (directory / "link.py").symlink_to(tmp_path / "outside.py")
    monkeypatch.chdir(directory)
    return directory


@pytest.mark.parametrize("reference", ["resnet18", "net.py:f", "./net.py:f", "net:f", "package:f", "package.module:f"])
def test_code_of_the_zoo_and_of_the_working_directory_lies_here(reference: str) -> None:
    assert lies_here(reference)


@pytest.mark.parametrize(
    "reference",
    ["os:system", "subprocess:run", "torch.hub:load", "../outside.py:f", "/tmp/x.py:f", "link.py:f", "no:f"],
)
def test_other_code_does_not_lie_here(reference: str) -> None:
    assert not lies_here(reference)


def test_a_plan_that_names_other_code_is_named_and_refused_before_it_runs(here: Path) -> None:
    planfile.write(here / "plan.json", plan_file(workload=WorkloadRef("os:system", {"command": "touch pwned"})))
    notes: list[str] = []
    with pytest.raises(
        ConfigError,
        match=r"os:system\(command=touch pwned\) lies outside of .*; check that code, then add --allow-reference",
    ):
        launch.measure_plan(Path("plan.json"), arguments={}, stores={}, limit=None, notify=notes.append)
    assert notes == []
    assert not (here / "pwned").exists()


def test_a_plan_of_an_auto_plan_is_refused_with_the_way_to_measure_it(here: Path) -> None:
    planfile.write(here / "plan.json", plan_file(workload=WorkloadRef("runs/auto-net-1/Net.live")))
    with pytest.raises(
        ConfigError, match="AutoPlan made it for objects of a training process; to measure it, tune a factory"
    ):
        launch.measure_plan(Path("plan.json"), arguments={}, stores={}, limit=None, allow_reference=True)
