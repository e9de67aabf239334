"""Types of the public names, which `__init__.py` imports on first use."""

from autotune.api import estimate, estimate_batch, load_plan, load_run, plan, resume, tune
from autotune.api.auto_plan import AutoPlan
from autotune.errors import (
    AutotuneError,
    CaptureError,
    ConfigError,
    DeviceLostError,
    InfeasibleError,
    LockedError,
    NumericsError,
    OutOfTimeError,
    PlanError,
    PlansFailedError,
    StoreError,
    StudyInterruptedError,
    WorkerError,
)
from autotune.records.config import Config
from autotune.records.plan_file import PlanFile
from autotune.runtime.planned_loss import PlannedLoss
from autotune.runtime.shapes.buckets import Buckets
from autotune.runtime.train_step import TrainStep
from autotune.study.batch.estimate import BatchEstimate
from autotune.study.offline.memory_estimate import MemoryEstimate
from autotune.study.outcome import StudyResult
from autotune.study.recorded_run import RecordedRun
from autotune.workloads.loop import Loop
from autotune.workloads.workload import Workload

__version__: str

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
