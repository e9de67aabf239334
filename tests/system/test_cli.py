"""The command line: one line and the right exit code for whatever goes wrong, one document for a script."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from autotune.cli import main as cli
from autotune.cli.commands.measure import outcome_error
from autotune.cli.doctor import CheckResult
from autotune.errors import CaptureError, ConfigError, InfeasibleError, PlanError
from autotune.ir.costs import Costs, StoreCost
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.measure.device import profile as device_profile
from autotune.measure.device.profile import DeviceProfile
from autotune.measure.messages import WorkProgress
from autotune.measure.spec import Spec
from autotune.measure.survey import PreparedWorkload
from autotune.planners import make_plan
from autotune.planners.auto import best_plan
from autotune.planners.candidates import Candidate
from autotune.predict.bounds import seconds_lower_bound
from autotune.predict.simulate import Estimate, simulate
from autotune.records import plan_file as planfile
from autotune.records.config import Config, load_config
from autotune.records.device import Device
from autotune.records.json_codec import to_json
from autotune.records.measurement import Measurement, Outcome
from autotune.records.plan_file import PlanFile, match_plan
from autotune.records.run_dir import lock_run_dir
from autotune.records.trial import TrialKind, load_trials
from autotune.study.plan_by_estimate import make_plan_file
from autotune.study.verdicts.front import FRONT_RUNS
from autotune.study.verdicts.next_run import CONFIRMATIONS
from autotune.testing.graphs import training_chain
from autotune.units import fmt_bytes
from autotune.workloads.reference import WorkloadRef

MIB = 2**20
FLOOR = 100 * MIB
DEVICE = Device("cpu", "Test Silicon", 8 * 2**30, 2, "2.13.0")
GRAPH = training_chain(8, 20 * MIB, MIB)
COSTS = Costs(tuple(0.01 for _ in GRAPH.ops), tuple(0 for _ in GRAPH.ops))
HEAVY = {
    "torch",
    "optuna",
    "mlflow",
    "pandas",
    "pydantic",
    "transformers",
    "matplotlib",
    "numpy",
    "rich",
    "yaml",
    "jinja2",
}


def torch_sees_a_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


FACTORIES = """
import torch
import autotune

def tiny(width=8):
    model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))
    return autotune.Workload(
        model, lambda model, batch: model(batch).square().mean(), torch.optim.SGD(model.parameters(), 0.1), torch.ones(2, 4)
    )

def broken():
    raise RuntimeError("the data set is gone")
"""


PREPARED = PreparedWorkload(GRAPH, COSTS, DEVICE, FLOOR, True, 0.0)


class FakeHarness:
    """A harness that measures what the simulator predicts; `prints` on standard output, as careless libraries do."""

    prepared: ClassVar[PreparedWorkload] = PREPARED

    def __init__(self, spec: Spec) -> None:
        print("noise from a library")

    def __enter__(self) -> "FakeHarness":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def prepare(self) -> PreparedWorkload:
        return self.prepared

    survey = prepare

    def listen(self, report: Callable[[WorkProgress], None]) -> None:
        report(WorkProgress("profiling ops", 20, 33))

    def reuse_baseline(self, measurement: Measurement, device: Device) -> None:
        pass

    def baseline(self) -> Measurement:
        return replace(self.measure(Plan.traced(self.prepared.graph)), max_error=None)

    def measure(self, plan: Plan, *, budget_bytes: int | None = None, beat: float | None = None) -> Measurement:
        graph, costs = self.prepared.graph, self.prepared.costs
        expected = simulate(graph, lower(graph, plan), costs)
        return Measurement(
            Outcome.OK,
            peak_bytes=FLOOR + expected.peak_bytes,
            charged_bytes=FLOOR + expected.peak_bytes,
            floor_bytes=FLOOR,
            step_seconds=(expected.seconds,) * 8,
            baseline_seconds=(sum(costs.seconds),) * 8,
            max_error=0.0,
            verified="bit-equal to eager",
            meter="fake",
            device=DEVICE,
        )

    def renew(self) -> None:
        pass

    def close(self) -> None:
        pass


class FakeTracker:
    """Says what it would have logged."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self.events = 0

    def __call__(self, event: object) -> None:
        self.events += 1

    def finish(self, *, interrupted: int = 0) -> str:
        return f"{self.events} events"


FEW_PLANNERS = "few.yaml"


