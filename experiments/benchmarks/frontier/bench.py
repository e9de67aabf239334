"""Bytes and results of one model in child processes: of eager and of its peers."""

import math
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from autotune.measure.child import Child
from autotune.measure.messages import EagerPeakRequest, Expects, MemoryPeak, ReplyT
from autotune.measure.spec import Spec
from autotune.measure.worker.reference import Reference
from autotune.workloads.reference import WorkloadRef
from experiments.benchmarks.frontier.models import workload_reference
from experiments.benchmarks.frontier.peers import ROUNDED
from experiments.benchmarks.frontier.records import CHANNELS_LAST, format_of, method_of

HERE = Path(__file__).parent
NEGLIGIBLE = 1e-4
"""Share of the norm of all gradients; a smaller gradient is compared with that norm, since it may be rounding alone."""
KINDS = {"loss": "step ", "gradients": "step ", "parameters": "parameter.", "buffers": "buffer."}
"""Prefix of the names of each kind of result; a gradient's name has `GRADIENT` in it, too."""
GRADIENT = ".gradient "


class ModelBench:
    """One model's workload, in eager or run by a peer."""

    def __init__(self, name: str, model: str, arguments: dict[str, Any], scratch: Path) -> None:
        self.name, self.model, self.arguments, self.scratch = name, model, arguments, scratch

    def workload(self, peer: str, *, still: bool = False) -> WorkloadRef:
        """Return the workload that a peer runs, in the peer's memory format."""
        if peer == "eager" and not still:
            return WorkloadRef(workload_reference(self.model), self.arguments)
        arguments = {
            "peer": method_of(peer),
            "memory_format": format_of(peer),
            "model": self.model,
            "still": still,
            **self.arguments,
        }
        return WorkloadRef(f"{HERE / 'peers.py'}:workload", arguments)

    def child(self, peer: str, scratch: Path, *, still: bool) -> Child:
        """Start a child process that returns memory at once.

        It measures bytes alone: it need not wait by spinning, and may run beside others.
        """
        spec = Spec(self.workload(peer, still=still), scratch, scratch=scratch, return_memory=True)
        return Child.start(spec, scratch / f"{peer}.log", {"OMP_WAIT_POLICY": "PASSIVE"})

    def peer(self, name: str, seconds: float) -> dict[str, Any]:
        """Return the peak above the floor while malloc returns memory at once, and the errors against eager."""
        memory = self.eager(seconds) if name == "eager" else self.results(name, seconds, still=True)
        peak = {
            "step_peak_bytes": memory.peak_bytes - memory.floor_bytes,
            "floor_bytes": memory.floor_bytes,
            "meter": memory.meter,
        }
        return peak if name == "eager" else peak | {"errors": self.errors(name, seconds)}

    def rounding_errors(self, seconds: float) -> dict[str, dict[str, Any]]:
        """Return the errors of eager with every parameter off by at most one ulp."""
        self.results(ROUNDED, seconds, still=True)
        return self.errors(ROUNDED, seconds)

    def eager(self, seconds: float) -> MemoryPeak:
        """Measure eager's bytes; its results after updates are the bit-exact reference of plans."""
        return self.results("eager", seconds, still=False)

    def errors(self, name: str, seconds: float) -> dict[str, dict[str, Any]]:
        """Return the errors of a peer's kept results against eager without updates, and delete them.

        Eager in channels_last rounds otherwise than in the model's own format. A peer in channels_last has the errors against
        that of the two whose gradients are nearer: compiled kernels may lie in either format.
        """
        path, formats = self.results_path(name, still=True), ["eager"]
        if format_of(name) and method_of(name) != "eager":
            formats.append(f"eager{CHANNELS_LAST}")
        compared = []
        for eager in formats:
            if not self.results_path(eager, still=True).exists():
                self.results(eager, seconds, still=True)
            compared.append(compare_results(Reference(path), Reference(self.results_path(eager, still=True))))
        shutil.rmtree(path)
        return min(compared, key=lambda errors: errors["gradients"]["error"])

    def results_path(self, name: str, *, still: bool) -> Path:
        """Return the path of kept results."""
        return self.scratch / f"results-{name}-{'still' if still else 'updated'}"

    def results(self, name: str, seconds: float, *, still: bool) -> MemoryPeak:
        """Run the compared steps in a child process, keep their results and return the peak."""
        request = EagerPeakRequest(self.results_path(name, still=still))
        return self.ask(name, request, seconds=seconds, still=still)

    def ask(self, peer: str, request: Expects[ReplyT], *, seconds: float, still: bool) -> ReplyT:
        """Send one request to a fresh child process and return its reply."""
        self.log(f"{type(request).__name__} of {peer}")
        with tempfile.TemporaryDirectory(dir=self.scratch) as own:
            child = self.child(peer, Path(own), still=still)
            try:
                return child.ask(request, seconds)
            finally:
                child.end()

    def log(self, what: str) -> None:
        print(f"{self.name}: {what}", file=sys.stderr, flush=True)


def compare_results(results: Reference, expected: Reference) -> dict[str, dict[str, Any]]:
    """Return the largest relative error by norm, its tensor, and bit-equality, for each kind of result.

    Raises ValueError if the expected results have no gradient: nothing would be compared.
    """
    if not any(GRADIENT in name for name in expected.names):
        raise ValueError(f"no name of the results contains {GRADIENT!r}, as a gradient's does")
    errors = {}
    for kind, prefix in KINDS.items():
        names, others = (
            {name for name in names if name.startswith(prefix) and (GRADIENT in name) == (kind == "gradients")}
            for names in (expected.names, results.names)
        )
        if names != others:
            errors[kind] = {"error": math.inf, "worst": min(names ^ others), "equal": False}
            continue
        whole = math.hypot(*(float(expected.load(name).double().norm()) for name in names))
        worst, error = "", 0.0
        for name in sorted(names):
            result, reference = results.load(name).double(), expected.load(name).double()
            if results.equals(name, expected.load(name)):
                continue
            size = max(float(reference.norm()), NEGLIGIBLE * whole)
            off = float((result - reference).norm()) / size if size else math.inf
            if not off <= error:
                worst, error = name, math.inf if math.isnan(off) else off
        errors[kind] = {"error": error, "worst": worst, "equal": not worst}
    return errors
