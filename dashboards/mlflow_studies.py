"""Load the studies that MLflow has on record: best plan, device, budget, and the address of each run's page."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.errors import ConfigError
from autotune.records.tracking_address import mask_secrets, sqlite_file
from autotune.report.mlflow_store import BEST_TRIAL, MLFLOW_VIEW, connect, store_errors, tracking_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

MAX_STUDIES = 1000
"""Maximum number of studies to load, the latest first."""


@dataclass(frozen=True, slots=True)
class LoggedStudy:
    """Parent run of one study."""

    identity: str
    """Name of the run directory, first digits of the graph's digest, and start time, joined by dots."""
    experiment_id: str
    run_id: str
    workload: str
    device: str
    """Name of the chip with its cores, as `Device.title`."""
    budget: str
    started: float
    """Start, in seconds since the epoch."""
    best: Mapping[str, float]
    """Metrics of the best plan, without the prefix `best_`; empty without a best plan."""
    loop: str = ""
    """Training loop of the study's config; empty for the factory's own."""

    @property
    def page(self) -> str:
        """Path of the run's page, to append to the address of MLflow's server."""
        return f"#/experiments/{self.experiment_id}/runs/{self.run_id}{MLFLOW_VIEW}"


def load_studies(runs: Path) -> list[LoggedStudy]:
    """Load the studies of a `runs` directory from its MLflow store, the latest first.

    Raises ConfigError if the store does not answer.
    """
    uri = tracking_uri(runs)
    file = sqlite_file(uri)
    if file is not None and not file.exists():
        return []
    try:
        return [_from_run(run) for run in _parent_runs(connect(uri, runs))]
    except store_errors() as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"MLflow does not answer: {mask_secrets(first_line[:200])}") from None


def _parent_runs(client: "MlflowClient") -> list["Run"]:
    experiments = list(_experiment_ids(client))
    if not experiments:
        return []
    query, order = "tags.`autotune.kind` = 'study'", ["attributes.start_time DESC"]
    return list(client.search_runs(experiments, query, max_results=MAX_STUDIES, order_by=order))


def _experiment_ids(client: "MlflowClient") -> Iterator[str]:
    token: str | None = ""
    while token is not None:
        page = client.search_experiments(filter_string="name LIKE 'autotune.%'", page_token=token or None)
        yield from (str(experiment.experiment_id) for experiment in page)
        token = page.token or None


def _from_run(run: "Run") -> LoggedStudy:
    tags, metrics = run.data.tags, run.data.metrics
    return LoggedStudy(
        identity=tags.get("autotune.run", ""),
        experiment_id=run.info.experiment_id,
        run_id=run.info.run_id,
        workload=tags.get("workload", "?"),
        device=f"{tags.get('device.silicon', '?')}, {tags.get('device.cores', '?')} cores",
        budget=run.data.params.get("budget", "?"),
        started=(run.info.start_time or 0) / 1000,
        best={
            key.removeprefix("best_"): value
            for key, value in metrics.items()
            if key.startswith("best_") and BEST_TRIAL in tags
        },
        loop=run.data.params.get("loop", ""),
    )
