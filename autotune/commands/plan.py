"""`autotune plan`: one plan by estimate alone."""

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autotune import planfile
from autotune.candidates import Candidate, answers, candidate, smallest
from autotune.commands.session import answering, harness, print_json, say
from autotune.errors import ConfigError
from autotune.handback import impossible, too_small
from autotune.judge import Rules
from autotune.layout.of_plan import with_layout
from autotune.plan import Plan
from autotune.planfile import PlanFile
from autotune.planners import KINDS
from autotune.planners.auto import tried_first
from autotune.records import to_json
from autotune.schedule import lower
from autotune.simulate import simulate
from autotune.space import chosen_space, preset
from autotune.units import fmt_seconds

if TYPE_CHECKING:
    from autotune.config import Config
    from autotune.harness.run import Surveyed


def run(config: "Config", *, out: Path | None, json: bool) -> None:
    """Write the plan, if a file was named, and say what it is."""
    if out is None and not json:
        raise ConfigError("no file for the plan; add -o FILE, or --json to print it")
    with answering() as answer:
        say(f"capturing {config.ref} and profiling its ops")
        with harness(config) as runner:
            surveyed = runner.survey()
        say(f"planning {len(surveyed.graph.ops)} ops for {config.budget}")
        began = time.perf_counter()
        made = make(config, surveyed)
        seconds = time.perf_counter() - began
        if out is not None:
            planfile.write(out, made)
        if json:
            document = {
                "plan": to_json(made.plan),
                "estimate": to_json(made.estimate),
                "gap": made.estimate.gap,
                "seconds_gap": made.estimate.seconds_gap,
                "layout_gap": made.estimate.layout_gap,
                "planning_seconds": seconds,
                "verified": made.verified,
            }
            print_json(document, answer)
            return
        from autotune.console import describe

        lines = [
            *describe(made, surveyed.graph, surveyed.costs),
            f"planned in {fmt_seconds(seconds)}",
            f"plan       {out}",
        ]
        answer.write("\n".join(lines) + "\n")


def make(config: "Config", surveyed: "Surveyed") -> PlanFile:
    """The first planners' answer, or the fastest of any planners' that fits; InfeasibleError if none does."""
    graph, costs = surveyed.graph, surveyed.costs
    whole = simulate(graph, lower(graph, Plan.traced(graph)), costs).peak_bytes
    step = config.parsed_budget.step_bytes(floor_bytes=surveyed.floor_bytes, baseline_step_bytes=whole)
    rules = Rules(step, surveyed.floor_bytes, None, 0.0)
    if (error := impossible(config, rules, graph, costs)) is not None:
        raise error
    searched = chosen_space(config.planners.model_dump(), surveyed.device.kind, costs.stores)
    made = candidate(graph, costs, preset(KINDS, searched, tried_first(searched)), step)
    if made.estimate.peak_bytes > step:
        others = (*answers(graph, costs, searched, step), smallest(graph, costs, searched))
        made = min(others, key=lambda one: _rank(one, step))
    if made.estimate.peak_bytes > step:
        low = made.estimate
        raise too_small(config, rules, low.peak_bytes, low.peak_op, stores=bool(costs.stores))
    return PlanFile(
        workload=config.ref,
        graph_digest=graph.digest,
        budget=config.budget,
        budget_bytes=step,
        floor_bytes=surveyed.floor_bytes,
        settings=made.settings,
        plan=replace(made.plan, memory_format=config.memory_format),
        estimate=with_layout(graph, made.plan, costs, made.estimate),
        device=surveyed.device,
    )


def _rank(made: Candidate, step_bytes: int) -> tuple[int, float]:
    """What fits before what does not, the fast before the slow."""
    return max(made.estimate.peak_bytes - step_bytes, 0), made.estimate.seconds
