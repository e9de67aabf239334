"""Compare, by estimate, plans within the same bytes on regions of several rebuild prices.

`python -m experiments.benchmarks.rebuild_price [--models NAME...]`
"""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.ir.plan import REBUILD_PRICE, Plan
from autotune.ir.schedule import lower
from autotune.measure.children import Children, ChildRole
from autotune.measure.messages import SurveyRequest, WiringRequest
from autotune.measure.spec import Spec
from autotune.measure.survey import WorkloadSurvey
from autotune.planners import KINDS
from autotune.planners.auto import best_plan
from autotune.planners.space import Space, build_space
from autotune.predict.simulate import simulate
from autotune.units import fmt_bytes
from autotune.workloads.reference import WorkloadRef
from experiments.common.commands import refuse_busy_machine
from experiments.common.facts import collect_facts, format_origin
from experiments.common.result_file import write_result

HERE = Path(__file__).parent
MODELS = {"gpt2": "", "bert": "", "vit": "", "resnet50": "channels_last"}
"""Workloads of the zoo, each at its own batch size of 8, and the memory format of their regions."""
USUAL = ("gpt2", "resnet50")
PRICES = (0.05, REBUILD_PRICE)
SHARES = (0.9, 0.65, 0.55, 0.45)
SECONDS = 1800.0
PLANNING_SECONDS = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(USUAL))
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--anyway", action="store_true", help="time on a busy machine, too")
    options = parser.parse_args()
    refuse_busy_machine(anyway=options.anyway)
    for model in options.models:
        document, graphs = compare(model, MODELS[model])
        write_result(options.out / f"{model}.json", collect_facts() | document, graphs)
        text = summarize(options.out)
    print(text)


def compare(model: str, memory_format: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Plan each share of eager's bytes, and the lowest peak, on the regions of each price."""
    workload = WorkloadRef(model, {"batch": 8})
    settled = {"allocator": "arena", "inplace": "greedy"}
    space = build_space({**KINDS, **{kind: {name: KINDS[kind][name]} for kind, name in settled.items()}}, ())
    graphs, rows = {}, []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        spec = Spec(workload, scratch, scratch=scratch, profile_cache=scratch / "profile.json")
        eager = survey(spec)
        graphs["aten"] = eager.graph.digest
        traced = simulate(eager.graph, lower(eager.graph, Plan.traced(eager.graph)), eager.costs)
        for price in PRICES:
            surveyed = survey(replace(spec, kernels="inductor", memory_format=memory_format, rebuild_price=price))
            graphs[f"inductor {price:g}"] = surveyed.graph.digest
            for share in (*SHARES, 0.0):
                row = plan_within(surveyed, int(share * traced.peak_bytes), space)
                rows.append({"price": price, "share": share, **row})
                print(model, rows[-1], flush=True)
    document = {"model": model, "arguments": workload.arguments, "regions_memory_format": memory_format}
    return document | {"eager_bytes": traced.peak_bytes, "plans": rows}, graphs


def survey(spec: Spec) -> WorkloadSurvey:
    """Compile the regions of a capture, and profile its ops."""
    children = Children(spec)
    try:
        if spec.kernels:
            children.ask(ChildRole.KERNELS, WiringRequest(), seconds=SECONDS)
            children.end(ChildRole.KERNELS)
        return children.ask(ChildRole.SURVEY, SurveyRequest(), seconds=SECONDS)
    finally:
        children.close()


def plan_within(surveyed: WorkloadSurvey, budget_bytes: int, space: Space) -> dict[str, Any]:
    """Return bytes and seconds, by estimate, of the fastest plan within the bytes; the lowest peak for 0."""
    estimate = best_plan(surveyed.graph, surveyed.costs, budget_bytes, space, seconds=PLANNING_SECONDS).estimate
    return {"peak_bytes": estimate.peak_bytes, "seconds": estimate.seconds}


def summarize(out: Path) -> str:
    """Write `summary.md` from all results in a directory, and return its text."""
    parts = []
    for path in sorted(out.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        parts += [f"## {path.stem}", "", *_table(record), "", format_origin(record), ""]
    text = "\n".join(parts)
    (out / "summary.md").write_text(text, encoding="utf-8")
    return text


def _table(record: dict[str, Any]) -> list[str]:
    plans = {(row["price"], row["share"]): row for row in record["plans"]}
    low, high = PRICES
    lines = [
        f"| budget, of the captured step's bytes | peak at price {low:g} | seconds | peak at price {high:g} | seconds | seconds at {low:g} over {high:g} |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for share in (*SHARES, 0.0):
        sides = [plans[price, share] for price in PRICES]
        cells = [text for side in sides for text in (fmt_bytes(side["peak_bytes"]), f"{side['seconds']:.4f}")]
        fits = all(side["peak_bytes"] <= share * record["eager_bytes"] for side in sides)
        ratio = f"{sides[0]['seconds'] / sides[1]['seconds']:.3f}" if fits else ""
        lines.append(f"| {' | '.join([f'{share:.0%}' if share else 'lowest', *cells, ratio])} |")
    return lines


if __name__ == "__main__":
    main()
