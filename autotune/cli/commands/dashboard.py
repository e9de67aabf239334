"""`autotune dashboard`: the app of `dashboards/` on this machine alone, MLflow's pages and optuna-dashboard beside it."""

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
from autotune.cli.commands.session import answering, print_json, say
from autotune.errors import AutotuneError, ConfigError
from autotune.report.mlflow_store import ENVIRONMENT, connect, faults, tracking_uri

HOST = "127.0.0.1"
PORTS = {"dashboard": 8501, "mlflow": 5000, "optuna": 8080}
"""Where each is looked for first."""
PATIENCE_SECONDS = 120.0
"""For a server to answer: MLflow begins in 12 to 40 s on a busy machine."""
GRACE_SECONDS = 5.0
"""For a server to end by itself."""
PIP = "pip install 'autotune[dashboard]', in a checkout pip install -e '.[dashboard]'"


class ServerError(AutotuneError):
    """The dashboard's own server cannot start, or has ended."""


@dataclass
class Server:
    """One child with all that it starts."""

    name: str
    url: str
    health: str
    """Path that answers once it serves."""
    process: "subprocess.Popen[bytes]"
    log: Path
    answered: bool = False
    problem: str = ""
    """Why it does not serve, in one line."""

    def look(self) -> None:
        """Note that it answers, or that it has ended."""
        if self.process.poll() is not None:
            self.answered, self.problem = False, f"ended with {self.process.returncode}{_last_line(self.log)}"
        elif not self.answered and not self.problem:
            self.answered = _answers(self.url + self.health)


@dataclass
class Signals:
    """Which signal asked for the end; nothing is raised, so that no child is left between two lines."""

    received: int = 0
    _before: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> "Signals":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.received = number


def run(runs: Path | None, port: int | None, *, browser: bool, json: bool) -> None:
    """Start all three, print where they answer, and serve until Ctrl-C or SIGTERM; no child is left then."""
    if importlib.util.find_spec("streamlit") is None:
        raise ConfigError(f"the dashboard needs streamlit, which is not installed: {PIP}")
    if runs is not None and not runs.is_dir():
        raise ConfigError(f"--runs {runs}: no such directory; name the one that autotune tune writes to")
    # as typed: pages name directories as whoever reads them would
    root, place = _app(), runs or Path("runs")
    with Signals() as signals, tempfile.TemporaryDirectory(prefix="autotune-") as logs, answering() as out:
        servers: list[Server] = []
        try:
            remote, notes = _start(servers, root, place, port, Path(logs))
            notes += _wait(servers, signals)
            if signals.received:
                return
            told = dict.fromkeys(PORTS) | remote | {one.name: one.url for one in servers if one.answered}
            if json:
                print_json(told | {"notes": notes}, out)
            else:
                out.writelines(f"{name:<10} {url or 'not running'}\n" for name, url in told.items())
            out.flush()
            say("Ctrl-C ends all of them")
            if browser and _has_screen():
                webbrowser.open(servers[0].url)
            _serve(servers, signals)
        finally:
            _end(servers)


