"""The public functions: their examples run, and what they refuse names the next step."""

import ast
import doctest
import importlib.machinery
import importlib.util
import inspect
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import autotune
from autotune.api.run_name import choose_run_dir
from autotune.cli.commands.tune import resume as resume_command
from autotune.errors import AutotuneError, CaptureError, ConfigError, StudyInterruptedError, WorkerError
from autotune.ir.costs import Costs
from autotune.records.config import Config
from autotune.study.events import Event, Finished, Logged
from autotune.testing.graphs import training_chain
from autotune.workloads.reference import name_factory
from autotune.workloads.zoo.resnet import resnet18
from docs.generate import TINY_FILE
from tests.system.test_cli import MIB, PREPARED, FakeHarness, FakeTracker

FUNCTIONS = [name for name in autotune.__all__ if inspect.isfunction(getattr(autotune, name))]


SMALL = training_chain(4, 20 * MIB, MIB)


class QuietHarness(FakeHarness):
    """A fake harness without output, of a graph that is planned at once."""

    prepared = replace(PREPARED, graph=SMALL, costs=Costs((0.01,) * len(SMALL.ops), (0,) * len(SMALL.ops)))

    def __init__(self, *workload: object, **options: object) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with `tiny.py`; children are fake, their measurements those of the simulator."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autotune.measure.harness.Harness", QuietHarness)
    monkeypatch.setattr("autotune.report.mlflow_log.Tracker", FakeTracker)
    (tmp_path / "tiny.py").write_text(TINY_FILE, encoding="utf-8")
    return tmp_path


def test_the_public_names_are_the_documented_ones():
    assert set(FUNCTIONS) == {"estimate", "estimate_batch", "load_plan", "load_run", "plan", "resume", "tune"}
    for name in autotune.__all__:
        assert getattr(autotune, name) is not None
        assert name == "__version__" or (getattr(autotune, name).__doc__ or "").strip(), name
    assert dir(autotune) == sorted(autotune.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'tunes'; it has AutoPlan, "):
        _ = autotune.tunes  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.usefixtures("folder")
def test_the_example_of_a_function_runs(name: str):
    function = getattr(autotune, name)
    (example,) = doctest.DocTestFinder(recurse=False).find(function, name, globs={})
    assert example.examples
    output: list[str] = []
    doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE).run(example, out=output.append)
    assert not output, "".join(output)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_documents_its_arguments_results_and_errors(name: str):
    function = getattr(autotune, name)
    text = inspect.getdoc(function) or ""
    sections = {section: text.partition(f"\n{section}:\n")[2] for section in ("Args", "Returns", "Raises", "Examples")}
    assert all(sections.values())
    for argument in inspect.signature(function).parameters:
        assert f"    {argument}: " in sections["Args"], argument


def test_a_config_a_name_and_a_function_are_the_same_workload(folder: Path):
    events: list[Event] = []
    from_config = autotune.tune(
        Config(workload="tiny.py:make"),
        budget="90%",
        trials=4,
        stores={"ssd": folder},
        name="a",
        progress=events.append,
    )
    tiny = importlib.util.spec_from_file_location("tiny", "tiny.py")
    assert tiny is not None
    assert tiny.loader is not None
    module = importlib.util.module_from_spec(tiny)
    tiny.loader.exec_module(module)
    from_function = autotune.tune(module.make, budget="90%", trials=4, stores={"ssd": folder}, name="b")
    assert from_config.plan is not None
    assert from_function.plan is not None
    assert from_config.plan.workload == from_function.plan.workload
    assert from_config.time_ratio is not None
    assert from_config.run_dir == Path("runs/a")
    assert sum(isinstance(event, Finished) for event in events) == len(from_config.trials)


def test_a_function_of_a_package_is_named_by_its_module_and_one_of_a_file_by_its_path():
    assert name_factory(resnet18) == "autotune.workloads.zoo.resnet:resnet18"


def test_what_a_fresh_process_cannot_import_is_refused_with_the_next_step():
    def inner() -> Any:
        return None

    shell: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def cell(): pass", "<ipython-input-1>", "exec"), shell)
    cases = ((lambda: None, "a lambda"), (inner, "inside a function"), (shell["cell"], "a notebook"))
    for factory, reason in cases:
        with pytest.raises(ConfigError, match=f"{reason}.*put it into a file"):
            name_factory(factory)
    with pytest.raises(ConfigError, match="a workload cannot be made from a partial"):
        autotune.tune(__import__("functools").partial(resnet18, batch=2))


def test_a_script_that_tunes_while_a_child_imports_it_is_refused(monkeypatch: pytest.MonkeyPatch):
    worker = type(sys)("worker")
    worker.__spec__ = importlib.machinery.ModuleSpec("autotune.measure.worker.main", None)
    monkeypatch.setitem(sys.modules, "__main__", worker)
    with pytest.raises(ConfigError, match="put the call under: if __name__ == '__main__':"):
        autotune.tune("resnet18")


@pytest.mark.usefixtures("folder")
def test_numbers_have_the_unit_of_their_option():
    file = autotune.plan("tiny.py:make", budget=2**30)
    assert (file.budget, file.budget_bytes) == (f"{2**30}B", 2**30 - file.floor_bytes)


