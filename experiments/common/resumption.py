"""Continue stored results of the same machine, with the facts of each session that added to them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.common.facts import is_same_machine

CONTINUED = "continued"
"""Key of the sessions that continued a result file: their commits, dates, commands and load averages."""
SESSION_FACTS = ("commit", "date", "command", "load_before")


def resume_results(
    path: Path, facts: Mapping[str, Any], empty: Mapping[str, Any], *, fresh: bool = False, is_timed: bool = True
) -> dict[str, Any]:
    """Return stored results to continue, or `empty` with the facts of this session.

    The facts of stored results stay those of the session that began them; `note_session` adds a session that measures.

    Args:
        path: file of the results.
        facts: facts of this session, of `collect_facts`.
        empty: results without a measurement; its texts, such as a digest of what is compared, must be those of stored results.
        fresh: true to drop what is stored.
        is_timed: false for results that depend on no machine.

    Raises SystemExit if the stored results are timed and of another machine, or if `empty` says otherwise than they do.
    """
    if fresh or not path.exists():
        return {**facts, **empty}
    stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if is_timed:
        refuse_other_machine(path, stored, facts)
    for key, value in empty.items():
        if isinstance(value, str) and stored.get(key, value) != value:
            raise SystemExit(f"{path}: its {key} is {stored[key]}, not {value}; run the command with --fresh")
    return stored


def note_session(results: dict[str, Any], facts: Mapping[str, Any]) -> None:
    """Add this session to `CONTINUED` before results that it measured are written, unless it began them or is there already."""
    session = {fact: facts[fact] for fact in SESSION_FACTS}
    began = {fact: results.get(fact) for fact in SESSION_FACTS}
    if session not in (began, *results.get(CONTINUED, ())):
        results[CONTINUED] = [*results.get(CONTINUED, ()), session]


def refuse_other_machine(path: Path, stored: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Raise SystemExit if stored results are of another machine than the facts; older files name it `device`."""
    before, now = stored.get("machine") or stored.get("device"), facts.get("machine")
    if before and now and not is_same_machine(before, now):
        raise SystemExit(f"{path} is of another machine: choose another --out, or take it away")
