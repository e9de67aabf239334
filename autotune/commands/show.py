"""`autotune show`: a plan in words."""

from pathlib import Path

from autotune import planfile
from autotune.commands.session import answering, print_json
from autotune.console import describe, graph_beside
from autotune.records import to_json


def run(path: Path, *, json: bool) -> None:
    """Print it."""
    file = planfile.read(path)
    with answering() as out:
        if json:
            print_json(to_json(file), out)
        else:
            out.write("\n".join(describe(file, graph_beside(path, file.graph_digest))) + "\n")
