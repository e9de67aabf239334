"""List what leaves memory in a schedule, and the store slots and tensors that it needs."""

from collections.abc import Callable, Mapping
from functools import partial

import torch

from autotune.capture.program import Program, reads
from autotune.errors import PlanError
from autotune.ir.graph import Role, TrainGraph
from autotune.ir.schedule import Free, Offload, Prefetch, Run, Schedule
from autotune.runtime.offload_engine import slot


def own_bytes(graph: TrainGraph, schedule: Schedule) -> int:
    """The most that the step's own take beyond what is away of the user's own: the step's peak beside the static bytes,
    kernels' scratch not counted.
    """
    live = most = 0
    for instruction in schedule.instructions:
        match instruction:
            case Run(op, takes):
                live += sum(graph.values[value].nbytes for value in graph.ops[op].outputs)
                live -= graph.values[takes].nbytes if takes is not None else 0
            case Free(value):
                live -= graph.values[value].nbytes
            case Prefetch(value):
                live += graph.values[value].nbytes
            case Offload(_):
                pass
        most = max(most, live)
    return most


def open_slots(program: Program, *schedules: Schedule) -> Mapping[int, int]:
    """What a store must hold for schedules of one program: bytes per slot."""
    values = program.graph.values
    found: dict[int, int] = {}
    for schedule in schedules:
        for value in offloaded(schedule):
            parts = [values[value].nbytes]
            if values[value].role is Role.STATE and program.updates is not None:
                parts = program.updates.state_sizes(_parameter_of(program, value))
            found |= {slot(value, part, len(values)): nbytes for part, nbytes in enumerate(parts)}
    return found


def offloaded(schedule: Schedule) -> list[int]:
    """Values that leave memory at all."""
    return list(dict.fromkeys(made.value for made in schedule.instructions if isinstance(made, Offload)))


def own_tensors(program: Program, schedule: Schedule) -> Mapping[int, Callable[[], list[torch.Tensor]]]:
    """For what leaves of the user's own, how to get at its tensors; state may come to be in the first step only.

    PlanError for a weight whose memory is not its own to give back.
    """
    found: dict[int, Callable[[], list[torch.Tensor]]] = {}
    for value in offloaded(schedule):
        match program.graph.values[value].role:
            case Role.PARAM:
                _refuse_shared(program, value)
                found[value] = partial(list, (program.tensors[value],))
            case Role.STATE if program.updates is not None:
                found[value] = partial(program.updates.state_tensors, _parameter_of(program, value))
    return found


def _parameter_of(program: Program, state: int) -> torch.Tensor:
    """The parameter whose optimizer state a value is."""
    update = program.calls[program.graph.consumers[state][0]]
    return program.tensors[next(reads(update.args))]


def _refuse_shared(program: Program, value: int) -> None:
    named, storage = program.graph.values[value], program.tensors[value].untyped_storage()
    others = [v for v, t in program.tensors.items() if v != value and t.untyped_storage()._cdata == storage._cdata]
    problem = ""
    if others:
        problem = f"shares its memory with {program.graph.values[others[0]].name}"
    elif storage.nbytes() != named.nbytes:
        problem = "is a part of something larger"
    if problem:
        raise PlanError(f"{named.name} {problem}: it cannot leave; tune with offload's what: activations, or clone it")
