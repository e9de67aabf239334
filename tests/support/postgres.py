"""PostgreSQL for tests: its programs, wherever they are, and a cluster that a test starts."""

import os
import shutil
import socket
import subprocess
from pathlib import Path

ABSENT = "PostgreSQL is not installed: apt-get install postgresql"
"""Reason of a skipped test."""


def find_programs() -> Path | None:
    """Return the directory of PostgreSQL's programs; Debian keeps them off the PATH."""
    if (path := shutil.which("initdb")) is not None:
        return Path(path).resolve().parent  # a link beside other programs
    return next((path.parent for path in sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)), None)


class Postgres:
    """A cluster in a directory, on a free port of this machine; as root it runs as the user `postgres`."""

    def __init__(self, programs: Path, directory: Path) -> None:
        self.programs, self.directory = programs, directory
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.data = directory / "data"
        self.data.mkdir()
        if os.geteuid() == 0:
            for path in (self.data, *self.data.parents):
                if path.is_relative_to(directory):
                    shutil.chown(path, "postgres")
        self.run("initdb", "-D", self.data, "-U", "autotune", "-A", "trust", "--no-sync")
        self.start()

    @property
    def uri(self) -> str:
        return f"postgresql://autotune@127.0.0.1:{self.port}/postgres"

    def create_database(self, name: str) -> str:
        """Create a database and return its address."""
        self.run("createdb", "-h", "127.0.0.1", "-p", self.port, "-U", "autotune", name)
        return f"postgresql://autotune@127.0.0.1:{self.port}/{name}"

    def start(self) -> None:
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off"
        self.run("pg_ctl", "-D", self.data, "-w", "-l", self.directory / "log", "-o", options, "start")

    def stop(self) -> None:
        self.run("pg_ctl", "-D", self.data, "-w", "-m", "immediate", "stop")

    def run(self, program: str, *arguments: object) -> None:
        command = [str(self.programs / program), *map(str, arguments)]
        if os.geteuid() == 0:
            command = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", *command]
        done = subprocess.run(command, cwd=self.directory, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
