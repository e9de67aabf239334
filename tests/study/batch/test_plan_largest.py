"""A plan for the largest batch by estimate: lowered where the profiled workspaces leave no room, and named in the plan file."""

from dataclasses import replace
from typing import Any

import pytest

from autotune.errors import CaptureError, InfeasibleError
from autotune.ir.costs import Costs
from autotune.measure.survey import WorkloadSurvey
from autotune.records.config import Config
from autotune.study.batch.estimate import BatchEstimate
from autotune.study.batch.plan_largest import NEAR_SIZES, plan_largest
from autotune.testing.fake_runner import DEVICE, FLOOR_BYTES

from .fakes import graph_of, traced_bytes

CONFIG = Config(workload="w", budget="200%", objective="batch", planners={"recompute": ["keep"], "reorder": ["keep"]})  # type: ignore[arg-type]
ESTIMATE = BatchEstimate(
    "w()", "batch", 8, "200%", traced_bytes(40), None, 40, traced_bytes(40), 30, traced_bytes(8), False
)


def survey_of(scratch_bytes: int, sizes: list[int]) -> Any:
    def survey(config: Config) -> WorkloadSurvey:
        size = config.arguments["batch"]
        assert isinstance(size, int)
        sizes.append(size)
        graph = graph_of(size)
        costs = replace(Costs.unit(graph), scratch_bytes=(scratch_bytes,) * len(graph.ops))
        return WorkloadSurvey(graph, costs, DEVICE, FLOOR_BYTES)

    return survey


def test_the_plan_file_has_the_size_and_the_budget_in_bytes_of_the_step():
    sizes: list[int] = []
    file, surveyed = plan_largest(CONFIG, ESTIMATE, survey_of(0, sizes))
    assert sizes == [40]
    assert file.workload.arguments == {"batch": 40}
    assert file.graph_digest == surveyed.graph.digest == graph_of(40).digest
    assert file.budget == f"step:{ESTIMATE.budget_bytes // 1024}KiB"
    assert file.estimate.peak_bytes <= file.budget_bytes == ESTIMATE.budget_bytes // 1024 * 1024


def test_workspaces_lower_the_size_until_a_plan_fits():
    sizes: list[int] = []
    file, _ = plan_largest(CONFIG, ESTIMATE, survey_of(400_000, sizes))
    assert sizes[0] == 40
    assert sizes == sorted(set(sizes), reverse=True)
    assert file.workload.arguments == {"batch": sizes[-1]}
    assert sizes[-1] < 40


def test_a_size_whose_survey_lacks_memory_is_too_large_and_a_smaller_one_is_planned():
    def survey(config: Config) -> WorkloadSurvey:
        if int(str(config.arguments["batch"])) > 30:
            raise InfeasibleError("does not even fit this machine's memory one operator at a time")
        return survey_of(0, [])(config)

    file, _ = plan_largest(CONFIG, ESTIMATE, survey)
    assert 0 < int(str(file.workload.arguments["batch"])) <= 30


def test_workspaces_that_leave_a_small_part_of_the_estimate_are_no_infeasible_budget():
    sizes: list[int] = []
    file, _ = plan_largest(CONFIG, ESTIMATE, survey_of(traced_bytes(40) - traced_bytes(6), sizes))
    assert len(sizes) > NEAR_SIZES
    assert file.workload.arguments == {"batch": sizes[-1]}
    assert 0 < sizes[-1] < 20


def test_smaller_sizes_that_the_workload_refuses_are_rounded_down_to_those_that_it_accepts():
    sizes: list[int] = []

    def survey(config: Config) -> WorkloadSurvey:
        if int(str(config.arguments["batch"])) % 8:
            raise CaptureError("no multiple of 8")
        return survey_of(400_000, sizes)(config)

    file, _ = plan_largest(CONFIG, ESTIMATE, survey)
    assert file.workload.arguments == {"batch": sizes[-1]}
    assert sizes[0] == 40 > sizes[-1]
    assert not any(size % 8 for size in sizes)


def test_no_size_is_an_error_with_the_next_step():
    sizes: list[int] = []
    with pytest.raises(InfeasibleError, match=r"no batch size fits 200%: batch=1 is too large .*; raise --budget"):
        plan_largest(CONFIG, ESTIMATE, survey_of(10**9, sizes))
    assert len(sizes) < 12

    def refuses_one(config: Config) -> WorkloadSurvey:
        if config.arguments["batch"] == 1:
            raise CaptureError("Expected more than 1 value per channel when training")
        return survey_of(10**9, sizes)(config)

    with pytest.raises(InfeasibleError, match=r"no batch size fits 200%: batch=[23] is too large .*; raise --budget"):
        plan_largest(CONFIG, ESTIMATE, refuses_one)
    with pytest.raises(InfeasibleError, match="no batch size fits 200%: by estimate; raise --budget"):
        plan_largest(CONFIG, replace(ESTIMATE, largest=0), survey_of(0, []))
    refusal = replace(ESTIMATE, largest=0, refused="batch=5: no multiple of 8")
    with pytest.raises(InfeasibleError, match="by estimate, and the workload refuses batch=5: no multiple of 8; raise"):
        plan_largest(CONFIG, refusal, survey_of(0, []))
