"""Training under a stored plan needs torch, numpy, pydantic and xxhash, and none of the tuner's other dependencies."""

import contextlib
import os
import re
import subprocess
import sys
import textwrap
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from autotune.records import plan_file as planfile
from tests.runtime.test_train_step import OFFLOAD, RECOMPUTE, plan_file
from tests.support.small import make, normalized

IMAGES = (2, 3, 8, 8)
BLOCKED = (
    "cloudpickle", "hypothesis", "jinja2", "matplotlib", "mlflow", "optuna", "pandas", "psutil", "pynvml", "rich", "scipy",
    "sqlalchemy", "streamlit", "transformers", "typer", "yaml",
)  # fmt: skip
"""Dependencies of tuning, reports, tests and dashboards, of which training needs none."""
REQUIRED = ("torch", "numpy", "pydantic", "xxhash")
"""Distributions that training may import, with those that they require themselves."""

TRAINING = """
    import sys
    from importlib.metadata import packages_distributions

    class Without:
        # hides packages instead of raising: torch's compiler looks for optional packages by find_spec alone
        def __init__(self, finder):
            self.finder = finder

        def __getattr__(self, name):
            return getattr(self.finder, name)

        def find_spec(self, name, path=None, target=None):
            return None if name.partition(".")[0] in BLOCKED else self.finder.find_spec(name, path, target)

    sys.meta_path[:] = map(Without, sys.meta_path)
    for name in BLOCKED:
        try:
            __import__(name)
        except ImportError:
            continue
        raise AssertionError(f"{name} can be imported")
    import autotune
    autotune.TrainStep, autotune.Workload
    import torch
    from torch import nn
    import torch._dynamo  # for what it imports by itself

    def third_party():
        return {name.partition(".")[0] for name in sys.modules}.intersection(packages_distributions())

    of_torch = third_party() - {"autotune"}

    def parts():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
        )
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss_fn(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    moved = []
    for plan in sys.argv[2:]:
        (model, optimizer), (eager, eager_optimizer) = parts(), parts()
        batches = [(torch.randn(2, 3, 8, 8), torch.randint(4, (2,))) for _ in range(4)]
        with autotune.TrainStep(model, loss_fn, optimizer, batches[0], plan, stores={"ssd": sys.argv[1]}) as step:
            for batch in batches:
                loss = step(batch)
                expected = loss_fn(eager, batch)
                expected.backward()
                eager_optimizer.step()
                eager_optimizer.zero_grad()
                assert loss.equal(expected)
            moved.append(step.transfer_bytes)
        assert all(map(torch.equal, model.state_dict().values(), eager.state_dict().values()))
    from autotune.capture.tracer import capture
    from autotune.runtime.op_profiler import profile
    model, optimizer = parts()
    profile(capture(autotune.Workload(model, loss_fn, optimizer, batches[0])))

    print(*sorted(third_party() - of_torch))
    print(*moved)
"""


def normalize(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def allowed_distributions() -> set[str]:
    """Collect the required distributions and, repeatedly, their requirements without extras."""
    allowed: set[str] = set()
    waiting = list(REQUIRED)
    while waiting:
        name = normalize(waiting.pop())
        if name in allowed:
            continue
        allowed.add(name)
        with contextlib.suppress(PackageNotFoundError):  # a requirement of another platform
            requirements = [line for line in requires(name) or () if "extra ==" not in line]
            waiting += [match[0] for line in requirements if (match := re.match(r"[\w.-]+", line))]
    return allowed


def test_training_under_stored_plans_needs_no_dependency_of_the_tuner_and_profiling_prints_nothing(tmp_path: Path):
    plans = {"recompute.json": RECOMPUTE, "offload.json": {**OFFLOAD, "allocator": {"planner": "arena"}}}
    for name, settings in plans.items():
        planfile.write(tmp_path / name, plan_file(make(normalized, IMAGES), settings))
    script = textwrap.dedent(TRAINING).replace("BLOCKED", repr(BLOCKED))
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    process = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", script, str(tmp_path), *(str(tmp_path / name) for name in plans)],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert "profiler" not in process.stderr
    imported, moved = process.stdout.splitlines()  # and no line of a library
    owners = packages_distributions()
    strangers = {name for name in imported.split() if allowed_distributions().isdisjoint(map(normalize, owners[name]))}
    assert not strangers - {"autotune"}
    assert [int(nbytes) > 0 for nbytes in moved.split()] == [False, True]
