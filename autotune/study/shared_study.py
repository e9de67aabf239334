"""Copy a run's Optuna study to a database that many machines share.

The search uses the run's own file, so that an outage of the database costs no trial. A later session copies what is missing.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from autotune.errors import install_command
from autotune.records.run_dir import RunDir
from autotune.records.tracking_address import mask_secrets, sqlite_address
from autotune.study.optuna_space import short_digest

if TYPE_CHECKING:
    import optuna

CONNECT_SECONDS = 10
"""Time in which a PostgreSQL server must accept a connection."""


def share_study(address: str, run_dir: Path) -> str:
    """Copy the finished trials of a run that the database at `address` lacks; return one line about what was done.

    A failure is such a line, too: the run has its own records.
    """
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    files = RunDir(run_dir)
    if not files.optuna.exists():
        return f"nothing to copy to {mask_secrets(address)}: {files.optuna} does not exist"
    # the name of a run may occur on two machines; the first line of its records holds the time of its start
    with files.trials.open("rb") as lines:
        suffix = f"{run_dir.resolve().name}.{short_digest([lines.readline()])}"
    try:
        source = optuna.storages.RDBStorage(sqlite_address(files.optuna.resolve()))
        target = _connect(address)
        names = [summary.study_name for summary in optuna.get_all_study_summaries(source)]
        count = sum(_copy(optuna.load_study(study_name=name, storage=source), target, suffix) for name in names)
    except ImportError as error:
        return f"not copied: {error}; install the PostgreSQL driver: {install_command('postgres')}"
    except (SQLAlchemyError, optuna.exceptions.OptunaError, OSError, RuntimeError, ValueError) as error:
        reason = mask_secrets(" ".join(str(error).split()))[:200]
        return f"not copied to {mask_secrets(address)}: {reason}; the next session copies what is missing"
    return f"{count} trials copied to {mask_secrets(address)}, studies *.{suffix}"


def _connect(address: str) -> "optuna.storages.RDBStorage":
    """Open the shared database; ValueError where it is that of another program, which both would damage."""
    import optuna
    import sqlalchemy

    arguments = {"connect_timeout": CONNECT_SECONDS} if address.startswith("postgresql") else {}
    engine = sqlalchemy.create_engine(address, connect_args=arguments)
    tables = sqlalchemy.inspect(engine).get_table_names()
    engine.dispose()
    if "alembic_version" in tables and "studies" not in tables:
        raise ValueError("the database holds the tables of another program, such as MLflow; name one of its own")
    return optuna.storages.RDBStorage(address, engine_kwargs={"connect_args": arguments})


def _copy(study: "optuna.Study", target: "optuna.storages.RDBStorage", suffix: str) -> int:
    """Add the trials that the copy of a study lacks, up to the last one that is finished; return their number.

    One before it that is not, such as the repeat of an interrupted trial, is copied as failed, so that numbers stay the same.
    """
    import optuna

    copy = optuna.create_study(
        storage=target, study_name=f"{study.study_name}.{suffix}", directions=study.directions, load_if_exists=True
    )
    for key, value in study.user_attrs.items():
        copy.set_user_attr(key, value)
    missing = study.get_trials(deepcopy=False)[len(copy.get_trials(deepcopy=False)) :]
    count = max((number for number, trial in enumerate(missing, 1) if trial.state.is_finished()), default=0)
    failed = optuna.trial.create_trial(state=optuna.trial.TrialState.FAIL)
    copy.add_trials([trial if trial.state.is_finished() else failed for trial in missing[:count]])
    return count
