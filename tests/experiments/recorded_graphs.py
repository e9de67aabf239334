"""Graphs of committed results: the digests that each file records, and captures of the same steps today."""

import ast
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from autotune.capture.tracer import capture
from autotune.nightly.config import load_nightly_config
from autotune.records.config import load_config
from autotune.workloads.factory import load_workload
from autotune.workloads.memory_format import in_format
from experiments.benchmarks.frontier.models import workload_reference
from experiments.benchmarks.kernels import __main__ as kernels
from experiments.benchmarks.layout import __main__ as layout
from experiments.benchmarks.offload import __main__ as offload
from experiments.benchmarks.trial_cost import __main__ as trial_cost
from experiments.benchmarks.tuned import __main__ as tuned
from experiments.benchmarks.variable_length import __main__ as variable_length
from experiments.claims.dtr import __main__ as dtr
from experiments.claims.echo import __main__ as echo
from experiments.claims.memonger import __main__ as memonger
from experiments.claims.model_olla import __main__ as olla
from experiments.claims.monet import __main__ as monet
from experiments.claims.nntrainer_order import __main__ as order
from experiments.claims.sublinear import __main__ as sublinear
from experiments.common.result_file import ORIGINS, read_digests
from experiments.common.simulated import CAPTURED, capture_step

COMPILED = "inductor"
"""Part of the names of graphs with compiled regions: those take minutes to compile, so only the graphs below them are captured."""

StepWorkload = tuple[str, Mapping[str, Any]]
"""Reference and arguments of a workload."""


@dataclass(frozen=True, slots=True)
class RecordedGraph:
    """Digest of a graph in a result file."""

    file: str
    """Path of the file below `experiments/`."""
    name: str
    """Name of the graph in the file."""
    digest: str
    """The digest, or its first digits."""
    recapture: Callable[[], str] | None
    """Function that captures the same step today and returns the digest; None where nothing names the step."""


def recorded_graphs(results: Mapping[str, Mapping[str, Any]]) -> Iterator[RecordedGraph]:
    """Yield the graphs of results by file, but for those with compiled regions."""
    for file, document in results.items():
        for name, digest in list_digests(document):
            if COMPILED not in name:
                yield RecordedGraph(file, name, digest, find_recapture(file, document, name))


def list_digests(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name, digest) of each graph of a result and of its parts."""
    parts = (document, *document.get(ORIGINS, {}).values())
    pairs = [pair for facts in parts for pair in read_digests(facts).items()]
    match document:
        case {"graph": str(digest), "workload": str(name)}:  # a landscape
            pairs.append((name, digest))
        case {"best": {"graph_digest": str(digest), "workload": str(name)}}:  # the document of `autotune tune`
            pairs.append((name, digest))
        case {"plan": {"graph": str(digest)}}:  # texts of variable length, without `graphs`
            pairs.append(("gpt2", digest))
    return list(dict.fromkeys(pairs))


def find_recapture(file: str, document: Mapping[str, Any], name: str) -> Callable[[], str] | None:
    """Return a function that captures a recorded step today and returns its digest; None where nothing names the step."""
    folder = file.partition("/results/")[0]
    if folder == "gpu":  # a graph of a GPU has other sizes
        return None
    if step := find_step(folder, document, name):
        return step
    workload = find_workload(file, document, name)
    if workload is None:
        return None
    model, arguments = workload
    memory_format = "channels_last" if "channels_last" in name else document.get("memory_format", "")
    return partial(capture_workload, model, json.dumps(arguments), memory_format)


@functools.cache
def capture_workload(model: str, arguments: str, memory_format: str = "") -> str:
    """Capture a workload in a memory format, its arguments given as JSON, and return the digest of its graph."""
    reference = model if ":" in model else workload_reference(model)
    with in_format(load_workload(reference, json.loads(arguments)), memory_format) as workload:
        return capture(workload, model).graph.digest


def find_workload(file: str, document: Mapping[str, Any], name: str) -> StepWorkload | None:
    """Return the workload of a recorded graph by the record's own keys, by the graph's name, or by its command.

    None where none of them names it.
    """
    if isinstance(document.get("model"), str) and "arguments" in document:
        return document["model"], document["arguments"]
    models = document.get("models")
    entry = models.get(name) if isinstance(models, Mapping) else None
    if isinstance(entry, Mapping) and "arguments" in entry:
        return entry.get("model", name), entry["arguments"]
    with suppress(KeyError):  # a workload that its command does not have any more
        return parse_name(name) or find_by_command(file, document, name)
    return None


def parse_name(name: str) -> StepWorkload | None:
    """Return the workload that a name spells: `REFERENCE(KEY=VALUE)`, or `REFERENCE {'KEY': VALUE}`; None for other names.

    >>> parse_name("resnet18(batch=16, size=112)")
    ('resnet18', {'batch': 16, 'size': 112})
    """
    with suppress(SyntaxError, ValueError):
        if match := re.fullmatch(r"([\w.:]+) (\{.*\})", name):
            return match[1], ast.literal_eval(match[2])
        if match := re.fullmatch(r"([\w.:]+)\((.*)\)", name):
            return match[1], ast.literal_eval(re.sub(r"(\w+)=", r"'\1': ", f"{{{match[2]}}}"))
    return None


def find_by_command(file: str, document: Mapping[str, Any], name: str) -> StepWorkload | None:
    """Return the workload that the constants or the config of a result's command have for a graph; None for other commands."""
    is_default = "--config" not in document.get("command", "")
    match file.partition("/results/")[0]:
        case "benchmarks/tuned":
            return read_config(tuned.RUNS[Path(file).stem][0])
        case "benchmarks/repeated_tunes":
            return read_config(name)
        case "benchmarks/transfer" if is_default:
            return read_config("resnet18")
        case "benchmarks/nights" if is_default:
            entries = load_nightly_config(tuned.config_path("nightly")).entries
            return {entry.key: (entry.workload, entry.arguments) for entry in entries}[name]
        case "benchmarks/trial_cost":
            return document["workload"], json.loads(trial_cost.ARGUMENTS)
        case "benchmarks/offload":
            return offload.MODELS[name]
        case "benchmarks/layout":
            return name, layout.MODELS[name]
        case "benchmarks/integrations":
            return f"experiments.benchmarks.integrations.{name}:factory", {}
        case "claims/nntrainer_offload":
            batch, size = map(int, re.findall(r"\d+", name))
            return "resnet18", {"batch": batch, "size": size}
    return None


