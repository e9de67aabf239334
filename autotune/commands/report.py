"""`autotune report`: the page of a run, written anew."""

from pathlib import Path

from autotune.commands.session import answering, latest_run, print_json
from autotune.report import write_report


def run(where: Path | None, *, json: bool) -> None:
    """Write it and print its path."""
    path = write_report(where or latest_run(Path("runs")))
    with answering() as out:
        if json:
            print_json({"report_path": str(path)}, out)
        else:
            out.write(f"{path}\n")
