"""Run every loop in plain PyTorch and under a plan: equal, or refused clearly; write results/results.json and summary.md.

`python -m experiments.benchmarks.loops [--only NAME...] [--group NAME...] [--failed]` takes about 8 minutes of process time for all.
"""

import argparse
import json
import multiprocessing
import resource
import warnings
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from experiments.benchmarks.loops.cases import CASES, GROUPS
from experiments.benchmarks.loops.summary import summarize
from experiments.benchmarks.loops.trial import Verdict, try_case
from experiments.common.facts import collect_facts
from experiments.common.result_file import write_result

HERE = Path(__file__).parent
CPU_SECONDS = 120
"""Process time after which a loop is given up."""
LIBRARIES = ("torch", "transformers", "trl", "peft", "lightning", "accelerate")


def main() -> None:
    """Run the loops that the command line names; keep the records of the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="NAME", help="names of loops; all by default")
    parser.add_argument("--group", nargs="+", choices=GROUPS, help="groups of loops")
    parser.add_argument("--failed", action="store_true", help="loops again whose record is a difference or a crash")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the records")
    options = parser.parse_args()
    path: Path = options.out / "results.json"
    stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["loops"] if path.exists() else {}
    names = options.only or [case.__name__ for group in options.group or GROUPS for case in GROUPS[group]]
    if options.failed:
        names = [
            name for name in names if stored.get(name, {}).get("verdict") in (Verdict.DIFFERENT, Verdict.CRASH, None)
        ]
    _import_libraries()
    options.out.mkdir(parents=True, exist_ok=True)
    facts = collect_facts() | {
        "command": "python -m experiments.benchmarks.loops",
        "versions": {library: metadata.version(library) for library in LIBRARIES},
    }
    for name in names:
        stored[name] = try_in_process(name) | {"commit": facts["commit"], "date": facts["date"]}
        print(f"{name}: {stored[name]['verdict']} {stored[name]['detail']}", flush=True)
        document = {**facts, "loops": {key: stored[key] for key in CASES if key in stored}}
        write_result(path, document, graphs={})
        (options.out / "summary.md").write_text(summarize(document), encoding="utf-8")


def try_in_process(name: str) -> dict[str, Any]:
    """Return the record of one loop, run in a child process, which a crash or the limit may end."""
    forking = multiprocessing.get_context("fork")  # the libraries are imported once
    receiver, sender = forking.Pipe(duplex=False)
    process = forking.Process(target=_send_record, args=(name, sender))
    process.start()
    sender.close()
    try:
        record: dict[str, Any] = receiver.recv()
    except EOFError:
        process.join()
        record = {"name": name, "verdict": Verdict.CRASH, "detail": f"the process ended with code {process.exitcode}"}
    process.join()
    return record


def _send_record(name: str, pipe: Any) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    pipe.send(asdict(try_case(CASES[name])))
    pipe.close()


def _import_libraries() -> None:
    """Import what the loops need, without running an op: children of a fork could not continue torch's threads."""
    import accelerate  # noqa: F401
    import lightning.pytorch  # noqa: F401
    import peft  # noqa: F401
    import torch._dynamo
    import torch._functorch.aot_autograd
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


if __name__ == "__main__":
    main()
