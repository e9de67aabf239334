"""Try every model of the suite, each in a process, and write results/results.json and results/summary.md.

`python -m experiments.benchmarks.coverage [--only NAME...] [--again] [--group NAME...]`

Models that have a record are left out: run it again to continue. Several runs may work on one file.
"""

import argparse
import fcntl
import importlib
import json
import multiprocessing
import os
import resource
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from experiments.benchmarks.coverage.subjects import GROUPS, SUBJECTS
from experiments.benchmarks.coverage.summary import describe, summarize
from experiments.benchmarks.coverage.trial import try_subject
from experiments.common.facts import collect_facts
from experiments.common.result_file import write_result

HERE = Path(__file__).parent
CPU_SECONDS = 300
"""Process time after which a model is given up."""
LIBRARIES = ("torch", "transformers", "diffusers", "peft")


def main() -> None:
    """Try the models that the command line names and that have no record yet."""
    groups = {group.__name__.rpartition(".")[2]: group for group in GROUPS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, metavar="NAME", help="names of models; all by default")
    parser.add_argument("--group", nargs="+", choices=groups, help="groups of models")
    parser.add_argument("--again", action="store_true", help="try models again that have a record")
    parser.add_argument("--failed", action="store_true", help="try models again whose record is not `equal`")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the records")
    options = parser.parse_args()
    names = options.only or list(SUBJECTS)
    if options.group:
        names = [subject.name for name in options.group for subject in groups[name].SUBJECTS]
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    os.environ["HF_HUB_OFFLINE"] = "1"
    _import_libraries()
    for name in names:
        stored = _read(out)["models"].get(name)
        if stored and not options.again and not (options.failed and stored["verdict"] != "equal"):
            continue
        record = try_in_process(name)
        _add(out, name, record)
        print(describe(name, record), flush=True)
    with _locked(out):
        _write(out, _read(out))


def try_in_process(name: str) -> dict[str, Any]:
    """Return the record of one model, tried in a child process, which a crash or a limit may end."""
    forking = multiprocessing.get_context("fork")  # the libraries are imported once
    receiver, sender = forking.Pipe(duplex=False)
    process = forking.Process(target=_send_record, args=(name, sender))
    process.start()
    sender.close()
    try:
        record: dict[str, Any] = receiver.recv()
    except EOFError:
        process.join()
        reasons = {-signal.SIGXCPU: "process time", -signal.SIGKILL: "killed, probably for lack of memory"}
        reason = reasons.get(process.exitcode or 0, f"code {process.exitcode}")
        record = {"name": name, "verdict": "crash", "detail": f"the process ended: {reason}"}
    process.join()
    return {key: value for key, value in record.items() if value not in (None, "")}


def _send_record(name: str, pipe: Any) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    pipe.send(asdict(try_subject(SUBJECTS[name])))
    pipe.close()


def _import_libraries() -> None:
    """Import what the models need, without running an op: children of a fork could not continue torch's threads."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for library in (
        "torch._dynamo",
        "torch._functorch.aot_autograd",
        "torch._export.utils",
        "transformers.modeling_utils",
    ):
        with suppress(ImportError):
            importlib.import_module(library)


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Hold the lock of the results, so that two runs add to one file."""
    with (out / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read(out: Path) -> dict[str, Any]:
    path = out / "results.json"
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"models": {}}
    return document


def _add(out: Path, name: str, record: dict[str, Any]) -> None:
    facts = collect_facts()
    with _locked(out):
        document = _read(out)
        versions = {library: _version(library) for library in LIBRARIES}
        models = {**document["models"], name: {**record, "commit": facts["commit"], "date": facts["date"]}}
        ordered = {key: models[key] for key in SUBJECTS if key in models}
        _write(
            out,
            {**facts, "command": "python -m experiments.benchmarks.coverage", "versions": versions, "models": ordered},
        )


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "not installed"


def _write(out: Path, document: dict[str, Any]) -> None:
    graphs = {name: record["graph"] for name, record in document["models"].items() if record.get("graph")}
    write_result(out / "results.json", document, graphs)
    (out / "summary.md").write_text(summarize(document), encoding="utf-8")


if __name__ == "__main__":
    main()
