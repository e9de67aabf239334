"""Files and arguments that are wrong, damaged or hostile: exit code 2 with one line, one JSON document, no command to a terminal."""

import errno
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.cli import main as cli
from autotune.cli import output
from autotune.errors import ConfigError
from autotune.records import yaml_file
from autotune.records.plan_file import write as write_plan
from autotune.workloads.reference import WorkloadRef
from tests.system.test_cli import plan_file

ROOT = Path(__file__).parents[2]
Run = Callable[..., tuple[int, str, str]]

BOMB = "workload: resnet18\narguments:\n  a0: &a0 [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"  a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)
CONFIGS = {
    "a control character": "workload: resnet18\nx: \x01\n",
    "a list as key": "? [a, b]\n: 1\n",
    "a mapping as key": "workload: resnet18\n? {a: 1}\n: 1\n",
    "no date": "workload: resnet18\na: 2020-13-45\n",
    "no number": "workload: !!int abc\n",
    "an alias of itself": "workload: resnet18\na: &a [*a]\n",
    "a root that holds itself": "&a {workload: resnet18, a: *a}\n",
    "nested lists": "workload: resnet18\na: " + "[" * 5000 + "]" * 5000 + "\n",
    "a bomb of aliases": BOMB,
    "an object": "workload: !!python/object:os.system {}\n",
    "no Unicode": b"workload: \xff\xfe\n",
}


@pytest.mark.parametrize("text", CONFIGS.values(), ids=CONFIGS)
def test_a_config_that_is_no_plain_data_is_one_line_that_names_it(text: str | bytes, here: Path, run: Run) -> None:
    (here / "x.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    code, out, err = run("tune", "x.yaml", "--dry-run", "--json")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("error: x.yaml")
    assert json.loads(out)["error"]["message"] == err.removeprefix("error: ").strip()
    run_dir = here / "runs" / "a"
    run_dir.mkdir(parents=True)
    (here / "x.yaml").rename(run_dir / "config.yaml")
    code, _, err = run("report", str(run_dir))
    assert (code, err.count("\n")) == (2, 1)


@pytest.mark.parametrize("text", ["x=2020-13-45", "x=!!int abc", "x=\x01", "x=&a [*a]", "x=" + "[" * 5000])
def test_an_argument_that_is_no_yaml_value_is_one_line(text: str, run: Run) -> None:
    code, _, err = run("tune", "resnet18", "--dry-run", "--set", text)
    assert (code, err.count("\n")) == (2, 1)
    assert "--set x: cannot read" in err


def test_aliases_are_read_where_they_expand_to_little(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("a: &a [1, 2]\nb: [*a, *a]\n", encoding="utf-8")
    assert yaml_file.read(tmp_path / "x.yaml").data["b"] == [[1, 2], [1, 2]]


@pytest.mark.parametrize(
    "data", [b"[" * 200_000, b'{"schema": 1' + b"0" * 6000 + b"}", b"\xff\xfe", b"null", b"[]"],
    ids=["nested", "digits", "bytes", "null", "list"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["plan", "trials", "graph"])
def test_a_damaged_json_file_is_one_line_that_names_it(name: str, data: bytes, here: Path, run: Run) -> None:
    run_dir = here / "runs" / "a"
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text("workload: resnet18\n", encoding="utf-8")
    file = {"plan": "plan.json", "trials": "trials.jsonl", "graph": "graph.json"}[name]
    (run_dir / file).write_bytes(data + b"\n")
    code, _, err = run(*(("show", str(run_dir / file)) if name == "plan" else ("report", str(run_dir))))
    assert (code, err.count("\n")) == (2, 1)
    assert file in err


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES, errno.ENOTDIR, errno.ENAMETOOLONG])
def test_a_file_system_that_takes_no_file_is_the_users_to_fix(
    number: int, here: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number), "runs/a/report.html")

    monkeypatch.setattr("autotune.cli.commands.report.write_report", fail)
    code, out, err = run("report", "runs/a", "--json")
    assert code == 2
    assert re.fullmatch(rf"error: runs/a/report.html: {os.strerror(number)}; .+\n", err)
    assert json.loads(out)["error"]["class"] == type(OSError(number, "")).__name__


def test_runs_below_a_file_and_a_run_name_of_300_characters_are_refused(here: Path, run: Run) -> None:
    (here / "x.yaml").write_text("workload: resnet18\nruns: x.yaml/runs\n", encoding="utf-8")
    code, _, err = run("tune", "x.yaml")
    assert (code, err.count("\n")) == (2, 1)
    assert "x.yaml/runs" in err
    code, _, err = run("tune", "resnet18", "--name", "n" * 300)
    assert code == 2
    assert "300 bytes; give at most 200" in err


