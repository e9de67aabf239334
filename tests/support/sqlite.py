"""SQLite for tests: no transaction waits for the disk, since nobody reads the records of a test after a power cut."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_waits_for_the_disk() -> Iterator[None]:
    """Let every SQLite database that SQLAlchemy opens inside the context leave its writes to the page cache."""
    from sqlalchemy import event  # deferred: only tests with a database need it
    from sqlalchemy.engine import Engine

    def relax(connection: object, record: object) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.execute("PRAGMA synchronous=OFF")

    event.listen(Engine, "connect", relax)
    try:
        yield
    finally:
        event.remove(Engine, "connect", relax)
