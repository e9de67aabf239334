"""`autotune plan`: one plan by estimate alone."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.cli.commands.session import answering, harness, print_json, say
from autotune.errors import ConfigError
from autotune.records import plan_file as planfile
from autotune.records.json_codec import to_json
from autotune.study.plan_by_estimate import make
from autotune.units import fmt_seconds

if TYPE_CHECKING:
    from autotune.records.config import Config


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
        from autotune.cli.console import describe

        lines = [
            *describe(made, surveyed.graph, surveyed.costs),
            f"planned in {fmt_seconds(seconds)}",
            f"plan       {out}",
        ]
        answer.write("\n".join(lines) + "\n")
