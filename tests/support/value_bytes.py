"""Compare the bytes that a captured graph has for its values with the storages that the real kernels allocate."""

import torch

from autotune.capture.program import Program
from autotune.runtime.op_profiler import _isolated, _synthesize_call


def too_small(program: Program) -> list[str]:
    """Values, on synthetic tensors, whose storage is larger than their graph has it, each with both sizes."""
    found = []
    with _isolated(program):
        for op in program.graph.ops:
            if not op.outputs:
                continue
            target, args, kwargs = _synthesize_call(program, op)
            made = target(*args, **kwargs)
            parts = [
                part for part in (made if isinstance(made, (tuple, list)) else [made]) if isinstance(part, torch.Tensor)
            ]
            outputs = program.calls[op.id].outputs
            values = list(outputs if isinstance(outputs, tuple) else [outputs])
            for value, part in zip(values, parts, strict=False):
                if value is not None and part.untyped_storage().nbytes() > program.graph.values[value].nbytes:
                    found.append(
                        f"{op.name} ({op.target}): {program.graph.values[value].nbytes} bytes, really {part.untyped_storage().nbytes()}"
                    )
    return found
