"""`autotune dashboard`: what it starts, where it answers, and that nothing of it is left."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import autotune
from autotune.cli import main as cli
from autotune.cli.commands import dashboard
from tests.support.checkout import ROOT, environment

SERVES = """
import http.server, sys
class Yes(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
at = sys.argv.index("--server.port" if "--server.port" in sys.argv else "--port")
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[at + 1])), Yes).serve_forever()
"""
HEEDS = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
"""
"""In the background of a shell, or under nohup, tests are to ignore these, and pass that on."""
OF_FAKES = """
from pathlib import Path
from autotune.cli.commands import dashboard
dashboard._find_app = lambda: Path("fakes").resolve()
"""
ANY_PORTS = "dashboard.PORTS = dict.fromkeys(dashboard.PORTS, 0)\n"
"""The usual ports may be in use by another test."""
HANGS = "import time\ntime.sleep(600)\n"
ENDS = "raise SystemExit('the database is of another version')\n"
STUBBORN = (
    """
import signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "600"], start_new_session=True)
"""
    + SERVES
)

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def fakes(tmp_path: Path) -> Path:
    """Where modules lie that stand in for Streamlit, MLflow and optuna-dashboard; all serve at once."""
    (tmp_path / "fakes" / "dashboards").mkdir(parents=True)
    (tmp_path / "fakes" / "dashboards" / "__init__.py").touch()
    for name in ("streamlit", "mlflow", "dashboards/optuna_copies"):
        (tmp_path / "fakes" / f"{name}.py").write_text(SERVES)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mlflow.db").touch()
    return tmp_path / "fakes"


@pytest.fixture
def start(tmp_path: Path, fakes: Path) -> Iterator[Start]:
    """Begin the command in a process of its own; whatever is left of it ends with the test."""
    begun: list[subprocess.Popen[str]] = []

    def call(
        *arguments: str, code: str = "import autotune.cli.main; autotune.cli.main.main()", ports: str = ANY_PORTS
    ) -> "subprocess.Popen[str]":
        path = os.pathsep.join((str(fakes), environment()["PYTHONPATH"]))
        process = subprocess.Popen(
            [sys.executable, "-c", HEEDS + OF_FAKES + ports + code, "dashboard", "--no-open", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment() | {"PYTHONPATH": path},
        )  # fmt: skip
        begun.append(process)
        return process

    yield call
    for process in begun:
        left: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            left = children(process)
        process.terminate()  # it waits for its servers, which takes less time than to wait for orphans
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=30)
        process.kill()
        for child in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(left, timeout=30)  # the next test finds their ports free
        process.communicate()


