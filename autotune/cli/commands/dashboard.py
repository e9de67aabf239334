"""`autotune dashboard`: serve the app of `dashboards/`, MLflow's pages and optuna-dashboard on this machine only."""

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import webbrowser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from types import FrameType
from typing import Any

import autotune
from autotune.cli.output import answer_stream, print_json, print_note
from autotune.errors import DISTRIBUTION, AutotuneError, ConfigError, install_command
from autotune.records.tracking_address import mask_secrets, sqlite_file, without_credentials
from autotune.report.mlflow_store import ENVIRONMENT, connect, store_errors, tracking_uri

HOST = "127.0.0.1"
PORTS = {"dashboard": 8501, "mlflow": 5000, "optuna": 8080}
"""Default port of each server."""
START_LIMIT_SECONDS = 120.0
"""Time limit for a server's first answer; MLflow starts in 12 to 40 s on a busy machine."""
GRACE_SECONDS = 5.0
"""Time for a server to end by itself after SIGTERM."""
INSTALL = install_command("dashboard")


class ServerError(AutotuneError):
    """The dashboard's server did not start, or has ended."""


@dataclass
class Server:
    """A server in a child process, with all processes that it starts."""

    name: str
    url: str
    health: str
    """Path of the URL that answers when the server is ready."""
    process: "subprocess.Popen[bytes]"
    log: Path
    ready: bool = False
    problem: str = ""
    """Reason why the server does not answer, in one line."""

    def poll(self) -> None:
        """Update `ready` and `problem`."""
        if self.process.poll() is not None:
            self.ready, self.problem = False, f"ended with {self.process.returncode}{_last_line(self.log)}"
        elif not self.ready and not self.problem:
            self.ready = _answers(self.url + self.health)


@dataclass
class EndSignals:
    """Last signal that ends the command; no handler raises, so that every child is ended in order."""

    received: int = 0
    _before: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> "EndSignals":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.received = number


def run(runs: Path | None, port: int | None, *, browser: bool, json: bool) -> None:
    """Start all servers, print their addresses, and serve until Ctrl-C or SIGTERM; then end every child.

    Raises ConfigError where the dashboard cannot be installed from here, and ServerError where its server ends.
    """
    if importlib.util.find_spec("streamlit") is None:
        raise ConfigError(f"the dashboard needs streamlit, which is not installed; {INSTALL}")
    if runs is not None and not runs.is_dir():
        raise ConfigError(f"--runs {runs}: no such directory; name the one that autotune tune writes to")
    # relative as typed: the pages show the names of directories
    root, records = _find_app(), runs or Path("runs")
    with EndSignals() as signals, tempfile.TemporaryDirectory(prefix="autotune-") as logs, answer_stream() as out:
        servers: list[Server] = []
        try:
            remote, notes = _start(servers, root, records, port, Path(logs))
            notes += _wait(servers, signals)
            if signals.received:
                return
            addresses = dict.fromkeys(PORTS) | remote | {server.name: server.url for server in servers if server.ready}
            if json:
                print_json(addresses | {"notes": notes}, out)
            else:
                out.writelines(f"{name:<10} {url or 'not running'}\n" for name, url in addresses.items())
            out.flush()
            print_note("Ctrl-C ends all servers")
            if browser and _has_screen():
                webbrowser.open(servers[0].url)
            _serve(servers, signals)
        finally:
            _end(servers)


