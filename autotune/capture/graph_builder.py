"""Collect the values, ops and calls of a captured step while its trace is read."""

from dataclasses import replace
from typing import Any

import torch

from autotune.capture.program import Call, Meta, argument_text, hash_signature, reads
from autotune.capture.regions import GroupedOps, group_regions
from autotune.ir.graph import Op, Phase, Role, Value
from autotune.workloads.batch import span_bytes


class GraphBuilder:
    """Lists of values and ops that grow in traced order. Ids are positions."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.layer = "loss"
        """Path of the module that new ops belong to."""
        self._metas: list[Meta | None] = []
        self._ops: list[Op] = []
        self._calls: list[Call] = []
        self._regions: dict[str, list[int]] = {}

    @property
    def ops(self) -> tuple[Op, ...]:
        """Ops so far."""
        return tuple(self._ops)

    def add_value(self, name: str, role: Role, tensor: Any) -> int:
        """Add a value for a tensor that owns its memory, or for one of the batch; return its id.

        A batch that is a slice of a data set counts as the slice, so its plans are those of a copied batch.
        """
        meta = Meta(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)
        nbytes = tensor.untyped_storage().nbytes()
        if role is Role.BATCH:
            nbytes = min(nbytes, span_bytes(tensor))
        self.values.append(Value(len(self.values), name, nbytes, role))
        self._metas.append(meta)
        return len(self.values) - 1

    def add_state(self, name: str, nbytes: int) -> int:
        """Add optimizer state, which is one value for several tensors; return its id."""
        self.values.append(Value(len(self.values), name, nbytes, Role.STATE))
        self._metas.append(None)
        return len(self.values) - 1

    def resize(self, value: int, nbytes: int) -> None:
        """Set the bytes that a kernel allocates for a value, where its tensor shows fewer."""
        self.values[value] = replace(self.values[value], nbytes=nbytes)

    def mark_gradient(self, value: int, parameter: str) -> None:
        """Turn an activation into the gradient of a parameter."""
        if self.values[value].role is Role.ACTIVATION:
            self.values[value] = replace(self.values[value], name=f"{parameter}.grad", role=Role.GRAD)

    def join_region(self, region: str) -> None:
        """Let the op that is added next belong to a region."""
        self._regions.setdefault(region, []).append(len(self._ops))

    def add_op(self, call: Call, *, name: str, target: str, phase: Phase, writes: tuple[int, ...] = (), extra: tuple[int, ...] = (),
               repeatable: bool = True, random: bool = False, detail: str = "", covered: Any = None,
               inplace: tuple[int, ...] = (), alias_of: int | None = None) -> None:  # fmt: skip
        """Add an op and its call.

        `extra` are values that the op reads without an argument for them. The signature covers `target`, `detail` and the
        arguments; `covered` replaces the arguments there.
        """
        outputs = call.outputs if isinstance(call.outputs, tuple) else (call.outputs,)
        inputs = tuple(dict.fromkeys((*reads(call.args), *reads([part for _, part in call.kwargs]), *extra)))
        if call.target is torch.ops.aten._assert_async.msg:
            covered = call.args[:1]  # the message names a line of the user's code, which may move
        arguments = argument_text(call.args if covered is None else covered, self._metas)
        self._ops.append(
            Op(
                id=len(self._ops),
                name=name,
                target=target,
                inputs=inputs,
                outputs=tuple(value for value in outputs if value is not None),
                phase=phase,
                layer=self.layer,
                signature=hash_signature((target, detail, arguments, argument_text(call.kwargs, self._metas))),
                repeatable=repeatable,
                random=random,
                writes=writes,
                inplace=inplace,
                alias_of=alias_of,
            )
        )
        self._calls.append(call)

    def group(self, step_outputs: tuple[int, ...]) -> GroupedOps:
        """Return everything that was added, with one op for each region."""
        return group_regions(self._ops, self._calls, self.values, self._metas, self._regions, step_outputs=step_outputs)
