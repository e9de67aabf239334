"""Train a GPT-2 on text of many lengths in buckets, beside the plan of the longest text and beside eager.

`python -m experiments.benchmarks.variable_length` needs about 5 minutes and writes `results/`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from autotune.capture.tracer import capture
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.measure.meters.rss import RssMeter
from autotune.planners import make_plan
from autotune.planners.auto import best_plan
from autotune.predict.simulate import peak_bytes, simulate
from autotune.records import plan_file as planfile
from autotune.records.plan_file import PlanFile
from autotune.runtime import step_selector
from autotune.runtime.op_profiler import profile
from autotune.runtime.shapes.buckets import Buckets
from autotune.runtime.train_step import TrainStep
from autotune.workloads.reference import WorkloadRef
from autotune.workloads.workload import Workload
from experiments.common.facts import collect_facts, format_origin
from experiments.common.result_file import write_result

HERE = Path(__file__).parent

VARIANTS = ("fixed", "buckets", "background", "eager")
"""Every text padded to the longest under its plan; texts in buckets; shapes planned by another process; plain eager."""
SHARE = 0.65
"""Budget of the plan, as a share of the traced step's peak."""
WARM_UP = 3
"""Steps of each bucket that count as warm-up: an arena records two of them, and lays them out after the second."""
MOST_BYTES, LONGEST_STALL = 1.1, 1.0
"""Accepted memory, as a ratio to the plan's, and accepted stall in seconds."""
FULL: dict[str, Any] = {
    "rows": 8, "lengths": [32, 512], "sizes": [128, 256, 384, 512], "steps": 300, "depth": 1, "width": 96, "vocabulary": 2048,
    "multiple": 32,
}  # fmt: skip
TINY: dict[str, Any] = {
    "rows": 2, "lengths": [4, 16], "sizes": [8, 16], "steps": 10, "depth": 1, "width": 16, "vocabulary": 64,
    "multiple": 4,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="does the script work at all?")
    parser.add_argument("--variant", choices=VARIANTS, help="run one variant in this process, for the script itself")
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sizes = TINY if options.tiny else FULL
    out = options.out or HERE / "results" / ("tiny-variable-length" if options.tiny else "")
    if options.variant:
        out.write_text(json.dumps(run_variant(options.variant, sizes, options.plan)), encoding="utf-8")
        return
    document: dict[str, Any] = collect_facts() | {"sizes": sizes, "variants": {}}
    with tempfile.TemporaryDirectory() as folder:
        plan, result = Path(folder) / "plan.json", Path(folder) / "result.json"
        document["plan"] = write_plan(plan, sizes)
        for variant in VARIANTS:
            command = ["--variant", variant, "--plan", str(plan), "--out", str(result), *["--tiny"] * options.tiny]
            subprocess.run([sys.executable, "-m", __package__, *command], check=True)
            document["variants"][variant] = json.loads(result.read_text(encoding="utf-8"))
            print(row(variant, document), flush=True)
    out.mkdir(parents=True, exist_ok=True)
    write_result(out / "results.json", document, {"gpt2": document["plan"]["graph"]})
    (out / "summary.md").write_text(summary(document), encoding="utf-8")


def make_workload(sizes: dict[str, Any]) -> Workload:
    """Return a GPT-2 without dropout, whose batch has the longest texts."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=sizes["depth"], n_embd=sizes["width"], n_head=4, n_positions=sizes["lengths"][1], vocab_size=sizes["vocabulary"],
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=1, use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    return Workload(model, loss_fn, optimizer, make_text(sizes, sizes["lengths"][1], 0))


def loss_fn(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean cross entropy of the next tokens, without padded ones."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def make_text(sizes: dict[str, Any], length: int, seed: int) -> dict[str, torch.Tensor]:
    """Return tokens of a random walk, which a model can learn to predict."""
    generator = torch.Generator().manual_seed(seed)
    walk = torch.randint(4, (sizes["rows"], length), generator=generator).cumsum(1) % sizes["vocabulary"]
    return {"input_ids": walk, "attention_mask": torch.ones_like(walk), "labels": walk.clone()}


def draw_lengths(sizes: dict[str, Any]) -> list[int]:
    """Return the length of each step's texts: uniform, shuffled."""
    low, high = sizes["lengths"]
    return torch.randint(low, high + 1, (sizes["steps"],), generator=torch.Generator().manual_seed(7)).tolist()


