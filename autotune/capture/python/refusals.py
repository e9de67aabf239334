"""Explain in one line why a step cannot be captured: the user's line, the reason, and the next step."""

import os
import re
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch

from autotune.capture.python.state_places import CONTAINERS, Change
from autotune.workloads.factory import innermost_user_line

_BRANCH = "Python needs the values of a tensor, which a captured step does not have"
EXPLANATIONS: tuple[tuple[str, str, str], ...] = (
    (
        r"pack_padded_sequence|_pack_padded_sequence|pad_packed_sequence",
        "packed sequences have shapes that depend on the lengths in the batch",
        "pass the padded batch to the layer, and mask the loss at the padding",
    ),
    (
        r"_ctc_loss",
        "a CTC loss reads the lengths in the batch, and its shapes depend on them",
        "compute the loss outside of the step: plan the model's forward alone, or use plain PyTorch for this loss",
    ),
    (
        r"aten\.(nonzero|masked_select|unique|_unique2|unique_consecutive|bincount|unique_dim)|DynamicOutputShape"
        r"|Dynamic shape operator|data-dependent output",
        "a result has a shape that depends on the data",
        "replace x[mask] by torch.where(mask, x, 0) or x * mask, and mask.nonzero() by a sum over all with weights of 0 and 1",
    ),
    (
        r"aten\.(_local_scalar_dense|item|equal|is_nonzero|allclose)|DataDependentOutput|Data-dependent branching"
        r"|data-dependent expression|Unsupported Tensor\.item|Tensor\.tolist|BatchValueNeeded|BatchNumber",
        _BRANCH,
        "use torch.where, keep the value as a tensor instead of .item(), or decide before the step and pass the decision in the batch",
    ),
    (
        r"repeat_interleave",
        "repeat_interleave with counts in a tensor has a shape that depends on the data",
        "pass output_size=..., or repeat before the step",
    ),
    (
        r"DistributedDataParallel|FullyShardedDataParallel|FSDP|torch\.distributed",
        "communication between ranks is not captured",
        "pass the module within the wrapper, and before_update=... that all-reduces every .grad; or wrap an autotune.PlannedLoss",
    ),
    (
        r"backward.?hook|compiled autograd",
        "a module has a backward hook",
        "remove the hook, and do its work in the loss function or in before_update",
    ),
    (
        r"use_reentrant=True",
        "a checkpoint with use_reentrant=True runs a backward pass of its own",
        "pass use_reentrant=False to torch.utils.checkpoint, or gradient_checkpointing_kwargs={'use_reentrant': False} to a library",
    ),
    (
        r"convert all Tensors to FakeTensors.* apply backward ",
        "a custom autograd function runs layers in its backward, and adds to their gradients there",
        "use torch.utils.checkpoint with use_reentrant=False instead of it, or plain PyTorch for this model",
    ),
    (
        r"[Ss]parse",
        "an op makes a sparse tensor",
        "use the dense form, such as Embedding(sparse=False)",
    ),
    (
        r"convert all Tensors to FakeTensors|non-fake|FakeTensorMode",
        "a tensor enters from outside of model, batch and the code that reads it",
        "make the tensor a buffer of the model, or pass it in the batch",
    ),
    (
        r"data_ptr|Cannot access data|numpy\(\)|to a numpy array|storage of|tolist|does not have storage",
        "the values of a tensor are read outside of torch, as by .numpy() or .data_ptr()",
        "compute with torch, or do that part before the step",
    ),
    (
        r"aot_autograd|FunctionalTensor|functional tensor|_functorch|HigherOrderOperator",
        "an operation cannot be recorded by PyTorch's tracer",
        "leave that operation out of the step, or run it before the step and pass its result in the batch",
    ),
)
"""Patterns of the tracers' messages, each with the reason and the next step in plain words."""


_TRACERS = tuple(f"{directory}{os.sep}" for directory in (Path(torch.__file__).parent, Path(__file__).parents[2]))
"""Directories of torch and of this package, whose functions' names explain an error."""
_TRACERS_WORDS = re.compile(r"aten|[Dd]ynamo|BatchValueNeeded")
"""Words of errors that add nothing to the explained reason."""


def explain(name: str, error: BaseException, frames: Iterable[traceback.FrameSummary]) -> str:
    """Return why the step of `name` cannot be captured, for an exception that its Python raised on fake tensors."""
    listed = list(frames)
    place = _place(listed)
    # a function of the user's may be called sparsemax; only the backward of a custom function has a fixed name
    names = [frame.name for frame in listed if frame.name == "backward" or frame.filename.startswith(_TRACERS)]
    text = f"{type(error).__name__}: {error} " + " ".join(names)
    for pattern, reason, fix in EXPLANATIONS:
        if re.search(pattern, text, re.DOTALL):
            advice = "set the model's layerdrop to 0" if _drops_layers(listed) else fix
            return f"cannot capture {name} as one graph: {reason}{place}; {advice}{_quote(error)}"
    return f"cannot capture {name} as one graph: the step raised {_brief(error)}{place}; does it run in plain PyTorch?"


def _drops_layers(frames: list[traceback.FrameSummary]) -> bool:
    return any("layerdrop" in (frame.line or "") or "skip_the_layer" in (frame.line or "") for frame in frames)


def _quote(error: BaseException) -> str:
    """Return an error in brackets; nothing where it adds nothing to the reason."""
    brief = _brief(error)
    return "" if _TRACERS_WORDS.search(brief) else f" ({brief})"


def _brief(error: BaseException) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}({first!r})"


def _place(frames: list[traceback.FrameSummary]) -> str:
    """Return the user's line; a library's, with the user's call, where the reason lies in a library of models."""
    user = innermost_user_line(frames)
    library = next((frame for frame in reversed(frames) if _is_model_code(frame.filename)), None)
    if library is None:
        return f" at {user}" if user else ""
    line = f"{library.filename.rpartition('site-packages/')[2]}:{library.lineno} ({library.line})"
    return f" at {line}" + (f", called from {user}" if user else "")


def _is_model_code(filename: str) -> bool:
    """Return whether a file belongs to an installed library, other than torch and this package."""
    _, found, path = filename.rpartition("site-packages/")
    return bool(found) and not path.startswith(("torch/", "numpy/", "autotune/"))


def refusal_of_change(change: Change) -> str:
    """Return why a change of the Python state that the next step reads is refused, and what to do instead."""
    fix = ""
    if isinstance(change.before, CONTAINERS):
        fix = "keep its content in a buffer and change that in place, or run one step in plain PyTorch first if it is a cache"
    elif change.before is None:
        fix = "run one step in plain PyTorch first if it is a cache, or change it between steps"
    return describe_change(change.place.name, change.place.line, fix or suggest_fix(change.place.name, change.after))


def suggest_fix(name: str, after: object) -> str:
    """Return how a step may keep a value that it assigns to `name`, by the kind of the value."""
    if isinstance(after, torch.Tensor):
        return f"change it in place: {name}.copy_(...)"
    if type(after) in (int, float):
        return f"make it a buffer and change it in place, as in {name}.add_(1), or pass it in the batch as a tensor"
    return "change it between steps, or pass it in the batch as a tensor"


def describe_change(name: str, line: str, fix: str) -> str:
    """Return the refusal of a change of `name`; `line` is the user's line, empty if it is not known."""
    place = f" at {line}" if line else ""
    return f"{name} is changed in the step{place}, and a captured step does not repeat that for the next one; {fix}"
