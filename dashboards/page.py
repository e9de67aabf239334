"""Share between pages: cached records, tables, choices, and notes about missing or unreadable places."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from autotune.records import yaml_file
from autotune.records.run_dir import RunDir
from dashboards.arguments import AppArguments, parse_arguments
from dashboards.champions import Champion, read_entry_champion, read_run_champion
from dashboards.discovery import (
    RunIndex,
    Unreadable,
    file_stamps,
    find_runs,
    relative_name,
    split_unreadable,
    try_read,
)
from dashboards.mlflow_studies import LoggedStudy, load_studies
from dashboards.studies import Study, read_study

TUNE = "autotune tune resnet18 --budget 65%"
NIGHTLY = "autotune nightly configs/nightly.yaml"
MAX_ROWS = 20
"""Maximum rows of a table on the screen; a longer table scrolls."""
REPRODUCE = "autotune reproduce --all"


def start_page(title: str, caption: str) -> tuple[AppArguments, RunIndex]:
    """Show a page's head; return the app's arguments and the runs to show."""
    st.title(title)
    st.caption(caption)
    arguments = parse_arguments()
    return arguments, find_runs(arguments.runs)


def show_missing(message: str, command: str) -> None:
    """Show that records are missing, and the command that creates them."""
    st.info(message)
    st.code(command, language="sh")


def show_unreadable(places: Iterable[Unreadable], root: Path) -> None:
    """Show each place that cannot be read, with the reason."""
    for place in places:
        message = f"{relative_name(place.path, root)} cannot be shown: {place.reason}"
        st.warning(escape_markdown(message), icon=":material/broken_image:")


def escape_markdown(text: str) -> str:
    """Escape text of a file or an error, which must not be read as Markdown."""
    return re.sub(r"([\\`*_\[\]$~<>:#|])", r"\\\1", text)


def show_table(head: Sequence[str], rows: Sequence[Sequence[object]], columns: Mapping[str, Any] | None = None) -> None:
    """Show rows in a table as wide as the page; `columns` are Streamlit's settings for some of the columns."""
    data = pd.DataFrame(list(rows), columns=list(head))
    # whole rows: by default ten and a half are shown
    height = 37 + 35 * min(len(data), MAX_ROWS)
    st.dataframe(data, hide_index=True, width="stretch", height=height, placeholder="-", column_config=columns)


def select_name(label: str, names: Sequence[str], is_preferred: Callable[[str], bool] = bool) -> str:
    """Show a select box and return its name: at first that of the page's address, else the first preferred one."""
    requested = st.query_params.get(label.replace(" ", "_"), "")
    preferred = next((index for index, name in enumerate(names) if is_preferred(name)), 0)
    index = names.index(requested) if requested in names else preferred
    return st.selectbox(label, names, index=index)


def to_datetime(seconds: float) -> datetime:
    """Convert seconds since the epoch to local time."""
    return datetime.fromtimestamp(seconds)


def load_study(run_dir: Path) -> Study | Unreadable:
    """Return a study, read again whenever one of its files changes."""
    return _study(run_dir, file_stamps(run_dir))


def is_readable(run_dir: Path) -> bool:
    """Return true if a run can be shown."""
    return not isinstance(load_study(run_dir), Unreadable)


def names_class(run_dir: Path) -> bool:
    """Return true if a run's config names a class of a fleet's devices. Other records are not read."""
    config = RunDir(run_dir).config
    return config.exists() and _names_class(config, config.stat().st_mtime)


@st.cache_resource(show_spinner="querying MLflow", ttl=10)
def load_mlflow_studies(runs: Path) -> list[LoggedStudy] | Unreadable:
    """Return MLflow's studies, queried at most every ten seconds."""
    return try_read(runs, load_studies)


def load_champions(index: RunIndex) -> tuple[list[Champion], list[Unreadable]]:
    """Return (champions of runs and nightly entries on disk, places that cannot be read)."""
    results = [_load_champion(path, read_run_champion) for path in index.runs]
    results += [_load_champion(path, read_entry_champion) for path in index.entries]
    champions, unreadable = split_unreadable(results)
    return [champion for champion in champions if champion is not None], unreadable


def _load_champion(path: Path, read: Callable[[Path], Champion | None]) -> Champion | Unreadable | None:
    files = (RunDir(path).plan, path / "champion.json", path / "history.jsonl")
    changed = tuple(file.stat().st_mtime for file in files if file.exists())
    return _champion(path, read.__name__, changed)


@st.cache_resource(show_spinner=False, max_entries=500)
def _champion(path: Path, reader: str, changed: tuple[float, ...]) -> Champion | Unreadable | None:
    del changed  # part of the cache's key
    readers = {read.__name__: read for read in (read_run_champion, read_entry_champion)}
    return try_read(path, readers[reader])


@st.cache_resource(show_spinner=False, max_entries=500)
def _names_class(config: Path, changed: float) -> bool:
    del changed  # part of the cache's key
    document = try_read(config, yaml_file.read)
    return not isinstance(document, Unreadable) and bool(document.data.get("on"))


@st.cache_resource(show_spinner="reading the run", max_entries=20)
def _study(run_dir: Path, changed: tuple[float, ...]) -> Study | Unreadable:
    del changed  # part of the cache's key
    return try_read(run_dir, read_study)