def write_plan(path: Path, sizes: dict[str, Any]) -> dict[str, Any]:
    """Plan the step of the longest texts for `SHARE` of its traced peak; return the predicted bytes."""
    torch.set_num_threads(1)
    program = capture(make_workload(sizes))
    graph, costs = program.graph, profile(program)
    traced = peak_bytes(graph, Plan.traced(graph), costs)
    budget = int(SHARE * traced)
    settings = {**best_plan(graph, costs, budget, accept_first=True).settings, "allocator": {"planner": "arena"}}
    plan = make_plan(graph, settings, budget, costs)
    estimate = simulate(graph, lower(graph, plan), costs)
    file = PlanFile(
        WorkloadRef(f"{__package__}:make_workload", {}),
        graph.digest,
        f"{SHARE:.0%}",
        budget,
        0,
        settings,
        plan,
        estimate,
    )
    planfile.write(path, file)
    return {"traced_bytes": traced, "budget_bytes": budget, "peak_bytes": estimate.peak_bytes, "graph": graph.digest}


def run_variant(variant: str, sizes: dict[str, Any], plan: Path) -> dict[str, Any]:
    """Train all steps of one variant; return seconds and loss of each, captures, and peak and floor of the process."""
    torch.set_num_threads(1)
    captures: list[float] = []

    def counted(*arguments: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        try:
            return capture(*arguments, **named)
        finally:
            captures.append(time.perf_counter() - begin)

    step_selector.capture = counted  # type: ignore[assignment]
    workload = make_workload(sizes)
    static = sum(p.numel() * p.element_size() for p in workload.model.parameters())
    step, buckets = None, Buckets(sizes["sizes"])
    begin = time.perf_counter()
    meter = RssMeter()
    floor = meter.now_bytes() - static
    if variant != "eager":
        used = {"fixed": Buckets(sizes["sizes"][-1:]), "buckets": buckets}.get(variant)
        others: Any = "background" if variant == "background" else "replan"
        step = TrainStep(
            workload.model, loss_fn, workload.optimizer, workload.batch, plan, buckets=used, other_shapes=others
        )
    preparation = time.perf_counter() - begin
    steps = []
    with meter:
        for number, length in enumerate(draw_lengths(sizes)):
            if variant == "background":  # texts of whole blocks, none of which is padded
                length = max(1, length // sizes["multiple"]) * sizes["multiple"]  # noqa: PLW2901
            text = make_text(sizes, length, 1 + number)
            bucket = length if variant == "background" else buckets.choose(length)
            steps.append({"length": length, "bucket": bucket} | _run_step(workload, step, text))
    return {
        "steps": steps, "captures": captures, "preparation_seconds": preparation, "peak_bytes": meter.peak_bytes,
        "floor_bytes": floor, "meter": meter.name,
    }  # fmt: skip


def _run_step(workload: Workload, step: TrainStep | None, batch: Any) -> dict[str, Any]:
    start, cpu = time.perf_counter(), time.process_time()
    loss = (step(batch) if step is not None else _eager(workload, batch)).item()
    return {
        "loss": loss, "seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu,
        "planned": step is not None and not step.is_eager,
    }  # fmt: skip


def _eager(workload: Workload, batch: Any) -> torch.Tensor:
    assert workload.optimizer is not None
    loss = loss_fn(workload.model, batch)
    loss.backward()
    workload.optimizer.step()
    workload.optimizer.zero_grad()
    return loss.detach()


def warm_steps(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the steps that are no warm-up."""
    counts: dict[int, int] = {}
    warm = []
    for step in steps:
        counts[step["bucket"]] = counts.get(step["bucket"], 0) + 1
        if counts[step["bucket"]] > WARM_UP:
            warm.append(step)
    return warm


def longest(steps: list[dict[str, Any]], clock: str) -> float:
    """Return the largest excess of a step over the median of its bucket, in seconds."""
    by_bucket: dict[int, list[float]] = {}
    for step in steps:
        by_bucket.setdefault(step["bucket"], []).append(step[clock])
    return max((max(each) - sorted(each)[len(each) // 2] for each in by_bucket.values()), default=0.0)


def loss_difference(result: dict[str, Any], eager: dict[str, Any]) -> float:
    """Return the largest relative difference of two variants' losses."""
    return max(
        abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in zip(result["steps"], eager["steps"], strict=True)
    )


def step_bytes(result: dict[str, Any]) -> int:
    """Return the peak of the steps above the process's floor."""
    return int(result["peak_bytes"] - result["floor_bytes"])


def row(variant: str, document: dict[str, Any]) -> str:
    result, variants = document["variants"][variant], document["variants"]
    # another process may need more than the first steps of a length, and none of them may stall
    warm = result["steps"][WARM_UP:] if variant == "background" else warm_steps(result["steps"])
    is_comparable = "eager" in variants and variant != "background"  # which has texts of its own
    difference = f"{loss_difference(result, variants['eager']):.1e}" if is_comparable else "-"
    return (
        f"| {variant} | {len(result['captures'])} | {result['preparation_seconds']:.0f} | "
        f"{sum(step['planned'] for step in result['steps'])} | "
        f"{max(step['seconds'] for step in warm):.2f} | {longest(warm, 'seconds'):.2f} | {longest(warm, 'cpu_seconds'):.2f} | "
        f"{step_bytes(result) / 2**20:.1f} | {step_bytes(result) / step_bytes(variants['fixed']):.3f} | "
        f"{sum(step['cpu_seconds'] for step in warm):.0f} | {difference} |"
    )


def summary(document: dict[str, Any]) -> str:
    """Format a table of the variants, and whether the aims are met."""
    sizes, buckets = document["sizes"], document["variants"]["buckets"]
    warm = warm_steps(buckets["steps"])
    ratio, stall = step_bytes(buckets) / step_bytes(document["variants"]["fixed"]), longest(warm, "cpu_seconds")
    verdict = "met" if ratio <= MOST_BYTES and stall <= LONGEST_STALL else "missed"
    low, high = sizes["lengths"]
    return "\n".join([
        "| variant | captures | preparation, s | planned steps | longest step, s | longest stall, s | of CPU time, s | peak, MiB | over fixed | CPU time, s | losses from eager |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
        *(row(variant, document) for variant in VARIANTS),
        "",
        f"{sizes['steps']} steps with texts of {low} to {high} tokens, buckets of {', '.join(map(str, sizes['sizes']))}. A stall is a "
        f"step's excess over the median of its bucket, after {WARM_UP} steps of each bucket. Peaks are resident bytes above the "
        "process without weights. In `background` texts have whole blocks of "
        f"{sizes['multiple']} tokens and are never padded: another process captures and plans each length, and until then steps are "
        f"eager ones, with eager's memory. Only the first {WARM_UP} steps of all are warm-up there. The machine was shared: seconds of "
        "the clock include waits for other processes, CPU time does not.",
        "",
        f"At most {LONGEST_STALL:g} s of stall (in CPU time) and {MOST_BYTES} times the plan's memory were asked of `buckets`: {verdict}. "
        f"Nothing was asked of the others. {format_origin(document)}",
    ]) + "\n"  # fmt: skip


if __name__ == "__main__":
    main()