def _start(
    servers: list[Server], root: Path, runs: Path, port: int | None, logs: Path
) -> tuple[dict[str, str], list[str]]:
    """Begin each, into `servers` as soon as it is, the dashboard first: (addresses of those that run elsewhere, why any is missing)."""
    ports = {name: _port(name, port if name == "dashboard" else None) for name in PORTS}
    url = {name: f"http://{HOST}:{at}" for name, at in ports.items()}
    uri = tracking_uri(runs)
    remote = {"mlflow": uri.rstrip("/")} if uri.startswith("http") else {}
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    environment = {**ENVIRONMENT, **os.environ, "PYTHONPATH": path}

    def begin(name: str, health: str, arguments: Sequence[str], more: Mapping[str, str] | None = None) -> None:
        log = logs / f"{name}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", *arguments],  # -P: a user's folder that is called like a package is none
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**environment, **(more or {})},
                start_new_session=True,
            )
        servers.append(Server(name, url[name], health, process, log))

    begin("dashboard", "/_stcore/health", _streamlit(root, runs, ports["dashboard"], url | remote))
    notes = []
    if not remote and (fault := _no_store(uri, runs)):
        notes.append(f"mlflow: {fault}")
    elif not remote:
        # its job queue would be eight processes more, for nothing that is asked here
        more = {"MLFLOW_BACKEND_STORE_URI": uri, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        begin(
            "mlflow",
            "/health",
            ["mlflow", "server", "--host", HOST, "--port", f"{ports['mlflow']}", "--workers", "1"],
            more,
        )
    if importlib.util.find_spec("optuna_dashboard") is None:
        notes.append(f"optuna: optuna-dashboard is not installed: {PIP}")
    else:
        begin("optuna", "/", ["dashboards.optuna_copies", "--runs", str(runs), "--port", f"{ports['optuna']}"])
    for note in notes:
        say(note)
    return remote, notes


def _streamlit(root: Path, runs: Path, port: int, url: Mapping[str, str]) -> list[str]:
    """Its own options, then the app's, which `dashboards.asked` reads."""
    experiments = root / "experiments"
    return [
        "streamlit", "run", str(root / "dashboards" / "app.py"),
        "--server.address", HOST, "--server.port", str(port), "--server.headless", "true",
        "--server.fileWatcherType", "none", "--browser.gatherUsageStats", "false", "--client.toolbarMode", "minimal",
        "--", "--runs", str(runs), "--mlflow", url["mlflow"], "--optuna", url["optuna"],
        *(["--experiments", str(experiments)] if experiments.is_dir() else []),
    ]  # fmt: skip


def _no_store(uri: str, runs: Path) -> str:
    """Why MLflow has nothing to show; its file is begun here, under the lock that a study takes, where there is none."""
    path = Path(uri.removeprefix("sqlite:///"))
    if not uri.startswith("sqlite:///") or path.exists():
        return ""
    try:
        connect(uri, runs)
    except faults() as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
    return ""


def _wait(servers: Sequence[Server], signals: Signals) -> list[str]:
    """Until each answers or cannot; lines about those that do not. ServerError where the dashboard itself is one."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not signals.received and time.monotonic() < deadline:
        for one in servers:
            one.look()
        if all(one.answered or one.problem for one in servers) or servers[0].problem:
            break
        time.sleep(0.2)
    for one in servers:
        if not one.answered and not one.problem:
            one.problem = f"did not answer within {PATIENCE_SECONDS:.0f} s{_last_line(one.log)}"
    if signals.received:
        return []
    if servers[0].problem:
        raise ServerError(f"the dashboard {servers[0].problem}")
    notes = [f"{one.name}: {one.problem}" for one in servers if one.problem]
    for note in notes:
        say(note)
    return notes


def _serve(servers: Sequence[Server], signals: Signals) -> None:
    """Until a signal; one that ends beside the dashboard is told once."""
    while not signals.received:
        time.sleep(0.3)
        for one in servers:
            running = not one.problem
            one.look()
            if running and one.problem:
                say(f"{one.name}: {one.problem}")
        if servers[0].problem:
            raise ServerError(f"the dashboard {servers[0].problem}")


def _end(servers: Sequence[Server]) -> None:
    """Every child and all that they started."""
    import psutil

    left: list[psutil.Process] = []
    for one in servers:
        with contextlib.suppress(psutil.NoSuchProcess):
            left += psutil.Process(one.process.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.process.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    for one in servers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.process.wait(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.process.pid, signal.SIGKILL)
        one.process.wait()
    # whoever left the group
    for process in psutil.wait_procs(left, timeout=0)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _app() -> Path:
    """The directory that holds `dashboards/`: a checkout, or where an installed wheel put its files."""
    checkout = Path(autotune.__file__).parents[1]
    if (checkout / "pyproject.toml").is_file() and (checkout / "dashboards" / "app.py").is_file():
        return checkout
    for file in _installed():
        if file.parts[-2:] == ("dashboards", "app.py"):
            return file.parents[1]
    raise ConfigError(f"the app's files are not beside the package in {checkout}; install autotune again")


def _installed() -> Iterator[Path]:
    with contextlib.suppress(PackageNotFoundError):
        yield from (Path(str(file.locate())).resolve() for file in files("autotune") or ())


def _port(name: str, asked: int | None) -> int:
    """A free one: the one asked for, else the usual one, else any."""
    for at in (asked or PORTS[name], 0):
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that was just left is free
            try:
                tried.bind((HOST, at))
            except OSError:
                if asked:
                    raise ConfigError(
                        f"--port {asked}: another process listens there; leave it out for a free one"
                    ) from None
                continue
            return int(tried.getsockname()[1])
    raise ServerError(f"no free port on {HOST} for {name}")


def _answers(url: str) -> bool:
    # a proxy of the environment is not asked for this machine
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=2) as reply:
            return int(reply.status) == 200
    except (OSError, urllib.error.URLError):
        return False


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f": {last[:300]}" if last else ""


def _has_screen() -> bool:
    """Whether a browser would open in a window, and not take over the terminal."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
