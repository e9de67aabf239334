"""The examples in docstrings of the main entry points run."""

import doctest
import sys
from types import ModuleType
from typing import Any

import pytest

from autotune.integrations.accelerate import plan_loss
from autotune.integrations.lightning import PlanCallback, workload
from autotune.runtime.executor import Executor
from autotune.runtime.op_profiler import profile
from autotune.runtime.planned_loss import PlannedLoss
from autotune.runtime.shapes.buckets import Buckets
from autotune.runtime.stores import open_store
from autotune.runtime.train_step import TrainStep

ENTRIES = (TrainStep, PlannedLoss, Buckets, Executor, profile, open_store, PlanCallback, workload, plan_loss)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.__name__)
def test_the_example_in_the_docstring_runs(entry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(entry)
    module = ModuleType("example")  # Dynamo looks a function's globals up in its module
    vars(module).update(example.globs, __name__="example")
    monkeypatch.setitem(sys.modules, "example", module)
    example.globs = vars(module)
    results = doctest.DocTestRunner().run(example, clear_globs=False)
    assert results.attempted > 1
    assert results.failed == 0
