"""`autotune show`: describe a plan in words."""

from pathlib import Path

from autotune.cli.output import answer_stream, print_json
from autotune.errors import ConfigError
from autotune.records import plan_file as planfile
from autotune.records.json_codec import to_json
from autotune.records.plan_file import find_records, read_records
from autotune.records.run_dir import RunDir
from autotune.report.plan_text import describe_plan


def run(path: Path, *, json: bool, table: bool = False) -> None:
    """Describe a plan file, or the plan of a run; with `table` also list the live tensors of each op."""
    if path.is_dir() and RunDir(path).plan.exists():
        path = RunDir(path).plan
    file = planfile.read(path)
    with answer_stream() as out:
        if json and table:
            raise ConfigError("--table is text alone; leave --json or --table out")
        if json:
            print_json(to_json(file), out)
            return
        lines = describe_plan(file, *find_records(path, file))
        if table:
            from autotune.report.op_table import build_op_rows, format_op_table

            graph, costs = read_records(path, file)
            lines = [*lines, "", *format_op_table(build_op_rows(graph, file.plan, costs))]
        out.write("\n".join(lines) + "\n")
