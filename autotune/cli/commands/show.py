"""`autotune show`: a plan in words."""

from pathlib import Path

from autotune.cli.commands.session import answering, print_json
from autotune.cli.console import costs_beside, describe, graph_beside
from autotune.errors import ConfigError
from autotune.records import plan_file as planfile
from autotune.records.json_codec import to_json


def run(path: Path, *, json: bool, table: bool = False) -> None:
    """Print it; with `table` also what lives while each op runs."""
    file = planfile.read(path)
    with answering() as out:
        if json:
            print_json(to_json(file), out)
            return
        graph = graph_beside(path, file.graph_digest)
        costs = costs_beside(path, graph)
        lines = describe(file, graph, costs)
        if table:
            from autotune.report.op_table import op_rows, op_table

            if graph is None or costs is None:
                raise ConfigError(
                    f"{path}: its graph.json and costs.json are not beside it; show a plan in its run directory"
                )
            lines = [*lines, "", *op_table(op_rows(graph, file.plan, costs))]
        out.write("\n".join(lines) + "\n")
