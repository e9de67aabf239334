"""`autotune reproduce`: experiments run as processes, their claims told, and what held before watched."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

import autotune
from autotune.cli import main as cli
from autotune.cli.commands import reproduce
from autotune.report.claims import RESULT, Claim, Figure, write
from autotune.report.claims import find_experiments as experiments_of

HELD = Claim("a net: peak", "a paper", "simulated", "GB", Figure(10.0), Figure(10.0), headline=True)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkout with one experiment, which held when it last ran and says so again."""
    made = tmp_path / "experiments" / "net"
    write(made, [HELD])
    kept = (made / RESULT).read_text()
    (made / "__main__.py").write_text(
        f"from pathlib import Path\nprint('busy')\nPath({str(made / RESULT)!r}).write_text({kept!r})\n"
    )
    (tmp_path / "experiments" / "benchmark").mkdir()
    return made


def called(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["reproduce", *arguments])
    return int(ended.value.code or 0)


def test_an_experiment_is_run_and_its_claims_are_the_answer_alone(folder: Path, capfd):
    (folder / RESULT).write_text((folder / RESULT).read_text().replace("a net: peak", "another text"))
    assert called("net", "--experiments", str(folder.parent), "--json") == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["net"][0]["text"] == "a net: peak"
    assert json.loads(out)["net"][0]["verdict"] == "reproduced"
    assert "busy" in err


def test_a_list_runs_nothing(folder: Path, capfd):
    (folder / "__main__.py").write_text("raise SystemExit(9)")
    assert called("--list", "--experiments", str(folder.parent)) == 0
    out, _ = capfd.readouterr()
    assert [line.split()[0] for line in out.splitlines() if line] == ["experiment", "net", "Sources", "net:", "1"]
    counts = (
        "1 claim: 1 reproduced, 0 ratios reproduced, 0 bound kept, 0 not decided, 0 not reproduced, 0 not comparable"
    )
    assert out.splitlines()[-1] == counts


def test_a_claim_that_held_before_and_does_no_longer_is_an_error_that_names_it(folder: Path, capfd):
    lost = folder.parent.parent / "lost"
    write(lost, [replace(HELD, ours=Figure(20.0))])
    (folder / "__main__.py").write_text(
        f"import shutil\nshutil.copy({str(lost / RESULT)!r}, {str(folder / RESULT)!r})\n"
    )
    assert called("--all", "--experiments", str(folder.parent)) == 8
    out, err = capfd.readouterr()
    assert "not reproduced" in out
    assert err.splitlines()[-1] == "error: reproduced before and not any more: net: a net: peak"
    assert called("--all", "--experiments", str(folder.parent)) == 0  # it did not hold before


def test_a_run_that_fails_is_an_error_with_its_exit_code(folder: Path, capfd):
    (folder / "__main__.py").write_text("raise SystemExit(9)")
    assert called("net", "--experiments", str(folder.parent)) == 8
    assert "net ended with 9" in capfd.readouterr().err


def test_an_experiment_that_fails_keeps_no_other_from_its_turn_nor_from_the_table(folder: Path, capfd):
    broken = folder.parent / "broken"
    write(broken, [HELD])
    (broken / "__main__.py").write_text("raise SystemExit(9)")
    unread = folder.parent / "damaged"
    write(unread, [HELD])
    (unread / "__main__.py").write_text(f"open({str(unread / RESULT)!r}, 'w').write('[]')\n")
    assert called("--all", "--experiments", str(folder.parent)) == 8
    out, err = capfd.readouterr()
    assert [line.split()[0] for line in out.splitlines() if line] == ["experiment", "net", "Sources", "net:", "1"]
    last = err.splitlines()[-1]
    assert "broken ended with 9" in last
    assert "damaged" in last
    assert "is no list of claims" in last


def test_a_damaged_result_file_stops_no_other_experiment_and_running_its_own_repairs_it(folder: Path, capfd):
    damaged = folder.parent / "damaged"
    write(damaged, [HELD])
    kept = (damaged / RESULT).read_text()
    (damaged / "__main__.py").write_text(f"open({str(damaged / RESULT)!r}, 'w').write({kept!r})\n")
    (damaged / RESULT).write_text("[]")
    assert called("net", "--experiments", str(folder.parent)) == 0
    assert called("--list", "--experiments", str(folder.parent)) == 8
    out, err = capfd.readouterr()
    assert "net" in out
    assert "run damaged again: autotune reproduce damaged" in err.splitlines()[-1]
    assert called("damaged", "--experiments", str(folder.parent)) == 0
    assert called("--list", "--experiments", str(folder.parent)) == 0


