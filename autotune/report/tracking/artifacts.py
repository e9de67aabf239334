"""Log artifacts to MLflow as far as their store answers: metrics, params and the end of a run do not need it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.records.tracking_address import mask_secrets

INCOMPLETE = "autotune.incomplete"
"""Tag of a run whose artifacts were not stored, with the reason."""


class Artifacts:
    """Uploads of artifacts by an MLflow client. After the first failure no further one is tried.

    A server may keep its artifacts elsewhere, such as in an object store that this machine has no access to.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self.marked: set[str] = set()
        """Ids of the runs with the tag `INCOMPLETE`; a reopened study adds those of earlier sessions."""
        self.problem = ""
        """Reason in one line that artifacts are missing."""

    def log_text(self, run: str, text: str, name: str) -> None:
        """Store a text as a file of a run."""
        self._store(run, self._client.log_text, text, name)

    def log_file(self, run: str, path: Path) -> None:
        """Store a file of a run."""
        self._store(run, self._client.log_artifact, str(path))

    def log_folder(self, run: str, folder: Path) -> None:
        """Store the files of a folder of a run, below the folder's name."""
        self._store(run, self._client.log_artifacts, str(folder), folder.name)

    def mark(self, run: str) -> None:
        """Tag a run with the reason that its artifacts are missing, or remove the tag where they are complete."""
        if self.problem:
            self._client.set_tag(run, INCOMPLETE, self.problem)
            self.marked.add(run)
        elif run in self.marked:
            self._client.delete_tag(run, INCOMPLETE)
            self.marked.discard(run)

    def _store(self, run: str, method: Callable[..., Any], *arguments: Any) -> None:
        if self.problem:
            return
        try:
            method(run, *arguments)
        except Exception as error:  # noqa: BLE001 - any fault of a store or of its library
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self.problem = mask_secrets(first_line[:300])