@pytest.fixture
def few_planners(here: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A config of `chain` that plans at once, for what holds whatever the plans are."""
    monkeypatch.setattr("autotune.planners.space.find_spec", lambda _: None)  # windows take time of CP-SAT
    (here / FEW_PLANNERS).write_text(
        "workload: chain\nbudget: 60%\nplanners: {order: [traced], update: [at_end], recompute: [greedy], reorder: [keep]}\n"
        "sampler: random\nmoves: false\n"
    )
    return FEW_PLANNERS


def keep_in_memory(_: Path) -> Any:
    import optuna

    return optuna.storages.InMemoryStorage()


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """No children, no database of Optuna, and no MLflow: the latter have tests of their own and take seconds."""
    monkeypatch.setattr("autotune.study.trial_store._storage", keep_in_memory)
    monkeypatch.setattr("autotune.measure.harness.Harness", FakeHarness)
    monkeypatch.setattr("autotune.report.mlflow_log.Tracker", FakeTracker)


def plan_file(**changes: Any) -> PlanFile:
    plan = Plan.traced(GRAPH)
    file = PlanFile(
        WorkloadRef("chain"),
        GRAPH.digest,
        "65%",
        200 * MIB,
        FLOOR,
        {},
        plan,
        simulate(GRAPH, lower(GRAPH, plan)),
        DEVICE,
    )
    return replace(file, **changes)


def files(where: Path) -> Iterator[str]:
    return (str(path.relative_to(where)) for path in sorted(where.rglob("*")) if path.is_file())


# -- what is said before anything runs -----------------------------------------------------------------------------


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom autotune.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: print(*sys.modules)"
    )
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert "autotune.cli.main" in loaded
    assert not loaded & HEAVY


COMMANDS = [
    "doctor", "device probe", "device diff", "tune", "resume", "replay", "plan", "measure", "nightly", "report", "layout",
    "reproduce", "dashboard", "show", "trace",
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = run(*command.split(), "--help")
    assert (code, err) == (0, "")
    assert "--json" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("tune", "resnet18", "--bugdet", "65%"), "--bugdet"),
        (("tune",), "missing argument 'workload'; try autotune tune --help"),
        (("tine", "resnet18"), "tine"),
        (("tune", "resnet18", "--budget", "much"), "--budget: cannot read 'much'"),
        (("tune", "resnet18", "--budget", "0%"), "'0%' must lie above 0%"),
        (("tune", "resnet18", "--budget", "600"), "'600'"),
        (("tune", "resnet18", "--limit", "1gb"), "--limit: cannot read '1gb'"),
        (("tune", "resnet18", "--time", "long"), "--time: cannot read 'long'"),
        (("tune", "resnet18", "--trials", "0"), "--trials"),
        (("tune", "resnet18", "--objective", "memory"), "--objective"),
        (("tune", "resnet18", "--set", "batch"), "--set 'batch' is not NAME=VALUE; write --set batch=8"),
        (("tune", "resnet18", "--store", "ssd"), "--store 'ssd' is not NAME=VALUE; write --store ssd="),
        (("tune", "resnet18", "--store", "sdd=."), "sdd"),
        (("tune", "resnet18", "--store", "ssd=nowhere"), "ssd store: no directory nowhere"),
        (("tune", "resnet18", "--store", "ssd=a file"), "a file is no directory"),
        (("tune", "resnet18", "--name", "../up"), "a plain name"),
        (("tune", "resnet18", "--name", "nightly"), "name 'nightly': runs/nightly has records of another kind; give another"),
        (("tune", "resnet18", "--name", ""), "name '': give a plain name, neither empty nor a path; it becomes"),
        (("tune", "no.yaml"), "no.yaml"),
        (("tune", "resnet"), "resnet: no zoo workload; known: resnet18, "),
        (("tune", "no.py:make"), "no.py:make: no such file in "),
        (("tune", "resnet", "--dry-run"), "did you mean 'resnet50'?"),
        (("plan", "no.py:make", "-o", "p.json"), "no.py:make: no such file in "),
        (("tune", "wrong.yaml"), "wrong.yaml:2: unknown key 'bugdet'; "),
        (("replay",), "missing argument 'run'"),
        (("replay", "no such run"), "no such run: no such file; give a directory that autotune tune made"),
        (("replay", "."), "no run is recorded here"),
        (("replay", "wrong.yaml"), "wrong.yaml: not a landscape file"),
        (("replay", ".", "--sampler", "rando"), "--sampler 'rando': no such sampler; known: auto, cmaes, gp, planners,"),
        (("replay", ".", "--trials", "0"), "--trials"),
        (("replay", ".", "--seeds", "0"), "--seeds"),
        (("plan", "resnet18"), "add -o FILE"),
        (("plan", "front.yaml", "-o", "p.json"), "objective pareto searches many plans, and plan makes one; plan with"),
        (("measure", "no.json"), "no.json: cannot read the plan"),
        (("measure", "cut.json"), "cut.json: not a plan file"),
        (("measure", "edited.json"), "edited.json: plan.order"),
        (("measure", "away.json"), "add --store ssd=DIR"),
        (("show", "cut.json"), "cut.json: not a plan file"),
        (("layout", "no.csv"), "no.csv: cannot be read"),
        (("layout", "cut.json"), "cut.json: not a plan file"),
        (("show", "future.json"), "plan schema 99"),
        (("report",), "no run in runs/"),
        (("report", "empty"), "no run is recorded here"),
        (("resume", "empty"), "no run is recorded here"),
        (("resume", "begun", "--time", "abc"), "error: --time: cannot read 'abc'"),
        (("tune", "resnet18", "--time", "0s"), "0s leaves no time for a trial; write 90s"),
        (("tune", "resnet18", "--seed-from", "empty"), "empty: no plan was measured here"),
        (("tune", "resnet18", "--seed-from", "cut.json"), "cut.json: not a plan file"),
        (("tune", "resnet18", "--dry-run", "--store", "ssd=nowhere"), "ssd store: no directory nowhere"),
        (("device", "probe", "--device", "tpu"), "unknown device 'tpu'"),
        (("device", "probe", "--store", "sdd=."), "--store sdd: no such store; known: ssd, ramdisk, host"),
        (("device", "probe", "--store", "ssd=nowhere"), "ssd store: no directory nowhere"),
        (("device",), "missing command; try autotune device --help"),
        (("device", "prob"), "prob"),
        (("device", "diff", "no.json", "no.json"), "no.json: cannot read the device profile"),
        (("device", "diff", "cut.json", "whole.json"), "cut.json: not a device profile"),
        (("device", "diff", "whole.json", "whole.json"), "whole.json: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_bad_input_is_one_line_with_exit_code_2_and_leaves_no_file(
    arguments: tuple[str, ...], said: str, here: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    (here / "a file").write_text("")
    (here / "empty").mkdir()
    (here / "begun").mkdir()
    (here / "begun" / "config.yaml").write_text("workload: resnet18\n")
    (here / "front.yaml").write_text("workload: resnet18\nobjective: pareto\n")
    (here / "wrong.yaml").write_text("workload: resnet18\nbugdet: 65%\n")
    planfile.write(here / "whole.json", plan_file())
    text = (here / "whole.json").read_text()
    document = json.loads(text)
    (here / "cut.json").write_text(text[: len(text) // 2])
    (here / "edited.json").write_text(json.dumps(document | {"plan": document["plan"] | {"order": ["first"]}}))
    (here / "future.json").write_text(json.dumps(document | {"schema": 99}))
    swapped = document["plan"] | {"offload": [{"value": 20, "gap": 0}], "store": "ssd"}
    (here / "away.json").write_text(json.dumps(document | {"plan": swapped}))
    before = list(files(here))
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err
    assert list(files(here)) == before


def test_a_run_that_another_process_works_in_is_75_and_stays_whole(
    here: Path, fake_device: None, run: Callable[..., tuple[int, str, str]]
) -> None:
    (here / "runs/night").mkdir(parents=True)
    with (here / "runs/night/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, out, err = run("tune", "chain", "--name", "night")
    assert (code, out) == (75, "")
    assert "runs/night" in err.splitlines()[-1]
    assert (here / "runs/night/lock").exists()


def test_of_two_runs_begun_at_once_under_one_name_the_second_leaves_the_firsts_directory(
    here: Path, fake_device: None, monkeypatch: pytest.MonkeyPatch, run: Callable[..., tuple[int, str, str]]
) -> None:
    with contextlib.ExitStack() as first:

        class Second(FakeHarness):
            def __init__(self, spec: Spec) -> None:
                super().__init__(spec)
                first.enter_context(lock_run_dir(here / "runs/one"))
                (here / "runs/one/graph.json").write_text("the first's")

        monkeypatch.setattr("autotune.measure.harness.Harness", Second)
        assert run("tune", "chain", "--name", "one")[0] == 75
        assert (here / "runs/one/graph.json").read_text() == "the first's"


def test_a_run_that_fails_before_its_first_trial_leaves_no_directory(
    here: Path, fake_device: None, monkeypatch: pytest.MonkeyPatch, run: Callable[..., tuple[int, str, str]]
) -> None:
    class Fails(FakeHarness):
        def prepare(self) -> PreparedWorkload:
            raise CaptureError("the step cannot be captured")

    monkeypatch.setattr("autotune.measure.harness.Harness", Fails)
    assert run("tune", "chain", "--name", "one")[0] == CaptureError.exit_code
    assert not list(files(here))


def test_a_resumed_run_that_another_process_works_in_names_a_move_that_there_is(
    here: Path, few_planners: str, fake_device: None, run: Callable[..., tuple[int, str, str]]
) -> None:
    run("tune", few_planners, "--trials", "4", "--name", "one")
    with lock_run_dir(here / "runs/one"):
        code, _, err = run("resume", "runs/one")
    assert code == 75
    assert err.splitlines()[-1].endswith(f"process {os.getpid()} works here; wait for it or tune under another --name")


def test_an_internal_error_is_one_line_and_a_traceback_only_with_v(
    here: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., tuple[int, str, str]]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("autotune.cli.commands.show.run", fail)
    code, out, err = run("show", "plan.json")
    assert (code, out) == (1, "")
    assert err == ("error: internal error: RuntimeError: first line; run again with -v for the traceback\n")
    code, _, err = run("show", "plan.json", "-v")
    assert code == 1
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("error: internal error")


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch, run: Callable[..., tuple[int, str, str]]) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("autotune.cli.commands.show.run", interrupt)
    assert run("show", "plan.json") == (130, "", "error: interrupted\n")


def test_doctor_ends_with_2_and_the_name_of_what_is_bad(
    monkeypatch: pytest.MonkeyPatch, run: Callable[..., tuple[int, str, str]]
) -> None:
    found = [CheckResult("torch", "ok", "2.13"), CheckResult("runs", "warn", "nearly full", "free space")]
    monkeypatch.setattr("autotune.cli.doctor.run_checks", lambda stores: found)
    assert run("doctor") == (0, "ok   torch  2.13\nwarn runs   nearly full\n            -> free space\n", "")
    found.append(CheckResult("store ssd", "bad", "no directory", "create it"))
    code, out, err = run("doctor", "--json")
    assert (code, len(json.loads(out)["findings"])) == (2, 3)
    assert err.startswith("error: store ssd: ")


# -- devices -------------------------------------------------------------------------------------------------------

PROFILE = DeviceProfile(
    DEVICE,
    {"float32": 1e11},
    {"memory": 8e9},
    (1.0,) * 9,
    {"ssd": StoreCost(2e9, 1e9, 1.5e9, 0.5e9)},
    {"ssd": 0.02},
)


def test_probe_writes_a_profile_under_its_silicon_or_where_it_is_told(
    here: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., tuple[int, str, str]]
) -> None:
    asked = []
    monkeypatch.setattr(
        "autotune.measure.device.probe.probe", lambda kind, stores: asked.append((kind, stores)) or PROFILE
    )
    (here / "fast").mkdir()
    code, out, _ = run("device", "probe", "--store", "ssd=fast")
    assert (code, asked) == (0, [("cpu", {"ssd": Path("fast")})])
    assert out.splitlines()[-1] == "profile     runs/devices/cpu-test-silicon-2.json"
    assert "100 Gflop/s in float32" in out
    assert "2.00 GB/s written, 1.00 read, both at once 1.50 and 0.50" in out
    assert device_profile.find(Path("runs"), DEVICE) == PROFILE
    code, out, _ = run("device", "probe", "-o", "mine.json", "--json")
    assert (code, json.loads(out)["profile_path"], json.loads(out)["matmul_flops"]) == (
        0, "mine.json", {"float32": 1e11},
    )  # fmt: skip
    assert device_profile.read(here / "mine.json") == PROFILE


def test_a_place_that_cannot_hold_the_profile_is_refused_before_the_device_is_measured(
    here: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., tuple[int, str, str]]
) -> None:
    (here / "runs").touch()
    monkeypatch.setattr("autotune.measure.device.probe.probe", lambda *_: pytest.fail("measured"))
    code, _, err = run("device", "probe")
    assert code == 2
    assert "runs: Not a directory; a part of the path is a file" in err


def test_diff_is_a_table_of_what_can_be_told_apart_and_counts_the_rest(
    here: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    slower = replace(PROFILE.stores["ssd"], write_bytes_per_second=0.5e9, read_bytes_per_second=0.99e9)
    other = replace(PROFILE, stores={"ssd": slower}, device=replace(DEVICE, memory_bytes=4 * 2**30))
    device_profile.write(here / "a.json", PROFILE)
    device_profile.write(here / "b.json", other)
    code, out, err = run("device", "diff", "a.json", "b.json")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["first", "second", "ratio"]
    assert lines[1].split()[:6] == ["memory", "8192.0", "MiB", "4096.0", "MiB", "0.50x"]
    assert lines[2].split()[:8] == ["store", "ssd", "write", "2.00", "GB/s", "0.50", "GB/s", "0.25x"]
    assert lines[2].endswith("plans that offload are to be tuned again")
    assert lines[3:] == ["1 more differ by no more than repeated measurements of one device"]
    found = json.loads(run("device", "diff", "a.json", "b.json", "--json")[1])["differences"]
    assert [(one["what"], one["told_apart"]) for one in found] == [
        ("memory", True), ("store ssd write", True), ("store ssd read", False),
    ]  # fmt: skip
    assert run("device", "diff", "a.json", "a.json")[:2] == (0, "the profiles differ by no more than noise\n")


# -- dry runs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A harness that is told to capture and profile, and no more."""

    class Surveyor(FakeHarness):
        def prepare(self) -> PreparedWorkload:
            raise AssertionError("a step would have been run")

        def baseline(self) -> Measurement:
            raise AssertionError("a step would have been run")

        def measure(self, plan: Plan, *, budget_bytes: int | None = None, beat: float | None = None) -> Measurement:
            raise AssertionError("a step would have been run")

        def survey(self) -> PreparedWorkload:
            return PREPARED

    monkeypatch.setattr("autotune.measure.harness.Harness", Surveyor)


@pytest.mark.usefixtures("never_runs")
def test_a_dry_run_tells_frontier_trials_and_time_runs_no_step_and_writes_nothing(
    here: Path, few_planners: str, run: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, _ = run("tune", few_planners, "--trials", "8", "--dry-run", "--json")
    told = json.loads(out)
    assert code == 0
    assert set(told) == {"objective", "budget_bytes", "floor_bytes", "device", "frontier", "search"}
    assert told["search"]["ended_by"] == "--trials"
    for one in told["frontier"]:
        low, high = one["step_bytes_range"]
        assert low < one["estimate"]["peak_bytes"] < high
        assert one["ratio_range"][0] < one["ratio"] < one["ratio_range"][1]
    code, out, err = run("tune", few_planners, "--trials", "8", "--dry-run", "--name", "first")
    assert "--dry-run does not use --name\n" in err
    assert f"planning {len(GRAPH.ops)} ops for several budgets: minutes for thousands of ops\n" in err
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split()[:2] == ["step", "MiB"]
    assert len(told["frontier"]) == lines.index("") - 1
    assert lines[lines.index("") + 1].startswith("budget  60%: ")
    assert f"about {8 + CONFIRMATIONS} trials" in out
    assert "autotune device probe" in lines[-1]
    assert list(files(here)) == [few_planners]


@pytest.mark.usefixtures("never_runs")
def test_a_dry_run_of_a_front_tells_its_ends_and_counts_the_runs_that_confirm_it(
    here: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, _ = run(
        "tune", "chain", "--objective", "pareto", "--trials", "12", "--time", "8h", "--dry-run", "--json"
    )
    told = json.loads(out)
    assert code == 0
    assert told["objective"] == "pareto"
    code, out, _ = run("tune", "chain", "--objective", "pareto", "--trials", "12", "--time", "8h", "--dry-run")
    assert code == 0
    (budget,) = [line for line in out.splitlines() if line.startswith("budget  ")]
    assert budget.startswith("budget  up to 110%: ")
    ends = [told["frontier"][0]["estimate"]["peak_bytes"], told["frontier"][-1]["estimate"]["peak_bytes"]]
    assert f"the front is predicted from {fmt_bytes(ends[0])} at " in budget
    assert f" to {fmt_bytes(ends[1])} at " in budget
    assert f"about {12 + FRONT_RUNS} trials" in out
    assert not list(files(here))


@pytest.mark.usefixtures("never_runs")
def test_a_dry_run_of_a_budget_too_small_shows_the_frontier_and_is_4(
    here: Path, few_planners: str, run: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = run("tune", few_planners, "--budget", "5%", "--dry-run")
    assert code == 4
    assert "no plan is certain to fit" in out
    assert err.splitlines()[-1].startswith("error: chain() needs ")


@pytest.mark.usefixtures("never_runs")
def test_the_noise_of_the_devices_profile_widens_what_a_dry_run_says_of_time(
    few_planners: str, run: Callable[..., tuple[int, str, str]]
) -> None:
    def highest() -> float:
        first = json.loads(run("tune", few_planners, "--dry-run", "--json")[1])["frontier"][0]
        return float(first["seconds_range"][1] / first["estimate"]["seconds"])

    plain = highest()
    noisy = replace(PROFILE, noise_seconds=(1.0, 1.0, 1.0, 1.0, 1.5) * 4)
    device_profile.write(device_profile.profile_path(Path("runs"), DEVICE), noisy)
    assert highest() == pytest.approx(1.5 * plain)
    assert "no device profile" not in run("tune", few_planners, "--dry-run")[1]


@pytest.mark.usefixtures("never_runs")
def test_a_dry_run_on_a_device_profiled_beside_other_work_predicts_bytes_and_no_times(
    here: Path, few_planners: str, run: Callable[..., tuple[int, str, str]]
) -> None:
    noisy = replace(PROFILE, noise_seconds=(1.0, 1.0, 1.0, 1.0, 6.0) * 4)
    device_profile.write(device_profile.profile_path(Path("runs"), DEVICE), noisy)
    dry_run = ("tune", few_planners, "--dry-run")
    ranges = [one["seconds_range"] for one in json.loads(run(*dry_run, "--json")[1])["frontier"]]
    assert all(0 < low < high for low, high in ranges)
    lines = run(*dry_run)[1].splitlines()
    assert lines[0].split() == ["step", "MiB"]
    assert " ms" not in "".join(lines[: lines.index("")])
    assert lines[-1].startswith("times are not predicted: the machine was too busy when it was profiled")


# -- plans ---------------------------------------------------------------------------------------------------------


def test_a_plan_is_made_within_a_share_of_the_simulated_peak(fake_device: None) -> None:
    whole = simulate(GRAPH, lower(GRAPH, Plan.traced(GRAPH)), COSTS).peak_bytes
    made = make_plan_file(load_config("chain", overrides={"budget": "60%"}), PREPARED)
    assert made.budget_bytes == int(0.6 * whole)
    assert made.estimate.peak_bytes <= made.budget_bytes


def test_the_waste_of_the_arenas_layout_counts_within_the_budget(
    fake_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    factor = 1.1

    def waste(graph: TrainGraph, plan: Plan, costs: Costs, expected: Estimate) -> Estimate:
        block = int(factor * expected.peak_bytes)
        return replace(expected, layout_bytes=block, layout_live_bytes=expected.peak_bytes)

    monkeypatch.setattr("autotune.study.plan_by_estimate.add_layout", waste)
    made = make_plan_file(load_config("chain", overrides={"budget": "80%"}), PREPARED)
    assert made.estimate.charged_bytes is not None
    assert made.estimate.peak_bytes < made.estimate.charged_bytes <= made.accepted_bytes
    factor = 20.0
    with pytest.raises(InfeasibleError):
        make_plan_file(load_config("chain", overrides={"budget": "80%"}), PREPARED)


BUDGET = int(0.8 * simulate(GRAPH, lower(GRAPH, Plan.traced(GRAPH)), COSTS).peak_bytes)
"""Bytes of the budget 80%."""


def charge_plans(monkeypatch: pytest.MonkeyPatch, charge: Callable[[int, int], int]) -> list[int]:
    """Predict `charge(target, peak)` bytes for each plan, and return the list that receives the targets."""
    targets: list[int] = []

    def waste(graph: TrainGraph, plan: Plan, costs: Costs, expected: Estimate) -> Estimate:
        nbytes = charge(targets[-1], expected.peak_bytes)
        return replace(expected, layout_bytes=nbytes, layout_live_bytes=expected.peak_bytes)

    def record(graph: TrainGraph, costs: Costs, target: int, *rest: Any, **options: Any) -> Candidate:
        targets.append(target)
        return best_plan(graph, costs, target, *rest, **options)

    monkeypatch.setattr("autotune.study.plan_by_estimate.add_layout", waste)
    monkeypatch.setattr("autotune.study.plan_by_estimate.best_plan", record)
    return targets


def test_the_smallest_plan_is_tried_before_a_budget_is_refused_for_the_layouts_waste(
    fake_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = charge_plans(monkeypatch, lambda target, peak: BUDGET + BUDGET // 100 if target else peak)
    made = make_plan_file(load_config("chain", overrides={"budget": "80%"}), PREPARED)
    first, second, third, last = targets
    assert BUDGET == first > second > third > last == made.target_bytes == 0


def test_a_plan_within_the_budgets_tolerance_is_accepted_before_a_slower_one_is_made(
    fake_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = charge_plans(monkeypatch, lambda target, peak: BUDGET + 1)
    assert make_plan_file(load_config("chain", overrides={"budget": "80%"}), PREPARED).accepted_bytes > BUDGET
    assert targets == [BUDGET]


def test_a_plan_for_a_lowered_target_is_made_again_from_its_file_and_bounded_for_the_whole_budget(
    fake_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    charge_plans(monkeypatch, lambda target, peak: BUDGET + BUDGET // 10 if target == BUDGET else peak)
    made = make_plan_file(load_config("chain", overrides={"budget": "80%"}), PREPARED)
    assert made.target_bytes is not None
    assert made.target_bytes < made.budget_bytes == BUDGET
    assert make_plan(GRAPH, made.settings, made.target_bytes, COSTS).order == made.plan.order
    assert made.estimate.lower_bound_seconds == seconds_lower_bound(GRAPH, COSTS, BUDGET)


def test_a_config_says_which_planners_a_plan_may_come_from(fake_device: None) -> None:
    only = {"order": ["depth_first"], "recompute": ["segments"]}
    made = make_plan_file(load_config("chain", overrides={"budget": "100%", "planners": only}), PREPARED)
    assert {kind: made.settings[kind]["planner"] for kind in only} == {kind: name for kind, (name,) in only.items()}


def test_a_budget_that_no_plan_reaches_names_the_lowest_peak_and_its_op(fake_device: None) -> None:
    with pytest.raises(InfeasibleError, match=r"chain\(\) needs [\d.]+ MiB at \w+ .* the budget 5% .*--store ssd=DIR"):
        make_plan_file(load_config("chain", overrides={"budget": "5%"}), PREPARED)


def test_a_plan_that_does_not_fit_is_4_and_writes_nothing(
    here: Path, fake_device: None, run: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = run("plan", "chain", "--budget", "5%", "-o", "new/plan.json")
    assert (code, out) == (4, "")
    assert err.splitlines()[-1].startswith("error: chain() needs ")
    assert not list(files(here))


def test_a_place_that_cannot_hold_the_plan_is_refused_before_any_work(
    here: Path, run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "plans").mkdir()
    (here / "file").write_text("x")
    monkeypatch.setattr("autotune.cli.commands.plan.survey", lambda *_: pytest.fail("surveyed"))
    for place, reason in (("plans", "plans: Is a directory; name a file"), ("file/plan.json", "Not a directory")):
        code, _, err = run("plan", "chain", "--budget", "60%", "-o", place)
        assert (code, reason in err, len(err.splitlines())) == (2, True, 1)


def test_plan_json_is_one_document_whatever_libraries_print(
    here: Path, fake_device: None, run: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = run("plan", "chain", "--budget", "60%", "-o", "plan.json", "--json")
    assert code == 0
    figures = {"planning_seconds", "gap", "seconds_gap", "layout_gap"}
    assert set(json.loads(out)) == {"plan", "estimate", "verified"} | figures
    assert json.loads(out)["verified"] == planfile.read(here / "plan.json").verified == "not verified"
    assert "noise from a library" in err
    assert planfile.read(here / "plan.json").workload == WorkloadRef("chain")


def test_show_says_what_a_plan_decides(here: Path, fake_device: None, run: Callable[..., tuple[int, str, str]]) -> None:
    run("plan", "chain", "--budget", "60%", "-o", "plan.json")
    code, out, err = run("show", "plan.json")
    assert (code, err) == (0, "")
    recomputed = planfile.read(here / "plan.json").plan.recomputed
    assert f"{recomputed} runs more than traced" in out
    assert "Test Silicon" in out
    assert "offload    nothing" in out
    assert "not measured" in out
    assert run("show", "plan.json", "--json")[1].count("\n") == 1
    (here / "run").mkdir()
    (here / "plan.json").rename(here / "run" / "plan.json")
    assert run("show", "run")[1] == out


def test_show_lists_the_ops_of_a_plan_that_lies_in_its_run(
    here: Path, fake_device: None, run: Callable[..., tuple[int, str, str]]
) -> None:
    run("plan", "chain", "--budget", "60%", "-o", "plan.json")
    code, _, err = run("show", "plan.json", "--table")
    assert code == 2
    assert "its graph.json and costs.json are not beside it: it names no run of a study, which records them" in err
    (here / "graph.json").write_text(json.dumps(to_json(GRAPH)))
    (here / "costs.json").write_text(json.dumps(to_json(Costs.unit(GRAPH))))
    code, out, _ = run("show", "plan.json", "--table")
    lines = out.splitlines()
    first = next(number for number, line in enumerate(lines) if line.split() == ["op", "memory", "peak", "tensors"])
    assert code == 0
    assert len(lines) - first - 1 == len(planfile.read(here / "plan.json").plan.order)
    assert lines[first + 2].endswith("h0, h1")
    assert "without recompute and offload, no order peaks below" in out


FOUR = "id,lower,upper,size\nb3,0,5,6\nb2,6,7,4\nb0,6,9,5\nb1,7,10,1\n"


def test_layout_writes_offsets_within_the_capacity(here: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    (here / "four.csv").write_text(FOUR)
    code, out, _ = run("layout", "four.csv", "--capacity", "9", "-o", "laid.csv")
    assert code == 0
    assert "9 bytes: met" in out
    assert "proved optimal" in out
    rows = [line.split(",") for line in (here / "laid.csv").read_text().splitlines()[1:]]
    assert max(int(row[3]) + int(row[4]) for row in rows) == 9


def test_a_capacity_that_is_proved_too_small_is_4_with_the_least(
    here: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    (here / "four.csv").write_text(FOUR)
    code, out, error = run("layout", "four.csv", "--capacity", "8B")
    assert code == 4
    assert "exceeded" in out
    assert "four.csv needs 9 bytes, the capacity is 8: none exists below 9" in error


def test_layout_json_has_an_offset_for_every_id(here: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    (here / "four.csv").write_text(FOUR)
    code, out, _ = run("layout", "four.csv", "--json")
    told = json.loads(out)
    assert code == 0
    assert (told["layout_bytes"], told["max_live_bytes"], told["buffers"]) == (9, 9, 4)
    assert set(told["offsets"]) == {"b0", "b1", "b2", "b3"}


def test_a_plan_in_its_run_is_laid_out_and_becomes_a_csv(
    here: Path, fake_device: None, run: Callable[..., tuple[int, str, str]]
) -> None:
    file = plan_file()
    planfile.write(here / "plan.json", file)
    for name, record in (("graph", GRAPH), ("costs", COSTS)):
        (here / f"{name}.json").write_text(json.dumps(to_json(record)))
    assert run("layout", "plan.json", "-o", "plan.csv")[0] == 0
    code, out, _ = run("layout", "plan.csv")
    assert code == 0
    assert "above that" in out


def test_layout_of_a_plan_away_from_its_run_says_what_is_missing(
    here: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    planfile.write(here / "plan.json", plan_file())
    code, _, error = run("layout", "plan.json")
    assert code == 2
    assert "graph.json and costs.json are not beside it" in error


def test_measure_json_holds_measurement_and_baseline(
    here: Path, fake_device: None, run: Callable[..., tuple[int, str, str]]
) -> None:
    run("plan", "chain", "--budget", "60%", "-o", "plan.json")
    code, out, _ = run("measure", "plan.json", "--json")
    document = json.loads(out)
    assert code == 0
    assert set(document) == {"measurement", "baseline", "environment_changes"}
    assert document["measurement"]["outcome"] == "ok"


def test_a_wrong_limit_of_a_measured_plan_names_its_option(
    here: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    planfile.write(here / "whole.json", plan_file())
    code, out, err = run("measure", "whole.json", "--limit", "1gb")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: --limit: cannot read '1gb'")


def test_a_plan_of_another_graph_names_what_differs() -> None:
    other = training_chain(9, 20 * MIB, MIB)
    wider = training_chain(8, 21 * MIB, MIB)
    file = plan_file()
    match_plan(Path("p.json"), file, PREPARED)
    with pytest.raises(PlanError, match=r"p\.json: made for another graph \(.*\): 37 ops instead of 33"):
        match_plan(Path("p.json"), file, replace(PREPARED, graph=other))
    with pytest.raises(PlanError, match="the same 33 ops on other shapes"):
        match_plan(Path("p.json"), file, replace(PREPARED, graph=wider))
    made = replace(plan_file(device=replace(DEVICE, kind="cuda")), workload=WorkloadRef("my model.py:f", {"batch": 4}))
    with pytest.raises(
        PlanError, match=r"made on cuda, this is cpu; tune here: autotune tune 'my model.py:f' --set batch=4$"
    ):
        match_plan(Path("p.json"), made, PREPARED)


def test_other_threads_than_the_plans_are_named_on_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    file = plan_file(device=replace(DEVICE, environment={"OMP_WAIT_POLICY": "PASSIVE", "torch threads": "4"}))
    present = replace(PREPARED, device=replace(DEVICE, environment={"torch threads": "4"}))
    match_plan(Path("p.json"), file, present)
    assert "OMP_WAIT_POLICY: recorded PASSIVE, now not set" in capfd.readouterr().err
    match_plan(Path("p.json"), plan_file(), present)
    assert capfd.readouterr().err == "", "a record of an earlier version compares nothing"


@pytest.mark.skipif(torch_sees_a_gpu(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_here_is_named_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from tests.measure.harness.conftest import InProcessChildren

    monkeypatch.setattr("autotune.measure.harness.Children", InProcessChildren)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "absent_gpu.py").write_text(FACTORIES)
    for command, code in ((["tune", "absent_gpu.py:tiny", "--device", "cuda"], 2), (["measure", "p.json"], 6)):
        planfile.write(
            tmp_path / "p.json",
            plan_file(device=replace(DEVICE, kind="cuda"), workload=WorkloadRef("absent_gpu.py:tiny", {})),
        )
        with pytest.raises(SystemExit) as ended:
            cli.main(command)
        assert ended.value.code == code
        assert "sees no GPU here; autotune doctor says why" in capfd.readouterr().err


def test_a_device_that_nobody_knows_is_a_usage_error() -> None:
    with pytest.raises(ConfigError, match="--device: input should be 'cpu' or 'cuda'"):
        load_config("resnet18", overrides={"device": "tpu"}, from_command_line=True)


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Outcome.OK, 0), (Outcome.STOPPED_EARLY, 0), (Outcome.OVER_BUDGET, 4), (Outcome.OUT_OF_MEMORY, 4),
        (Outcome.WRONG_RESULT, 8), (Outcome.DISK_FULL, 2), (Outcome.CRASHED, 1), (Outcome.TIMEOUT, 1),
    ],
)  # fmt: skip
def test_every_outcome_of_a_measurement_has_its_exit_code(outcome: Outcome, code: int) -> None:
    error = outcome_error(Path("p.json"), Measurement(outcome, "because"))
    assert (error.exit_code if error else 0) == code
    assert error is None or "; " in str(error), "the next step"


def test_a_plan_whose_process_was_killed_from_outside_is_no_fault_of_the_plan() -> None:
    error = outcome_error(Path("p.json"), Measurement(Outcome.CRASHED, "killed by SIGTERM: its log ends there"))
    assert error is not None
    assert error.exit_code == 9


# -- tune ----------------------------------------------------------------------------------------------------------


def test_tune_json_has_the_names_of_the_types_and_its_files_exist(
    here: Path, few_planners: str, fake_device: None, run: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = run("tune", few_planners, "--trials", "8", "--name", "one", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert set(document) == {
        "baseline", "best", "confirmed", "front", "trials", "disturbed", "ended", "plan_path", "report_path",
    }  # fmt: skip
    assert document["ended"] == "its maximum of 8 trials is reached"
    assert document["front"] == []
    assert document["confirmed"][0]["verdict"] == "BEST"
    assert document["confirmed"][0]["trial"] == document["best"]["number"]
    for found in (document["baseline"], document["best"]):
        assert {"plan", "estimate", "measurement"} <= set(found)
    assert document["baseline"]["plan"] is None
    assert planfile.read(here / document["plan_path"]).estimate.peak_bytes == document["best"]["estimate"]["peak_bytes"]
    assert (here / document["report_path"]).read_text().startswith("<!doctype html>")


def test_tune_of_a_front_prints_its_points_and_where_their_plans_are(
    here: Path, few_planners: str, fake_device: None, run: Callable[..., tuple[int, str, str]]
) -> None:
    text = (here / few_planners).read_text()
    (here / few_planners).write_text("".join(line for line in text.splitlines(True) if not line.startswith("budget")))
    command = ("tune", few_planners, "--objective", "pareto", "--trials", "14", "--name", "one")
    code, out, err = run(*command)
    assert code == 0, err
    lines = out.splitlines()
    table = lines.index("Pareto front, re-measured in new processes, interleaved with plain eager:")
    assert lines[table + 1].split()[:3] == ["plan", "charged", "MiB"]
    points = [line.split()[0] for line in lines[table + 2 :] if line.endswith("  front")]
    paths = [f"runs/one/front/plan-{number}.json" for number in points]
    assert len(points) >= 4
    assert sorted(str(path.relative_to(here)) for path in (here / "runs/one/front").glob("plan-*.json")) == sorted(
        paths
    )
    assert f"front   {len(points)} plans in runs/one/front" in lines
    code, out, _ = run("resume", "runs/one", "--trials", "14", "--json")
    document = json.loads(out)
    assert code == 0
    assert [str(row["plan"]) for row in document["front"] if row["status"] == "front"] == points
    code, out, _ = run("show", min(paths, key=lambda path: planfile.read(here / path).estimate.peak_bytes))
    assert code == 0
    assert "(greedy" in out
    code, _, err = run("replay", "runs/one")
    assert code == 2
    assert "a replay needs a run of objective: time" in err


def test_a_plan_that_was_not_measured_again_is_marked_as_such(
    here: Path, few_planners: str, fake_device: None, run: Callable[..., tuple[int, str, str]], monkeypatch: Any
) -> None:
    from autotune.cli.commands import tune as command

    start = command.start_study
    monkeypatch.setattr(command, "start_study", lambda *arguments: replace(start(*arguments), confirmed=()))
    code, out, err = run("tune", few_planners, "--trials", "4", "--name", "one")
    assert code == 0, err
    note = "the search ended before its plan was re-measured beside plain eager; go on with: autotune resume runs/one"
    assert f"note    {note} --time 5m" in out.splitlines()
    monkeypatch.setattr("autotune.study.outcome.describe_disturbance", lambda trials: "1 of 1 measurements")
    code, out, err = run("tune", few_planners, "--trials", "4", "--name", "two")
    assert "tune under another --name" in out
    assert note not in out.replace("runs/two", "runs/one")


@pytest.mark.usefixtures("fake_device")
@pytest.mark.parametrize(("ratio", "is_slow"), [(1.29, False), (1.68, True)])
def test_a_plan_that_is_much_slower_than_plain_pytorch_comes_with_what_may_give_a_faster_one(
    few_planners: str,
    run: Callable[..., tuple[int, str, str]],
    monkeypatch: Any,
    ratio: float,
    is_slow: bool,
) -> None:
    from autotune.cli.commands import tune as command

    start = command.start_study

    def start_slow_study(*arguments: Any) -> Any:
        result = start(*arguments)
        measurement = replace(result.best.measurement, step_seconds=(ratio,), baseline_seconds=(1.0,))
        return replace(result, best=replace(result.best, measurement=measurement), confirmed=())

    monkeypatch.setattr(command, "start_study", start_slow_study)
    code, out, err = run("tune", few_planners, "--trials", "4", "--name", "one")
    assert code == 0, err
    advice = (
        "note    the plan is 68 % slower than plain PyTorch; more --time may give a faster one, or a larger budget or "
        "--store ssd=DIR or --kernels any under another --name\n"
    )
    assert (advice in out) == (" % slower than plain PyTorch" in out) == is_slow


def test_tune_ends_with_a_table_and_two_paths_and_resume_keeps_the_trials(
    here: Path, few_planners: str, fake_device: None, run: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = run("tune", few_planners, "--trials", "6", "--name", "one")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].split()[:4] == ["plan", "kind", "order", "update"]
    afresh = lines.index("re-measured, interleaved with plain eager:")
    assert [sum(line.endswith("BEST") for line in part) for part in (lines[:afresh], lines[afresh:])] == [1, 1]
    assert lines[afresh + 2].split()[0] == "eager"
    assert "search  ended: its maximum of 6 trials is reached" in lines
    assert lines[-3] == "results bit-equal to eager"
    assert lines[-2].startswith("plan    plans/one.json")
    assert lines[-1].startswith("report  runs/one/report.html")
    assert err.splitlines()[-1].startswith("mlflow  ")
    before = (here / "runs/one/trials.jsonl").read_bytes()
    code, out, err = run("resume", "runs/one", "--trials", "9")
    assert code == 0, err
    after = (here / "runs/one/trials.jsonl").read_bytes()
    assert after.startswith(before)
    assert len(after) > len(before)
    assert run("report")[1] == "runs/one/report.html\n"


def test_a_run_that_tune_continues_keeps_its_stores_and_records_the_new_options_for_resume(
    here: Path, few_planners: str, fake_device: None, run: Callable[..., tuple[int, str, str]]
) -> None:
    def tune(*options: str) -> Config:
        code, _, err = run("tune", few_planners, "--name", "one", *options)
        assert code == 0, err
        return load_config("runs/one/config.yaml")

    (here / "disk").mkdir()
    assert tune("--trials", "4").stores == {}
    config = tune("--trials", "5", "--store", "ssd=disk", "--time", "7m")
    assert (config.stores, config.trials, config.time) == ({"ssd": "disk"}, 5, "7m")
    assert tune("--trials", "6").stores == {"ssd": "disk"}
    assert run("resume", "runs/one", "--trials", "7")[0] == 0
    code, _, err = run("tune", few_planners, "--name", "one", "--limit", "900MiB")
    last = "error: runs/one: contains a study for limit none, not 900MiB; tune under another --name"
    assert (code, err.splitlines()[-1]) == (2, last)


@pytest.mark.usefixtures("fake_device")
def test_a_run_is_logged_later_to_the_address_that_resume_had_and_keeps_its_own_limits(
    few_planners: str, monkeypatch: pytest.MonkeyPatch, run: Callable[..., tuple[int, str, str]]
) -> None:
    addresses: list[str | None] = []

    class LaterTracker(FakeTracker):
        problem = ""

        def __init__(self, config: Config, run_dir: Path) -> None:
            super().__init__(config, run_dir)
            addresses.append(config.tracking_uri)

    assert run("tune", few_planners, "--trials", "4", "--name", "one")[0] == 0
    assert run("resume", "runs/one", "--trials", "5", "--tracking-uri", "sqlite:///other.db")[0] == 0
    monkeypatch.setattr("autotune.cli.commands.report.Tracker", LaterTracker)
    code, _, err = run("report", "runs/one", "--log")
    assert code == 0, err
    assert addresses == ["sqlite:///other.db"]
    assert load_config("runs/one/config.yaml").trials == 4


def test_the_table_of_a_study_has_measured_trials_only_and_counts_the_others(
    here: Path, few_planners: str, fake_device: None, run: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = run("tune", few_planners, "--trials", "12", "--name", "one")
    assert code == 0, err
    trials = load_trials(here / "runs/one/trials.jsonl")
    measured = [trial.number for trial in trials if trial.kind is not TrialKind.REPEAT and trial.was_run]
    lines = out.splitlines()
    hidden = len(trials) - len(measured)
    assert hidden > 0
    assert lines[len(measured) + 1].startswith(f"{hidden} of {len(trials)} trials are not shown")
    assert [int(line.split()[0]) for line in lines[1 : len(measured) + 1]] == measured


def test_replay_reports_for_each_sampler_how_near_it_comes_and_what_it_loses(
    here: Path, fake_device: None, run: Callable[..., tuple[int, str, str]]
) -> None:
    run("tune", "chain", "--budget", "60%", "--trials", "8", "--name", "one")
    before = sorted(files(here))
    code, out, err = run(
        "replay", "runs/one", "--sampler", "random", "--sampler", "tpe", "--trials", "6", "--seeds", "2"
    )
    assert code == 0, err
    head, *rows = out.splitlines()
    assert head.split()[:2] == ["sampler", "trials"]
    assert [row.split()[:2] for row in rows] == [[name, after] for name in ("random", "tpe") for after in ("5", "6")]
    assert "got the result of their nearest neighbour" in err
    assert sorted(files(here)) == before
    code, out, _ = run("replay", "runs/one", "--sampler", "random", "--trials", "6", "--seeds", "2", "--json")
    document = json.loads(out)
    assert code == 0
    assert [(one["sampler"], one["seed"]) for one in document["replays"]] == [("random", 0), ("random", 1)]
    assert document["known_best"] > 0
    assert [(one["priors"], one["planners"]) for one in document["replays"]] == [(False, True)] * 2
    alone = (
        "--sampler",
        "planners",
        "--sampler",
        "tpe",
        "--no-priors",
        "--search-alone",
        "--trials",
        "6",
        "--seeds",
        "2",
    )
    code, out, err = run("replay", "runs/one", *alone, "--json")
    assert code == 0, err
    starts = {one["sampler"]: (one["priors"], one["planners"]) for one in json.loads(out)["replays"]}
    assert starts == {"planners": (False, True), "tpe": (False, False)}
    code, out, err = run("replay", "runs/one", *alone)
    assert code == 0, err
    assert "interval" in out.splitlines()[0]
    assert "of 2 searches come within 2 % of the best" in err


def test_tune_of_a_budget_too_small_is_4_with_the_lowest_peak(
    here: Path, fake_device: None, run: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = run("tune", "chain", "--budget", "5%", "--trials", "4", "--name", "one")
    assert (code, out) == (4, "")
    assert " MiB at " in err.splitlines()[-1]


@pytest.fixture
def hangs_up() -> Iterator[None]:
    """SIGHUP as a terminal's process has it; tests that run under `nohup` inherit that it is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
@pytest.mark.usefixtures("fake_device", "few_planners", "hangs_up")
def test_an_interrupted_tune_keeps_its_trials_writes_its_report_and_can_be_resumed(
    number: int, code: int, here: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., tuple[int, str, str]]
) -> None:
    class Interrupted(FakeHarness):
        def measure(self, plan: Plan, *, budget_bytes: int | None = None, beat: float | None = None) -> Measurement:
            signal.raise_signal(number)
            return super().measure(plan, budget_bytes=budget_bytes, beat=beat)

        def baseline(self) -> Measurement:
            return FakeHarness.measure(self, Plan.traced(GRAPH))

    monkeypatch.setattr("autotune.measure.harness.Harness", Interrupted)
    got, _, err = run("tune", FEW_PLANNERS, "--name", "one")
    assert got == code
    assert err.splitlines()[-1] == "error: interrupted; continue with: autotune resume runs/one"
    kept = (here / "runs/one/trials.jsonl").read_bytes()
    assert kept.count(b"\n") == (2 if number == signal.SIGINT else 1)  # the first Ctrl-C lets the trial end
    assert (here / "runs/one/report.html").exists()
    monkeypatch.setattr("autotune.measure.harness.Harness", FakeHarness)
    assert run("resume", "runs/one", "--trials", "5")[0] == 0
    assert (here / "runs/one/trials.jsonl").read_bytes().startswith(kept)


@pytest.mark.usefixtures("fake_device")
def test_a_resumed_run_interrupted_in_its_capture_keeps_its_trials_and_says_so(
    here: Path, few_planners: str, monkeypatch: pytest.MonkeyPatch, run: Callable[..., tuple[int, str, str]]
) -> None:
    class Interrupted(FakeHarness):
        def prepare(self) -> PreparedWorkload:
            signal.raise_signal(signal.SIGINT)
            return super().prepare()

    assert run("tune", few_planners, "--trials", "4", "--name", "one")[0] == 0
    kept = (here / "runs/one/trials.jsonl").read_bytes()
    monkeypatch.setattr("autotune.measure.harness.Harness", Interrupted)
    code, _, err = run("resume", "runs/one")
    assert (code, err.splitlines()[-1]) == (130, "error: interrupted; continue with: autotune resume runs/one")
    assert (here / "runs/one/trials.jsonl").read_bytes() == kept
    code, _, err = run("tune", few_planners, "--name", "two")
    assert (code, err.splitlines()[-1].rpartition("; ")[2]) == (130, "nothing is kept")
    assert not (here / "runs/two").exists()


def test_the_help_of_plan_limits_the_one_process_that_it_starts(run: Callable[..., tuple[int, str, str]]) -> None:
    text = " ".join(run("plan", "--help")[1].split())
    assert "memory limit on the process that captures the step and profiles its ops" in text
    assert "the baseline's included" not in text


def test_resume_help_explains_its_limits(run: Callable[..., tuple[int, str, str]]) -> None:
    assert "--trials counts those of the whole run; --time starts from zero" in " ".join(
        run("resume", "--help")[1].split()
    )


# -- with real workloads -------------------------------------------------------------------------------------------


def test_a_factory_that_raises_is_one_line_with_exit_code_2_and_no_file(
    here: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., tuple[int, str, str]]
) -> None:
    from tests.measure.harness.conftest import InProcessChildren

    monkeypatch.setattr("autotune.measure.harness.Children", InProcessChildren)
    (here / "raising.py").write_text(FACTORIES)
    code, out, err = run("tune", "raising.py:broken", "--budget", "65%")
    assert (code, out) == (2, "")
    last = err.splitlines()[-1]
    assert last.startswith("error: ")
    assert "the data set is gone" in last
    assert "Traceback" not in err
    assert [name for name in files(here) if "__pycache__" not in name] == ["raising.py"]


def test_v_shows_the_frames_of_a_factory_that_raised_in_a_child_whose_log_is_gone(
    here: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    (here / "raising.py").write_text(
        "def broken():\n    read_rows('rows.csv')\n\ndef read_rows(path):\n    raise RuntimeError('the data set is gone')\n"
    )
    code, out, err = run("tune", "raising.py:broken", "-v")
    assert (code, out) == (2, "")
    assert f"File \"{here}/raising.py\", line 2, in broken\n    read_rows('rows.csv')" in err
    assert err.splitlines()[-1].startswith("error: raising.py:broken: raised RuntimeError: the data set is gone")
    assert not (here / "runs").exists() or not list((here / "runs").glob("*/logs"))


def test_a_plan_of_another_model_is_6(
    here: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., tuple[int, str, str]]
) -> None:
    from tests.measure.harness.conftest import InProcessChildren

    monkeypatch.setattr("autotune.measure.harness.Children", InProcessChildren)
    (here / "other_model.py").write_text(FACTORIES)
    code, _, err = run("plan", "other_model.py:tiny", "--budget", "200%", "-o", "plan.json")
    assert code == 0, err
    code, out, err = run("measure", "plan.json", "--set", "width=16")
    assert (code, out) == (6, "")
    assert "parameters of 388 B instead of 196 B" in err.splitlines()[-1]


# -- the whole command line ----------------------------------------------------------------------------------------


def test_the_version_is_that_of_the_package(run: Callable[..., tuple[int, str, str]]) -> None:
    import autotune

    assert run("--version") == (0, f"autotune {autotune.__version__}\n", "")


def test_a_shell_gets_a_completion_script_and_completes_commands_and_options() -> None:
    def complete(words: str, *arguments: str) -> str:
        position = len(words.split(" ")) - 1
        variables = {"_AUTOTUNE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(position)}
        done = subprocess.run(
            [sys.executable, "-m", "autotune", *arguments],
            env=os.environ | (variables if words else {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}),
            timeout=60,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    assert "_AUTOTUNE_COMPLETE=complete_bash" in complete("", "--show-completion", "bash")
    assert {"tune", "plan", "replay"} <= set(complete("autotune ").split())
    assert {"--budget", "--store"} <= set(complete("autotune tune --").split())