def test_what_is_simulated_runs_beside_the_rest_and_what_is_measured_afterwards_and_alone(folder: Path, capfd):
    times = folder.parent.parent / "times.txt"
    both = [HELD, replace(HELD, text="a net: seconds", kind="measured")]
    for name, claims in {"net": [HELD], "both": both, "timed": both[1:]}.items():
        made = folder.parent / name
        write(made, claims)
        (made / "__main__.py").write_text(
            "import os, sys, time\n"
            "begun = time.monotonic_ns()\n"
            "time.sleep(0.2)\n"
            f"os.utime({str(made / RESULT)!r})\n"
            f"with open({str(times)!r}, 'a') as file:\n"
            f"    print({name!r} + ' '.join(['', *sys.argv[1:]]), begun, time.monotonic_ns(), sep=',', file=file)\n"
        )
    assert called("--all", "--experiments", str(folder.parent)) == 0
    ran = {
        name: (int(begun), int(ended))
        for name, begun, ended in (line.split(",") for line in times.read_text().splitlines())
    }
    assert set(ran) == {"net", "both --parts simulated", "both --parts measured", "timed"}
    simulated = [ran.pop("net"), ran.pop("both --parts simulated")]
    first, second = sorted(ran.values())
    assert max(ended for _, ended in simulated) <= first[0]
    assert first[1] <= second[0]
    out, err = capfd.readouterr()
    assert [line.split()[0] for line in out.partition("Sources")[0].splitlines() if line] == [
        "experiment",
        "both",
        "both",
        "net",
        "timed",
    ]
    assert [line.partition(":")[0] for line in err.splitlines() if ": took" in line][2:] == [
        "both --parts measured",
        "timed",
    ]


def test_what_ends_one_experiment_beside_others_is_not_lost_and_those_that_wait_are_not_begun(
    folder: Path, monkeypatch
):
    monkeypatch.setattr(reproduce.os, "cpu_count", lambda: 1)
    ran: list[str] = []

    def ends(folder: Path, *arguments: str) -> None:
        del arguments
        ran.append(folder.name)
        if len(ran) == 1:
            raise KeyboardInterrupt
        time.sleep(0.2)

    monkeypatch.setattr(reproduce, "_run_experiment", ends)
    names = ("one", "two", "three", "four")
    with pytest.raises(KeyboardInterrupt):
        reproduce._run_all(dict.fromkeys(names, folder), dict.fromkeys(names, (HELD,)))
    assert len(ran) <= 2


def test_a_run_that_writes_nothing_does_not_pass_for_its_last_result(folder: Path, capfd):
    (folder / "__main__.py").write_text("")
    assert called("net", "--experiments", str(folder.parent)) == 8
    assert "of an earlier run" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name experiments, or one of --all and --list"),
        (("net", "--all"), "name experiments, or one of"),
        (("nett",), "known: net; did you mean 'net'?"),
        (("benchmark",), "no experiment of claims"),
    ],
)
def test_what_cannot_be_run_is_refused_with_what_can(arguments: tuple[str, ...], said: str, folder: Path, capfd):
    assert called(*arguments, "--experiments", str(folder.parent)) == 2
    assert said in capfd.readouterr().err


def test_an_installed_package_says_that_it_needs_a_checkout(tmp_path: Path, monkeypatch, capfd):
    monkeypatch.setattr(autotune, "__file__", str(tmp_path / "site-packages" / "autotune" / "__init__.py"))
    assert called("--list") == 2
    assert "run from a checkout" in capfd.readouterr().err
    assert called("--list", "--experiments", str(tmp_path / "none")) == 2
    assert "no such folder" in capfd.readouterr().err


def test_every_experiment_of_claims_has_its_page_its_picture_and_its_command():
    for name, folder in experiments_of(ROOT / "experiments" / "claims").items():
        assert list((folder / "results").glob("*.png")) + list((folder / "results").glob("*.svg")), name
        assert f"python -m experiments.claims.{name}" in (folder / "README.md").read_text()


def test_only_what_held_can_fall():
    texts = [HELD, replace(HELD, text="other", ours=Figure(5.0))]
    worse = [replace(claim, ours=Figure(1.0)) for claim in texts]
    assert list(reproduce._lost_claims(texts, worse)) == ["a net: peak"]
