"""Questions about one model to fresh processes: bytes to one each, seconds to one in which all variants take turns."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from autotune.harness.child import Child
from autotune.harness.messages import Failed, Spec
from autotune.measurement import Outcome

HERE = Path(__file__).parent
CHARGED_SAMPLES = 4
"""Steps of which the charge is taken, in blocks of two."""
PATIENCE_SECONDS = 60.0
DEATHS = 4
"""A timing process that dies is started again without the variant that was its last, so often."""


class Bench:
    """One model's workload, eager or as a peer runs it."""

    def __init__(self, name: str, model: str, arguments: dict[str, Any], scratch: Path) -> None:
        self.name, self.model, self.arguments, self.scratch = name, model, arguments, scratch

    def workload(self, peer: str) -> dict[str, Any]:
        if peer == "eager":
            return {"reference": self.model, "arguments": self.arguments}
        arguments = {"peer": peer, "model": self.model, **self.arguments}
        return {"reference": f"{HERE / 'peers.py'}:workload", "arguments": arguments}

    def child(self, peer: str, scratch: Path, *, return_memory: bool) -> Child:
        """A process of its own, which keeps malloc as it comes or has it return memory at once."""
        spec = Spec(**self.workload(peer), scratch=str(scratch), return_memory=return_memory)
        return Child.start(spec, scratch / "child.log")

    def peer(self, name: str, seconds: float) -> dict[str, Any]:
        """Peak while malloc returns memory at once, and charge with the allocator of every day, above the floor."""
        reference = self.scratch / f"reference-{name}"
        found = self.ask(
            name, {"do": "baseline_bytes", "reference": str(reference)}, return_memory=True, seconds=seconds
        )
        # what is compiled, is compiled in the first of two: its charge would be the compiler's
        warm = charge_request(None) | {"samples": 1}
        charged = self.ask(name, warm, charge_request(None), return_memory=False, seconds=seconds)
        if name != "eager":
            shutil.rmtree(reference)
        return {
            "step_peak_bytes": found["peak_bytes"] - found["floor_bytes"],
            "step_charged_bytes": charged["charged_bytes"] - charged["floor_bytes"],
            "floor_bytes": found["floor_bytes"],
            "meter": found["meter"],
        }

    def eager_results(self, seconds: float) -> str:
        """Where eager's results lie, to the bit."""
        reference = self.scratch / "reference-eager"
        if not reference.exists():
            self.ask(
                "eager", {"do": "baseline_bytes", "reference": str(reference)}, return_memory=True, seconds=seconds
            )
        return str(reference)

    def ask(self, peer: str, *requests: dict[str, Any], return_memory: bool, seconds: float) -> dict[str, Any]:
        """One question after the other to a process of its own; the last answer."""
        self.say(f"{requests[-1]['do']} of {peer}")
        with tempfile.TemporaryDirectory(dir=self.scratch) as own:
            child = self.child(peer, Path(own), return_memory=return_memory)
            try:
                return [child.ask(dict(request), seconds) for request in requests][-1]
            finally:
                child.end()

    def in_turns(self, plans: dict[str, Any], peers: list[str], how: dict[str, Any]) -> dict[str, Any]:
        """Seconds and results of eager and the given variants, from one process and one model object."""
        asked, answered = self.scratch / "request.json", self.scratch / "answer.json"
        died: dict[str, str] = {}
        # threads and malloc as they come, as in the processes that bytes are measured in
        plain = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "MKL_", "MALLOC_"))}
        for _ in range(DEATHS):
            request = {"model": self.model, "arguments": self.arguments, "peers": peers, "plans": plans, **how}
            asked.write_text(json.dumps(request))
            self.say(f"{', '.join([*plans, *peers])} in turns")
            answered.unlink(missing_ok=True)
            code = subprocess.run(
                [sys.executable, str(HERE / "turns.py"), str(asked), str(answered)], env=plain, check=False
            ).returncode
            if not answered.exists():
                raise Failed(Outcome.CRASHED, f"the timing process ended with {code} before it had begun")
            answer = dict(json.loads(answered.read_text()))
            last = answer.pop("now")
            if not code or not last:
                break
            if last not in peers and last not in plans:
                raise Failed(Outcome.CRASHED, f"the timing process ended with {code} at {last}")
            died[last] = f"the process ended with {code}"
            peers, plans = [one for one in peers if one != last], {k: v for k, v in plans.items() if k != last}
        answer["failed"] |= died
        return answer

    def say(self, what: str) -> None:
        print(f"{self.name}: {what}", file=sys.stderr, flush=True)


def charge_request(plan: Any) -> dict[str, Any]:
    """Ask for the charge of a plan, or of plain steps."""
    return {
        "do": "seconds",
        "plan": plan,
        "eager": plan is None,
        "samples": CHARGED_SAMPLES,
        "patience_seconds": PATIENCE_SECONDS,
    }