@pytest.mark.parametrize(
    ("rows", "arguments", "reason"),
    [
        ("1,0,2,8\n", ("-o", "/nonexistent/x.csv"), "cannot write the layout"),
        ("1,0,2,12345678901234567890123\n", (), "must be at most"),
        ("".join(f"{n},0,2,{2**62}\n" for n in range(3)), (), "together"),
        ("1,0,2,8\n", ("--capacity", "9" * 5000), "as bytes"),
        ("1,0," + "9" * 5000 + ",8\n", (), "upper"),
    ],
)
def test_a_layout_of_impossible_numbers_or_without_a_place_is_refused(
    rows: str, arguments: tuple[str, ...], reason: str, here: Path, run: Run
) -> None:  # fmt: skip
    (here / "x.csv").write_text("id,lower,upper,size\n" + rows, encoding="utf-8")
    code, _, err = run("layout", "x.csv", *arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert reason in err


def test_a_closed_standard_output_is_named(here: Path) -> None:
    write_plan(here / "plan.json", plan_file())
    command = f"exec {sys.executable} -m autotune show plan.json >&-"
    done = subprocess.run(["sh", "-c", command], cwd=here, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: standard output is closed; redirect it to a file or to /dev/null\n"


def test_a_name_beyond_ascii_is_read_in_the_c_locale(here: Path) -> None:
    write_plan(here / "plan.json", plan_file(workload=WorkloadRef("modèle/日本.py:f")))
    text = json.dumps(json.loads((here / "plan.json").read_text(encoding="utf-8")), ensure_ascii=False)
    (here / "plan.json").write_text(text, encoding="utf-8")
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "autotune", "show", "plan.json"]
    done = subprocess.run(command, cwd=here, capture_output=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "modèle/日本.py:f" in done.stdout.decode()


def test_an_answer_names_a_path_that_is_not_utf_8(here: Path, run: Run) -> None:
    (here / "x.csv").write_text("id,lower,upper,size\n1,0,2,8\n", encoding="utf-8")
    code, out, err = run("layout", "x.csv", "-o", "caf\udce9.csv")
    assert code == 0, err
    assert "offsets    caf" in out
    assert (here / "caf\udce9.csv").exists()


def test_every_text_file_of_the_project_is_read_and_written_as_utf_8() -> None:
    calls = re.compile(r"\.(?:read_text\(\)|write_text\((?![^\n]*encoding)[^\n]*\)$)", re.MULTILINE)
    sources = [path for folder in ("autotune", "experiments", "dashboards") for path in (ROOT / folder).rglob("*.py")]
    assert not [(path, found) for path in sources for found in calls.findall(path.read_text(encoding="utf-8"))]


# -- one document on failure ---------------------------------------------------------------------------------------

FAILURES = [
    (("tune", "no.yaml"), "ConfigError"),
    (("resume", "nothing"), "ConfigError"),
    (("replay", "nothing"), "ConfigError"),
    (("plan", "no.yaml"), "ConfigError"),
    (("measure", "no.json"), "ConfigError"),
    (("nightly", "no.yaml"), "ConfigError"),
    (("report", "nothing"), "ConfigError"),
    (("layout", "no.csv"), "ConfigError"),
    (("show", "no.json"), "ConfigError"),
    (("reproduce",), "ConfigError"),
    (("dashboard", "--port", "0"), "UsageError"),
    (("device", "diff", "no.json", "no.json"), "ConfigError"),
    (("device", "probe", "--store", "ssd=nowhere"), "StoreError"),
    (("doctor", "--store", "ssd"), "ConfigError"),
    (("tune", "resnet18", "--bugdet", "1"), "UsageError"),
]


@pytest.mark.parametrize(
    ("arguments", "kind"), FAILURES, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_every_command_prints_its_error_as_one_document(
    arguments: tuple[str, ...], kind: str, here: Path, run: Run
) -> None:
    code, out, err = run(*arguments, "--json")
    error = json.loads(out)["error"]
    assert (code, error["exit_code"], error["class"]) == (2, 2, kind)
    assert err == f"error: {error['message']}\n"
    assert error["next_step"]


def test_a_command_that_fails_after_its_answer_prints_one_document(here: Path, run: Run) -> None:
    (here / "x.csv").write_text("id,lower,upper,size\n1,0,2,8\n", encoding="utf-8")
    code, out, _ = run("layout", "x.csv", "--capacity", "4", "--json")
    assert code == 4
    assert json.loads(out)["layout_bytes"] == 8


def test_an_internal_error_is_a_document_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise KeyError("val")

    monkeypatch.setattr("autotune.cli.commands.show.run", fail)
    code, out, _ = run("show", "x.json", "--json")
    assert (code, json.loads(out)["error"]["class"]) == (1, "KeyError")


class _UnreadStream(io.StringIO):
    """Standard error whose reader is gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_the_document_of_an_error_is_printed_where_nobody_reads_standard_error(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", _UnreadStream())
    code, out, _ = run("show", "no.json", "--json")
    assert (code, json.loads(out)["error"]["class"]) == (2, "ConfigError")


# -- terminals -----------------------------------------------------------------------------------------------------


def test_escapes_of_a_plan_do_not_reach_the_terminal(here: Path, run: Run) -> None:
    write_plan(here / "plan.json", plan_file(workload=WorkloadRef("\x1b]0;pwn\x07\x1b[31mred\x9b2J\u202egnp")))
    code, out, _ = run("show", "plan.json")
    assert code == 0
    assert not set(out) & {"\x1b", "\x07", "\x9b", "\u202e"}
    assert "\\x1b]0;pwn\\x07\\x1b[31mred\\x9b2J\\u202egnp" in out


def test_escapes_of_an_error_and_of_a_note_do_not_reach_the_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    def fail(*arguments: object, **options: object) -> None:
        output.print_note("note \x1b[2J")
        raise ConfigError("f.py:f: raised ValueError: \x1b[2J\x07")

    monkeypatch.setattr("autotune.cli.commands.show.run", fail)
    _, _, err = run("show", "x.json")
    assert err == "note \\x1b[2J\nerror: f.py:f: raised ValueError: \\x1b[2J\\x07\n"


def test_the_entry_point_survives_a_closed_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with pytest.raises(SystemExit) as exit:
        cli.main(["show", "no.json"])
    assert exit.value.code == 2