@pytest.mark.usefixtures("folder")
def test_bytes_of_a_step_are_counted_without_a_child_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("autotune.api.launch.open_harness", None)
    small, large = (autotune.estimate("tiny.py:make", arguments={"rows": rows}) for rows in (64, 2**17))
    assert small.ops == large.ops
    # four results of tanh and the batch
    assert large.eager_bytes - small.eager_bytes >= 5 * (2**17 - 64) * 256 * 4
    assert large.lower_bound_bytes <= large.lowest_bytes <= large.traced_bytes


@pytest.mark.usefixtures("folder")
def test_a_place_that_cannot_hold_a_plan_is_refused_before_the_step_is_captured(monkeypatch: pytest.MonkeyPatch):
    Path("taken").mkdir()
    monkeypatch.setattr("autotune.api.survey", lambda *_: pytest.fail("surveyed"))
    with pytest.raises(ConfigError, match=r"taken: cannot write there .*; name another file by out="):
        autotune.plan("tiny.py:make", budget="90%", out="taken")


def test_a_run_that_is_interrupted_before_its_baseline_raises_and_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    class Interrupted(QuietHarness):
        def prepare(self) -> Any:
            signal.raise_signal(signal.SIGINT)
            return super().prepare()

    monkeypatch.setattr("autotune.measure.harness.Harness", Interrupted)
    with pytest.raises(StudyInterruptedError, match="nothing is kept") as raised:
        autotune.tune("tiny.py:make", name="none")
    assert raised.value.exit_code == 130
    assert not (folder / "runs/none").exists()


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM])
def number(request: pytest.FixtureRequest) -> Iterator[int]:
    """Signal that does nothing unless the code under test handles it: its default would end the tests."""
    before = signal.signal(request.param, lambda number, frame: None)
    yield request.param
    signal.signal(request.param, before)


@pytest.mark.usefixtures("folder")
def test_a_signal_while_a_finished_study_is_logged_ends_the_logging_and_keeps_the_result(
    number: int, monkeypatch: pytest.MonkeyPatch
):
    class Interrupted(FakeTracker):
        def finish(self, *, interrupted: int = 0) -> str:
            signal.raise_signal(number)
            raise AssertionError("the logging went on")

    monkeypatch.setattr("autotune.report.mlflow_log.Tracker", Interrupted)
    events: list[Event] = []
    result = autotune.tune("tiny.py:make", budget="90%", trials=3, name="one", progress=events.append)
    assert (result.interrupted, result.plan_path) == (number, Path("plans/one.json"))
    notes = [event.message for event in events if isinstance(event, Logged)]
    assert notes == ["interrupted; autotune report runs/one --log adds it"]


def test_runs_without_a_name_that_begin_in_one_second_have_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    clock = SimpleNamespace(strftime=lambda _: "2026-01-02_030405")
    monkeypatch.setattr("autotune.api.run_name.time", clock)
    config = Config(workload="resnet18", runs=str(tmp_path / "runs"))
    names = [choose_run_dir(config, None).name for _ in range(3)]
    assert names == [f"2026-01-02_030405_resnet18{end}" for end in ("", "-2", "-3")]


def test_a_name_that_is_not_utf_8_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"name 'caf.+': not valid UTF-8; give another name"):
        choose_run_dir(Config(workload="resnet18", runs=str(tmp_path)), "caf\udce9")


@pytest.mark.parametrize(("error", "is_kept"), [(WorkerError, True), (CaptureError, False)])
def test_of_runs_that_fail_before_their_baseline_only_one_whose_process_was_killed_keeps_its_logs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: type[AutotuneError], is_kept: bool
):
    log = folder / "runs/one/logs/capture-1.log"

    class Failing(QuietHarness):
        def prepare(self) -> Any:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text("its last line")
            raise error(f"the capture failed; see {log}")

    monkeypatch.setattr("autotune.measure.harness.Harness", Failing)
    with pytest.raises(error, match="the capture failed; see "):
        autotune.tune("tiny.py:make", name="one")
    assert (log.exists(), (folder / "runs/one").exists()) == (is_kept, is_kept)


def test_a_run_that_is_resumed_from_within_its_directory_keeps_the_name_of_its_plan(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    autotune.tune("tiny.py:make", budget="90%", trials=3, name="first")
    monkeypatch.chdir(folder / "runs" / "first")
    assert autotune.resume(".", trials=4).plan_path == Path("plans/first.json")
    resume_command(Path(), {"trials": 5}, json=True)
    assert [path.name for path in Path("plans").iterdir()] == ["first.json"]


def test_a_run_directory_of_an_earlier_version_is_readable(folder: Path):
    result = autotune.tune("tiny.py:make", budget="90%", trials=4, name="old")
    for name in ("confirmed.json", "study.json", "plan.json", "graph.json"):
        (folder / "runs/old" / name).unlink()
    run = autotune.load_run("runs/old")
    assert [trial.number for trial in run.trials] == [trial.number for trial in result.trials]
    assert run.baseline == result.baseline
    assert run.plan_path is None


def test_the_package_is_typed():
    assert (Path(autotune.__file__).parent / "py.typed").is_file()


def test_the_stub_declares_the_names_that_the_package_exports():
    stub = ast.parse((Path(autotune.__file__).parent / "__init__.pyi").read_text())
    imported = {alias.name for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported | {"__version__"} == set(autotune.__all__)


def test_sources_that_are_not_installed_have_a_version_that_says_so(monkeypatch: pytest.MonkeyPatch):
    from importlib import metadata

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert autotune.__version__ == "0+not.installed"
