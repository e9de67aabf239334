"""Derive from a schedule which values it offloads, and the store slots and tensors that they need."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

import torch

from autotune.capture.optimizers.loop_updates import LoopUpdates, base_program
from autotune.capture.program import Program, reads
from autotune.errors import PlanError
from autotune.ir.allocation import allocated_bytes
from autotune.ir.graph import Role, TrainGraph
from autotune.ir.schedule import Offload, Schedule, lives
from autotune.runtime.offload.engine import slot_key


def peak_step_bytes(graph: TrainGraph, schedule: Schedule) -> int:
    """Return the peak bytes of a step's values beside the static bytes, less the static bytes offloaded at that time.

    Scratch memory of kernels is not included.
    """
    live = peak = 0
    for _, begins, ends in lives(graph, schedule):
        live += sum(graph.values[value].nbytes for value in begins)
        live -= sum(graph.values[value].nbytes for value in ends)
        peak = max(peak, live)
    return peak


def slot_sizes(program: Program, *schedules: Schedule) -> Mapping[int, int]:
    """Return the bytes of each slot, by key, that a store needs for schedules of one program."""
    values = program.graph.values
    sizes: dict[int, int] = {}
    for schedule in schedules:
        for value in offloaded_values(schedule):
            parts = [values[value].nbytes]
            if values[value].role is Role.STATE and not _is_gradient_sum(program, value):
                assert program.updates is not None
                parts = program.updates.state_sizes(_parameter_of(program, value))
            sizes |= {slot_key(value, part, len(values)): nbytes for part, nbytes in enumerate(parts)}
    return sizes


def offloaded_values(schedule: Schedule) -> list[int]:
    """Return the ids of all values that a schedule offloads, in order of their first offload."""
    return list(dict.fromkeys(step.value for step in schedule.instructions if isinstance(step, Offload)))


def static_tensors(program: Program, schedule: Schedule) -> Mapping[int, Callable[[], list[torch.Tensor]]]:
    """Return, for each offloaded parameter or optimizer state, a function that returns its tensors.

    Functions, because some optimizers create their state in the first step. Raises PlanError for a parameter or a state whose
    memory belongs to another tensor too.
    """
    getters: dict[int, Callable[[], list[torch.Tensor]]] = {}
    storages = _count_storages(program)
    for value in offloaded_values(schedule):
        match program.graph.values[value].role:
            case Role.PARAM:
                _refuse_shared(program, value)
                getters[value] = partial(list, (program.tensors[value],))
            case Role.STATE if _is_gradient_sum(program, value):
                getters[value] = partial(_read_gradient, program, value)
            case Role.STATE if program.updates is not None:
                _refuse_shared_state(program, value, storages)
                getters[value] = partial(program.updates.state_tensors, _parameter_of(program, value))
    return getters


def _parameter_of(program: Program, state: int) -> torch.Tensor:
    """Return the parameter that an optimizer state belongs to."""
    base = base_program(program)
    update = base.calls[base.graph.consumers[state][0]]
    return program.tensors[next(reads(update.args))]


def _is_gradient_sum(program: Program, value: int) -> bool:
    return isinstance(program.updates, LoopUpdates) and value in program.updates.accumulated


def _read_gradient(program: Program, value: int) -> list[torch.Tensor]:
    """Return the tensor in which the gradients of a parameter add up."""
    assert isinstance(program.updates, LoopUpdates)
    gradient = program.updates.accumulated[value].grad
    return [] if gradient is None else [gradient]


def _count_storages(program: Program) -> Counter[int]:
    """Return the number of tensors in each storage, of parameters and their optimizer state; none where one call updates all."""
    updates = program.updates
    if updates is None or updates.joint_reason:
        return Counter()
    owned = [tensor for tensor in program.tensors.values() if updates.owns(tensor)]
    tensors = {id(each): each for tensor in owned for each in (tensor, *updates.state_tensors(tensor))}
    return Counter(each.untyped_storage()._cdata for each in tensors.values())


def _refuse_shared_state(program: Program, value: int, storages: Counter[int]) -> None:
    """Refuse to offload state in the memory of other tensors, as in a checkpoint that keeps all moments in one block."""
    assert program.updates is not None
    state = program.updates.state_tensors(_parameter_of(program, value))
    if any(storages[tensor.untyped_storage()._cdata] > 1 for tensor in state):
        raise PlanError(
            f"{program.graph.values[value].name} shares its memory with other tensors, so it cannot be offloaded; clone each "
            "tensor of the optimizer's state before the step is made, or tune with planners: {offload: [keep]}"
        )


def _refuse_shared(program: Program, value: int) -> None:
    parameter, storage = program.graph.values[value], program.tensors[value].untyped_storage()
    others = program.tensors | {each: read() for each, read in program.free}
    sharing = [v for v, t in others.items() if v != value and t.untyped_storage()._cdata == storage._cdata]
    problem = ""
    if sharing:
        problem = f"shares its memory with {program.graph.values[sharing[0]].name}"
    elif allocated_bytes(storage.nbytes(), program.device.type) != parameter.nbytes:
        problem = "is a part of a larger storage"
    if problem:
        raise PlanError(
            f"{parameter.name} {problem}, so it cannot be offloaded; clone it before the step is made, or tune with "
            "planners: {offload: [keep]}"
        )
