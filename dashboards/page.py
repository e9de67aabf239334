"""What the pages share: records read once as long as their files stay the same, and words for what is missing or broken."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from dashboards import logged
from dashboards.asked import Asked, asked
from dashboards.champions import Champion, of_entry, of_study
from dashboards.found import Broken, Found, attempt, called, look, parted, stamp
from dashboards.studies import Study, read

TUNE = "autotune tune resnet18 --budget 65%"
NIGHTLY = "autotune nightly configs/nightly.yaml"
REPRODUCE = "autotune reproduce --all"


def begin(title: str, about: str) -> tuple[Asked, Found]:
    """Head of a page, and what there is to show."""
    st.title(title)
    st.caption(about)
    given = asked()
    return given, look(given.runs)


def empty(what: str, command: str) -> None:
    """What is not there yet, and the command that makes it."""
    st.info(what)
    st.code(command, language="sh")


def name_broken(found: Iterable[Broken], root: Path) -> None:
    """Places that could not be read, with the reason of each."""
    for one in found:
        st.warning(plain(f"{called(one.path, root)} cannot be shown: {one.why}"), icon=":material/broken_image:")


def plain(text: str) -> str:
    """Words of a file or an error, which are no Markdown."""
    return re.sub(r"([\\`*_\[\]$~<>:#|])", r"\\\1", text)


def table(head: Sequence[str], rows: Sequence[Sequence[object]], columns: Mapping[str, Any] | None = None) -> None:
    """Rows of words or figures, as wide as the page; `columns`: how Streamlit is to draw some of them."""
    data = pd.DataFrame(list(rows), columns=list(head))
    st.dataframe(data, hide_index=True, width="stretch", placeholder="-", column_config=columns)


def choose(what: str, names: Sequence[str], good: Callable[[str], bool] = bool) -> str:
    """One of several: at first the one that the page's address names, else the first good one."""
    asked_for = st.query_params.get(what.replace(" ", "_"), "")
    at = names.index(asked_for) if asked_for in names else next((at for at, name in enumerate(names) if good(name)), 0)
    return st.selectbox(what, names, index=at)


def readable(run_dir: Path) -> bool:
    """Whether there is something of a run to show."""
    return not isinstance(study(run_dir), Broken)


def when(seconds: float) -> datetime:
    """A moment by this machine's clock, for a column of moments."""
    return datetime.fromtimestamp(seconds)


def study(run_dir: Path) -> Study | Broken:
    """A run, read again when one of its files has changed."""
    return _study(run_dir, stamp(run_dir))


@st.cache_resource(show_spinner="asking MLflow", ttl=10)
def recorded(runs: Path) -> list[logged.Logged] | Broken:
    """The studies that MLflow has, asked at most every ten seconds."""
    return attempt(runs, logged.studies)


def champions(found: Found) -> tuple[list[Champion], list[Broken]]:
    """Of the disk: what studies and nights handed back."""
    made = [_made(path, of_study) for path in found.runs] + [_made(path, of_entry) for path in found.entries]
    good, broken = parted(made)
    return [one for one in good if one is not None], broken


def _made(path: Path, read: Callable[[Path], Champion | None]) -> Champion | Broken | None:
    files = ("plan.json", "champion.json", "history.jsonl")
    changed = tuple((path / name).stat().st_mtime for name in files if (path / name).exists())
    return _champion(path, read.__name__, changed)


@st.cache_resource(show_spinner=False, max_entries=500)
def _champion(path: Path, reader: str, changed: tuple[float, ...]) -> Champion | Broken | None:
    del changed  # part of what is cached by
    return attempt(path, {"of_study": of_study, "of_entry": of_entry}[reader])


@st.cache_resource(show_spinner="reading the run", max_entries=20)
def _study(run_dir: Path, changed: tuple[float, ...]) -> Study | Broken:
    del changed
    return attempt(run_dir, read)
