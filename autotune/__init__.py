"""Fit a training step into a memory budget at the least cost in time, by measuring, not guessing."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.runtime.train_step import TrainStep
    from autotune.workloads.workload import Workload

    __version__: str

__all__ = ["TrainStep", "Workload", "__version__"]


def __getattr__(name: str) -> Any:
    # `autotune --help` answers in 0.3 s: torch, which takes seconds to import, waits until a name needs it
    match name:
        case "TrainStep":
            from autotune.runtime.train_step import TrainStep

            return TrainStep
        case "Workload":
            from autotune.workloads.workload import Workload

            return Workload
        case "__version__":
            from importlib.metadata import version

            return version("autotune")
    raise AttributeError(f"module 'autotune' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
