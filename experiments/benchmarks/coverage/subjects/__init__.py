"""The models of the coverage suite, by name."""

from experiments.benchmarks.coverage.subject import Subject
from experiments.benchmarks.coverage.subjects import (
    adapters,
    encoders,
    language,
    layers,
    objectives,
    operations,
    sequences,
    styles,
    training,
    vision,
)

GROUPS = (layers, operations, training, styles, objectives, language, encoders, sequences, vision, adapters)
SUBJECTS: dict[str, Subject] = {subject.name: subject for group in GROUPS for subject in group.SUBJECTS}
"""Every model by name."""
assert len(SUBJECTS) == sum(len(group.SUBJECTS) for group in GROUPS), "two models have one name"