def read_config(name: str) -> StepWorkload | None:
    """Return the workload of a config in `configs/`; None where there is no such config."""
    path = tuned.config_path(name)
    if not path.exists():
        return None
    config = load_config(str(path))
    return config.workload, config.arguments


def find_step(folder: str, document: Mapping[str, Any], name: str) -> Callable[[], str] | None:
    """Return the capture of a step that no reference with arguments names; None for other steps."""
    match folder:
        case "benchmarks/variable_length":
            return lambda: capture(variable_length.make_workload(document["sizes"])).graph.digest
        case "benchmarks/kernels":
            return lambda: capture(kernels.make_workload(name, document["sizes"])).graph.digest
        case "benchmarks/coverage":
            return partial(capture_subject, name)
    steps = claim_steps().get(folder.removeprefix("claims/"), {})
    return partial(capture_claim, steps[name], name) if name in steps else None


def capture_subject(name: str) -> str:
    """Capture a model of the coverage suite and return the digest of its graph."""
    from experiments.benchmarks.coverage.subjects import SUBJECTS  # imports many libraries

    return capture(SUBJECTS[name].workload(), name).graph.digest


def capture_claim(step: Callable[[], object], name: str) -> str:
    """Call what captures a step of a claim, and return the digest of its graph."""
    step()
    return CAPTURED[name]


@functools.cache
def claim_steps() -> dict[str, dict[str, Callable[[], object]]]:
    """Return a function for each step of a claim that captures it under its name, by claim."""
    frontiers = {"dtr": dtr.FRONTIER, "echo": echo.FRONTIER, "monet": monet.FRONTIER}
    steps: dict[str, dict[str, Callable[[], object]]] = {
        claim: {net: partial(capture_step, make, net, frontier.card) for net, make in frontier.networks.items()}
        for claim, frontier in frontiers.items()
    }
    steps["echo"]["products"] = echo.claims_of_products
    depths = [(stages, sublinear.BATCH) for stages in sublinear.STAGES.values()] + [(sublinear.RESNET152, 16)]
    steps["sublinear"] = {
        f"resnet{2 + 3 * sum(stages)}": partial(sublinear.capture_resnet, stages, batch) for stages, batch in depths
    }
    steps["nntrainer_order"] = {
        "resnet50 inference": order.capture_inference,
        "resnet50 inference, BatchNorms as ops": partial(order.capture_inference, folded=False),
        "resnet50": order.capture_training,
    }
    steps["model_olla"] = {"alexnet": olla.simulate_training}
    steps["memonger"] = {"segformer": partial(memonger.capture_segmentation, memonger.SEGMENTED)}
    return steps
