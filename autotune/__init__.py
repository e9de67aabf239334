"""Fit a training step into a memory budget at the least cost in time, by measuring, not guessing."""

from typing import Any

__all__ = [
    "AutoPlan",
    "AutotuneError",
    "BatchEstimate",
    "Buckets",
    "CaptureError",
    "Config",
    "ConfigError",
    "DeviceLostError",
    "InfeasibleError",
    "LockedError",
    "Loop",
    "MemoryEstimate",
    "NumericsError",
    "OutOfTimeError",
    "PlanError",
    "PlanFile",
    "PlannedLoss",
    "PlansFailedError",
    "RecordedRun",
    "StoreError",
    "StudyInterruptedError",
    "StudyResult",
    "TrainStep",
    "WorkerError",
    "Workload",
    "__version__",
    "estimate",
    "estimate_batch",
    "load_plan",
    "load_run",
    "plan",
    "resume",
    "tune",
]

_HOMES = {
    "AutoPlan": "api.auto_plan",
    "BatchEstimate": "study.batch.estimate",
    "Buckets": "runtime.shapes.buckets",
    "Config": "records.config",
    "Loop": "workloads.loop",
    "MemoryEstimate": "study.offline.memory_estimate",
    "PlanFile": "records.plan_file",
    "PlannedLoss": "runtime.planned_loss",
    "RecordedRun": "study.recorded_run",
    "StudyResult": "study.outcome",
    "TrainStep": "runtime.train_step",
    "Workload": "workloads.workload",
    **dict.fromkeys(("estimate", "estimate_batch", "load_plan", "load_run", "plan", "resume", "tune"), "api"),
    **dict.fromkeys((name for name in __all__ if name.endswith("Error")), "errors"),
}
"""Module of each public name, relative to the package."""


NOT_INSTALLED = "0+not.installed"
"""Version of a copy of the sources that runs without installation."""


def __getattr__(name: str) -> Any:
    # deferred: torch takes seconds to import, and `autotune --help` needs 0.3 s without it
    from importlib import import_module, metadata

    if name == "__version__":
        from autotune.errors import DISTRIBUTION

        try:
            return metadata.version(DISTRIBUTION)
        except metadata.PackageNotFoundError:
            return NOT_INSTALLED
    if name in _HOMES:
        return getattr(import_module(f"autotune.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'autotune' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
