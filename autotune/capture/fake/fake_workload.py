"""Make and capture a workload on fake tensors: no weight is drawn and nothing is allocated."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from autotune.capture.program import Program
from autotune.capture.tracer import capture
from autotune.errors import ConfigError
from autotune.workloads.factory import load_workload, locate_error
from autotune.workloads.workload import Workload


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Make every tensor that is created in the `with` block a fake tensor: a shape and a type without memory."""
    with (
        FakeTensorMode() as mode,
        # a module's own conversion swaps the memory of its parameters, which fake tensors do not have
        mock.patch.object(torch.nn.Module, "_apply", _convert_tensors),
        # it draws again what lies outside the bounds, so it reads values
        mock.patch.object(torch.nn.init, "_no_grad_trunc_normal_", _draw_nothing),
    ):
        yield mode


def capture_on_fake_tensors(make: Callable[[], Workload], name: str) -> Program:
    """Return the captured step of a workload that `make` returns, without allocating its tensors.

    Raises CaptureError where the step cannot be captured, ConfigError where `make` reads the value of a tensor, or what `make`
    raises.
    """
    try:
        with fake_tensors():
            workload = make()
    except (ConfigError, DataDependentOutputException) as error:
        cause = error.__cause__ if isinstance(error, ConfigError) else error
        if not isinstance(cause, DataDependentOutputException):
            raise
        raise ConfigError(
            f"{name}: the factory reads the value of a tensor{locate_error(cause)}; the batch size is estimated on tensors that have "
            "none: compute that value from Python numbers, or tune at a fixed batch size"
        ) from cause
    return capture(workload, name)


def load_and_capture(reference: str, arguments: Mapping[str, Any], loop: str = "") -> Program:
    """Return the captured step of a workload by its reference, the arguments of its factory and its training loop."""
    return capture_on_fake_tensors(lambda: load_workload(reference, arguments, loop), reference)


def _draw_nothing(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    """Stand for an initialization: a fake tensor has no values to draw."""
    del arguments, options
    return tensor


def _convert_tensors(
    model: torch.nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> torch.nn.Module:
    """Replace parameters and buffers by converted ones; tensors that modules share stay shared."""
    converted: dict[int, Any] = {}
    for module in model.modules() if recurse else [model]:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in converted:
                    converted[id(parameter)] = _convert_parameter(parameter, convert)
                module._parameters[name] = converted[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = converted.setdefault(id(buffer), convert(buffer))
    return model


def _convert_parameter(
    parameter: torch.nn.Parameter, convert: Callable[[torch.Tensor], torch.Tensor]
) -> torch.nn.Parameter:
    with torch.no_grad():
        tensor = convert(parameter)
    return parameter if tensor is parameter else torch.nn.Parameter(tensor, parameter.requires_grad)
