"""The studies that MLflow has on record, as its own runs say them: what was won, where, and where its page is."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.errors import ConfigError
from autotune.report.mlflow_store import connect, faults, tracking_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

MOST = 1000
"""Studies that are asked for, the latest first: more than that is read in MLflow itself."""


@dataclass(frozen=True, slots=True)
class Logged:
    """One study's parent run."""

    identity: str
    """Name of the run directory, begin of the graph's digest and start, with dots between."""
    experiment_id: str
    run_id: str
    workload: str
    silicon: str
    budget: str
    started: float
    """Seconds since the epoch."""
    best: Mapping[str, float]
    """Metrics of the winner without their `best_`; empty where nothing won yet."""

    @property
    def page(self) -> str:
        """Of the run, behind the address of MLflow's pages."""
        return f"#/experiments/{self.experiment_id}/runs/{self.run_id}"


def studies(runs: Path) -> list[Logged]:
    """Of the store that runs of this directory are logged to, the latest first; ConfigError where it does not answer."""
    uri = tracking_uri(runs)
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists():
        return []
    try:
        return [_read(run) for run in _parents(connect(uri, runs))]
    except faults() as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"MLflow does not answer: {said[:200]}") from None


def _parents(client: "MlflowClient") -> list["Run"]:
    experiments = list(_experiments(client))
    if not experiments:
        return []
    order = ["attributes.start_time DESC"]
    return list(client.search_runs(experiments, "tags.`autotune.kind` = 'study'", max_results=MOST, order_by=order))


def _experiments(client: "MlflowClient") -> Iterator[str]:
    token: str | None = ""
    while token is not None:
        page = client.search_experiments(filter_string="name LIKE 'autotune.%'", page_token=token or None)
        yield from (str(found.experiment_id) for found in page)
        token = page.token or None


def _read(run: "Run") -> Logged:
    tags, metrics = run.data.tags, run.data.metrics
    return Logged(
        identity=tags.get("autotune.run", ""),
        experiment_id=run.info.experiment_id,
        run_id=run.info.run_id,
        workload=tags.get("workload", "?"),
        silicon=tags.get("device.silicon", "?"),
        budget=run.data.params.get("budget", "?"),
        started=(run.info.start_time or 0) / 1000,
        best={key.removeprefix("best_"): value for key, value in metrics.items() if key.startswith("best_")},
    )