def told(process: "subprocess.Popen[str]") -> Any:
    """The document that it prints once all answer."""
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def children(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def ended(process: "subprocess.Popen[str]", number: int, before: list[psutil.Process]) -> str:
    """Send the signal; its last words, once it has ended well and none of those processes is left."""
    process.send_signal(number)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 0, error
    assert [one for one in before if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []
    return error


def answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as reply:
        return int(reply.status) == 200


@contextlib.contextmanager
def busy(port: int) -> Iterator[int]:
    """A port that somebody listens on; any for 0. The usual one may be somebody's already."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            taken.bind(("127.0.0.1", port))
            taken.listen()
        yield int(taken.getsockname()[1]) or port


# -- with servers that stand in ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])  # SIGTERM ends others below
def test_all_three_answer_and_a_signal_ends_them_all(number: int, start: Start) -> None:
    process = start("--json")
    found = told(process)
    assert set(found) == {"dashboard", "mlflow", "optuna", "notes"}
    assert found["notes"] == []
    assert all(answers(found[name]) for name in ("dashboard", "mlflow", "optuna"))
    before = children(process)
    assert len(before) >= 3
    listening = [
        one.laddr.ip for child in before for one in child.net_connections() if one.status == psutil.CONN_LISTEN
    ]
    assert set(listening) == {"127.0.0.1"}
    assert "Ctrl-C ends all servers" in ended(process, number, before)


def test_without_json_there_is_a_line_for_each(start: Start) -> None:
    process = start()
    assert process.stdout is not None
    lines = [process.stdout.readline().split() for _ in range(3)]
    assert [line[0] for line in lines] == ["dashboard", "mlflow", "optuna"]
    assert all(line[1].startswith("http://127.0.0.1:") for line in lines)


def test_a_usual_port_that_is_taken_is_left_to_whoever_has_it(start: Start) -> None:
    with contextlib.ExitStack() as stack:
        for port in dashboard.PORTS.values():
            stack.enter_context(busy(port))
        found = told(start("--json", ports=""))
        assert all(not found[name].endswith(f":{port}") for name, port in dashboard.PORTS.items())
        assert all(answers(found[name]) for name in dashboard.PORTS)


def test_the_port_that_was_asked_for_is_the_dashboard_s(start: Start) -> None:
    with busy(0) as port:
        pass
    assert told(start("--json", "--port", str(port)))["dashboard"] == f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("name", ["mlflow", "optuna"])
def test_a_requested_port_that_is_the_usual_one_of_another_server_is_the_dashboard_s_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with busy(0) as port:
        pass
    monkeypatch.setitem(dashboard.PORTS, name, port)
    monkeypatch.setattr("autotune.cli.commands.dashboard.subprocess.Popen", lambda *_, **__: None)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "mlflow.db").touch()
    servers: list[dashboard.Server] = []
    dashboard._start(servers, ROOT, tmp_path, port, tmp_path)
    urls = [server.url for server in servers]
    assert urls[0] == f"http://127.0.0.1:{port}"
    assert len(set(urls)) == len(urls) == 3


def test_a_server_beside_that_ends_is_told_with_its_last_line_and_the_others_go_on(start: Start, fakes: Path) -> None:
    (fakes / "mlflow.py").write_text(ENDS)
    process = start("--json")
    found = told(process)
    assert found["mlflow"] is None
    assert found["notes"] == ["mlflow: ended with 1: the database is of another version"]
    assert answers(found["dashboard"])
    assert "another version" in ended(process, signal.SIGTERM, children(process))


def test_a_dashboard_that_cannot_start_is_one_error_and_leaves_no_child(start: Start, fakes: Path) -> None:
    (fakes / "streamlit.py").write_text(ENDS)
    process = start()
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert error.splitlines()[-1] == "error: the dashboard ended with 1: the database is of another version"


def test_a_signal_before_anything_answers_ends_all(start: Start, fakes: Path) -> None:
    (fakes / "streamlit.py").write_text(HANGS)
    process = start("--json")
    deadline = time.monotonic() + 60
    while len(before := children(process)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(before) >= 3
    assert ended(process, signal.SIGINT, before) == ""


def test_a_child_that_does_not_listen_is_killed_with_what_it_started(start: Start, fakes: Path) -> None:
    (fakes / "streamlit.py").write_text(STUBBORN)
    impatient = """
import autotune.cli.main
from autotune.cli.commands import dashboard
dashboard.GRACE_SECONDS = 0.2
autotune.cli.main.main()
"""
    process = start("--json", code=impatient)
    told(process)
    before = children(process)
    assert any(child.name() == "sleep" for child in before)
    ended(process, signal.SIGTERM, before)


def test_without_optuna_dashboard_the_rest_runs_and_the_pip_line_is_told(start: Start) -> None:
    hidden = """
import importlib.util, autotune.cli.main
find = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == "optuna_dashboard" else find(name)
autotune.cli.main.main()
"""
    found = told(start("--json", code=hidden))
    assert found["optuna"] is None
    assert "pip install 'autotune-training[dashboard]'" in found["notes"][0]
    assert answers(found["dashboard"])


def test_a_tracking_server_of_the_user_s_is_linked_and_none_is_started(start: Start, monkeypatch) -> None:
    code = "import os; os.environ['MLFLOW_TRACKING_URI'] = 'https://tracking.example/'; import autotune.cli.main; autotune.cli.main.main()"
    process = start("--json", code=code)
    assert told(process)["mlflow"] == "https://tracking.example"
    commands = [" ".join(child.cmdline()) for child in children(process)]
    assert not any("-m mlflow" in command for command in commands)
    assert any("--mlflow https://tracking.example " in command for command in commands)


# -- what is refused -----------------------------------------------------------------------------------------------


def refused(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["dashboard", "--no-open", *arguments])
    return int(ended.value.code or 0)


def test_without_streamlit_one_line_says_what_to_install(monkeypatch, capfd) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert refused() == 2
    out, error = capfd.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    assert "pip install 'autotune-training[dashboard]'" in error


def test_a_directory_that_is_not_there_and_a_port_that_is_taken_are_named(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    assert refused("--runs", str(tmp_path / "none")) == 2
    assert "none: no such directory" in capfd.readouterr().err
    with busy(0) as port:
        assert refused("--runs", str(tmp_path), "--port", str(port)) == 2
    assert f"--port {port}: another process listens there" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


# -- where the app lies --------------------------------------------------------------------------------------------


def test_a_checkout_s_app_is_its_own_and_an_installed_one_s_is_where_the_metadata_say(
    tmp_path: Path, monkeypatch
) -> None:
    assert dashboard._find_app() == ROOT
    app = tmp_path / "share" / "autotune" / "dashboards" / "app.py"
    app.parent.mkdir(parents=True)
    app.touch()
    monkeypatch.setattr(autotune, "__file__", str(tmp_path / "site-packages" / "autotune" / "__init__.py"))
    monkeypatch.setattr(dashboard, "_installed_files", lambda: [tmp_path / "x.py", app])
    assert dashboard._find_app() == app.parents[1]
    monkeypatch.setattr(dashboard, "_installed_files", list)
    assert refused() == 2


def test_a_wheel_brings_every_file_of_the_app() -> None:
    globs = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    brought = {path for some in globs.values() for glob in some for path in ROOT.glob(glob)}
    files = {path for path in (ROOT / "dashboards").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert brought == files
    assert all(place == f"share/autotune/{Path(glob).parent}" for place, some in globs.items() for glob in some)


# -- the real ones -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_streamlit_mlflow_and_optuna_dashboard_serve_on_this_machine_alone_and_end(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "autotune", "dashboard", "--runs", str(tmp_path), "--no-open", "--json"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment()
    )  # fmt: skip
    try:
        found = told(process)
        assert found["notes"] == []
        assert answers(found["dashboard"] + "/_stcore/health")
        assert answers(found["mlflow"] + "/health")
        assert answers(found["optuna"] + "/api/studies")
        before = children(process)
        listening = [
            one.laddr.ip for child in before for one in child.net_connections() if one.status == psutil.CONN_LISTEN
        ]
        assert set(listening) == {"127.0.0.1"}
        ended(process, signal.SIGTERM, before)
        assert {path.name for path in tmp_path.iterdir()} <= {"mlflow.db", "mlflow.lock"}
    finally:
        process.kill()
        process.communicate()
