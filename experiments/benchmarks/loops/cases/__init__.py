"""The loops: each is a generator that runs in both ways and yields what must be equal."""

from experiments.benchmarks.loops.cases import (
    backward,
    checkpoints,
    data,
    distributed,
    frameworks,
    models,
    modes,
    updates,
    values,
)
from experiments.benchmarks.loops.ways import Case

GROUPS: dict[str, tuple[Case, ...]] = {
    module.__name__.rpartition(".")[2]: module.CASES
    for module in (values, data, updates, checkpoints, backward, modes, models, frameworks, distributed)
}
CASES: dict[str, Case] = {case.__name__: case for cases in GROUPS.values() for case in cases}