def _start(
    servers: list[Server], root: Path, runs: Path, port: int | None, logs: Path
) -> tuple[dict[str, str], list[str]]:
    """Start all servers, the dashboard first, and append each to `servers` at once.

    Returns the addresses of servers that run elsewhere, and notes about servers that are missing.
    """
    # each port is reserved until all are chosen, so that no two servers get the same
    with contextlib.ExitStack() as reserved:
        ports = {name: _hold_port(reserved, name, port if name == "dashboard" else None) for name in PORTS}
    url = {name: f"http://{HOST}:{number}" for name, number in ports.items()}
    uri = tracking_uri(runs)
    remote = {"mlflow": without_credentials(uri).rstrip("/")} if uri.startswith("http") else {}
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    environment = {**ENVIRONMENT, **os.environ, "PYTHONPATH": path}

    def start(name: str, health: str, arguments: Sequence[str], more: Mapping[str, str] | None = None) -> None:
        log = logs / f"{name}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    *arguments,
                ],  # -P: a folder in the working directory must not replace a package
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**environment, **(more or {})},
                start_new_session=True,
            )
        servers.append(Server(name, url[name], health, process, log))

    start("dashboard", "/_stcore/health", _streamlit(root, runs, ports["dashboard"], url | remote))
    notes = []
    if not remote and (problem := _prepare_store(uri, runs)):
        notes.append(f"mlflow: {problem}")
    elif not remote:
        # its job queue would add eight processes that nothing here uses
        more = {"MLFLOW_BACKEND_STORE_URI": uri, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        start(
            "mlflow",
            "/health",
            ["mlflow", "server", "--host", HOST, "--port", f"{ports['mlflow']}", "--workers", "1"],
            more,
        )
    if importlib.util.find_spec("optuna_dashboard") is None:
        notes.append(f"optuna: optuna-dashboard is not installed; {INSTALL}")
    else:
        start("optuna", "/", ["dashboards.optuna_copies", "--runs", str(runs), "--port", f"{ports['optuna']}"])
    for note in notes:
        print_note(note)
    return remote, notes


def _streamlit(root: Path, runs: Path, port: int, url: Mapping[str, str]) -> list[str]:
    """Return the arguments of streamlit, then those that `dashboards.arguments` reads."""
    experiments = root / "experiments" / "claims"
    return [
        "streamlit", "run", str(root / "dashboards" / "app.py"),
        "--server.address", HOST, "--server.port", str(port), "--server.headless", "true",
        "--server.fileWatcherType", "none", "--browser.gatherUsageStats", "false", "--client.toolbarMode", "minimal",
        "--", "--runs", str(runs), "--mlflow", url["mlflow"], "--optuna", url["optuna"],
        *(["--experiments", str(experiments)] if experiments.is_dir() else []),
    ]  # fmt: skip


def _prepare_store(uri: str, runs: Path) -> str:
    """Create MLflow's SQLite file if it is missing, under the lock of a study; return the problem, or an empty text."""
    path = sqlite_file(uri)
    if path is None or path.exists():
        return ""
    try:
        connect(uri, runs)
    except store_errors() as error:
        return mask_secrets((str(error).strip().splitlines() or [type(error).__name__])[0][:300])
    return ""


def _wait(servers: Sequence[Server], signals: EndSignals) -> list[str]:
    """Wait until each server answers or has a problem; return notes about problems.

    Raises ServerError for a problem of the dashboard's own server.
    """
    deadline = time.monotonic() + START_LIMIT_SECONDS
    while not signals.received and time.monotonic() < deadline:
        for server in servers:
            server.poll()
        if all(server.ready or server.problem for server in servers) or servers[0].problem:
            break
        time.sleep(0.2)
    for server in servers:
        if not server.ready and not server.problem:
            server.problem = f"did not answer within {START_LIMIT_SECONDS:.0f} s{_last_line(server.log)}"
    if signals.received:
        return []
    if servers[0].problem:
        raise ServerError(f"the dashboard {servers[0].problem}")
    notes = [f"{server.name}: {server.problem}" for server in servers if server.problem]
    for note in notes:
        print_note(note)
    return notes


def _serve(servers: Sequence[Server], signals: EndSignals) -> None:
    """Serve until a signal, and print one note for each other server that ends.

    Raises ServerError when the dashboard's own server ends.
    """
    while not signals.received:
        time.sleep(0.3)
        for server in servers:
            running = not server.problem
            server.poll()
            if running and server.problem:
                print_note(f"{server.name}: {server.problem}")
        if servers[0].problem:
            raise ServerError(f"the dashboard {servers[0].problem}")


def _end(servers: Sequence[Server]) -> None:
    """End every server and every process that it started."""
    import psutil

    descendants: list[psutil.Process] = []
    for server in servers:
        with contextlib.suppress(psutil.NoSuchProcess):
            descendants += psutil.Process(server.process.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    for server in servers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()
    # processes that left their group
    for process in psutil.wait_procs(descendants, timeout=0)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _find_app() -> Path:
    """Return the directory that contains `dashboards/`: a checkout, or the data files of an installed wheel."""
    checkout = Path(autotune.__file__).parents[1]
    if (checkout / "pyproject.toml").is_file() and (checkout / "dashboards" / "app.py").is_file():
        return checkout
    for file in _installed_files():
        if file.parts[-2:] == ("dashboards", "app.py"):
            return file.parents[1]
    raise ConfigError(f"the app's files are not beside the package in {checkout}; install autotune again")


def _installed_files() -> Iterator[Path]:
    with contextlib.suppress(PackageNotFoundError):
        yield from (Path(str(file.locate())).resolve() for file in files(DISTRIBUTION) or ())


def _hold_port(reserved: contextlib.ExitStack, name: str, requested: int | None) -> int:
    """Return a free port: the requested one, or else the default of the server, or else any; `reserved` closes it.

    Raises ConfigError where the requested port is in use.
    """
    for number in (requested or PORTS[name], 0):
        listener = reserved.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port released just now is free
        try:
            listener.bind((HOST, number))
            listener.listen()
        except OSError:
            if requested:
                raise ConfigError(
                    f"--port {requested}: another process listens there; leave it out for a free one"
                ) from None
            continue
        return int(listener.getsockname()[1])
    raise ServerError(f"no free port on {HOST} for {name}")


def _answers(url: str) -> bool:
    # requests to this machine must not go through a proxy of the environment
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=2) as reply:
            return int(reply.status) == 200
    except (OSError, urllib.error.URLError):
        return False


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f": {last[:300]}" if last else ""


def _has_screen() -> bool:
    """Return whether a browser opens in a window, and not in the terminal."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
