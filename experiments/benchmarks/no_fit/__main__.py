"""Tune a step under a memory limit that plain eager exceeds, with the command line."""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from experiments.common.commands import run_to_end
from experiments.common.facts import collect_facts
from experiments.common.result_file import write_result

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", default="600MiB")
    parser.add_argument("--budget", default="590MiB")
    parser.add_argument("--time", default="3m")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    facts = collect_facts()
    config = (HERE.parents[2] / "configs" / "resnet18.yaml").resolve()
    command = [
        "autotune", "tune", str(config), "--limit", options.limit, "--budget", options.budget, "--time", options.time, "--json",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        process = run_to_end([sys.executable, "-m", *command], cwd=folder, capture_output=True)
    if process.returncode:
        sys.exit(f"exit {process.returncode}\n{process.stderr[-2000:]}")
    document = json.loads(process.stdout)
    options.out.mkdir(parents=True, exist_ok=True)
    graphs = {document["best"]["workload"]: document["best"]["graph_digest"]}
    write_result(options.out / "tune.json", facts | document, graphs)
    eager, best = document["baseline"]["measurement"], document["best"]["measurement"]
    (options.out / "summary.md").write_text(
        f"Limit {options.limit} ({best['limit']}), budget {options.budget}.\n\n"
        f"- plain eager: {eager['outcome']} ({eager['detail'].splitlines()[0] if eager['detail'] else ''})\n"
        f"- best plan: {best['outcome']}, the whole process charged {best['charged_bytes'] / 2**20:.1f} MiB, predicted "
        f"{document['best']['estimate']['peak_bytes'] / 2**20:.1f} MiB above a floor of {best['floor_bytes'] / 2**20:.1f}\n"
        f"- results: {best['detail'] or 'compared here'}, largest difference {best['max_error']}\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
