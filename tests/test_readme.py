"""A walk through the README as someone new takes it: its words name what there is, and its blocks do what they say."""

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune import errors
from autotune.cli import main as cli
from autotune.planners import KINDS
from autotune.records import plan_file as planfile
from autotune.records.config import Config
from autotune.report import charts
from autotune.workloads.zoo import ZOO
from tests.eager import eager_step, tensors, worst_difference
from tests.small import batch_of, make, normalized
from tests.test_apply import IMAGES, plan_file

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DISK = "/path/on/a/disk"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def shell_commands() -> list[list[str]]:
    """Each in words; what `make` is asked for as it runs it in the end."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    found = []
    for line in lines:
        words = shlex.split(line, comments=True)
        for whether, command in itertools.groupby(words, lambda word: word != "&&"):
            if whether:
                found.append(made(list(command)))
    return found


def made(words: list[str]) -> list[str]:
    if words[0] != "make":
        return words
    ask = ["make", "-n", "-o", ".venv/zoo.stamp", *words[1:]]
    told = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=True)
    return shlex.split(told.stdout.splitlines()[-1].lstrip("@"))


def told_commands() -> Iterator[tuple[list[list[str]], set[str]]]:
    """Of every row of the table the commands that it is about, and the options that it names."""
    table = README.partition("| command | what it does |\n|---|---|\n")[2].partition("\n\n")[0]
    for row in table.splitlines():
        about, _ = row.strip("| ").split(" | ", 1)
        spans = [span.split() for span in re.findall(r"`([^`]+)`", about)]
        commands = [[word for word in span if re.fullmatch("[a-z]+", word)] for span in spans]
        options = {
            word for code in re.findall(r"`([^`]+)`", row) for word in code.split() if re.fullmatch("--?[a-z-]+", word)
        }
        yield [words for words in commands if words], options


@pytest.fixture
def answer(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a command prints when all goes well."""

    def run(*arguments: str) -> str:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert not ended.value.code, capfd.readouterr().err
        return capfd.readouterr().out

    return run


def test_every_file_that_is_named_is_there():
    named = {name.rstrip(".") for name in re.findall(r"\b(?:configs|experiments|docs|autotune|tests)/[\w./-]+", README)}
    named = {name for name in named if "NAME" not in name}
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_command_of_the_table_answers_with_the_options_that_are_named(answer: Callable[..., str]):
    rows = list(told_commands())
    assert len(rows) > 8
    for commands, options in rows:
        helped = " ".join(answer(*words, "--help") for words in commands)
        known = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", helped))
        assert options <= known, f"{commands}: {options - known}"


def test_the_table_leaves_no_command_out(answer: Callable[..., str]):
    listed = re.findall(r"^  ([a-z]+)  ", answer("--help").partition("Commands:")[2], re.MULTILINE)
    assert len(listed) > 8
    assert set(listed) == {words[0] for commands, _ in told_commands() for words in commands}


def test_shell_blocks_ask_for_what_they_say(monkeypatch: pytest.MonkeyPatch, answer: Callable[..., str]):
    asked: list[Config] = []
    monkeypatch.setattr("autotune.cli.commands.tune.run", lambda config, **_: asked.append(config))
    monkeypatch.chdir(ROOT)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for path, *words in shell_commands():
        program = path.removeprefix(".venv/bin/")
        if program == "pip":
            assert words[:2] == ["install", "-e"]
            assert set(words[2].strip(".[]").split(",")) <= set(extras)
            continue
        assert program == "autotune", path
        if words[0] != "tune":  # some run on until they are stopped
            words = [words[0], "--help"]  # noqa: PLW2901
        answer(*words)
    assert [(config.workload, config.budget) for config in asked] == [
        ("resnet18", "65%"), ("gpt2", "60%"), ("my/file.py:factory", "6GiB"),
    ]  # fmt: skip
    assert asked[1].stores == {"ssd": DISK}
    assert asked[2].arguments == {"batch": 8}


def test_the_python_block_trains_as_plain_eager_does_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (code,) = blocks("python")
    monkeypatch.chdir(tmp_path)
    mine, other = make(normalized, IMAGES), make(normalized, IMAGES)
    planfile.write(tmp_path / "plans" / "my_model.json", plan_file(mine))
    names: dict[str, Any] = {
        "model": mine.model, "loss_fn": mine.loss_fn, "optimizer": mine.optimizer, "batch": mine.batch,
    }  # fmt: skip
    losses = []

    def loader() -> Iterator[Any]:
        for seed in range(5):
            yield batch_of(*IMAGES, seed=seed)
            losses.append(names["loss"])

    names["loader"] = loader()
    exec(compile(code.replace(DISK, str(tmp_path)), "README.md", "exec"), names)
    assert len(losses) == 5
    for seed, loss in enumerate(losses):
        other.batch = batch_of(*IMAGES, seed=seed)
        assert torch.equal(loss, eager_step(other)[0])
    assert worst_difference(tensors(mine), tensors(other)) == 0.0
    assert all(parameter.grad is None for parameter in mine.model.parameters())
    names["step"].close()


def test_planners_workloads_and_exit_codes_are_all_named():
    told = " ".join(README.partition("Planners, by kind;")[2].partition(". With the extra")[0].split())
    kinds = {kind: set(re.findall(r"\w+", names)) for kind, names in re.findall(r"(\w+) ((?:`\w+` ?)+)", told)}
    assert kinds == {kind: set(planners) for kind, planners in KINDS.items()}
    ready = README.partition("Ready workloads: ")[2].partition(", with ")[0]
    assert re.split(r",\s+", ready) == list(ZOO)
    codes = README.partition("Exit codes: ")[2].partition("\n\n")[0]
    named = {int(code) for code in re.findall(r"\b\d+\b", codes)}
    raised = {
        one.exit_code
        for one in vars(errors).values()
        if isinstance(one, type) and issubclass(one, errors.AutotuneError)
    }
    assert raised | {0, 130} <= named


def test_the_picture_shows_two_plans_by_role_under_the_budget():
    picture = ROOT / "docs" / "memory.svg"
    words = {"".join(text.itertext()) for text in ET.parse(picture).iter("{http://www.w3.org/2000/svg}text")}
    assert {"parameters", "optimizer state", "gradients", "activations", "workspaces", "as traced", "MiB"} <= words
    assert any(word.startswith("as traced: ") for word in words)
    assert any(word.startswith("plan ") for word in words)
    assert any(word.startswith("budget, ") for word in words)
    assert charts.BLUE.lower() in picture.read_text().lower()
    assert picture.stat().st_size < 60_000


FACTORY = """
import torch
import autotune

def factory(batch=2048):
    torch.manual_seed(0)
    layers = [part for _ in range(8) for part in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return autotune.Workload(model, loss, optimizer, torch.randn(batch, 256))

def loss(model, batch):
    return model(batch).square().mean()
"""

WALK = """
import sys
sys.path.insert(0, "my")
import torch
from file import factory

mine, eager = factory(), factory()
model, loss_fn, optimizer, batch = mine.model, mine.loss_fn, mine.optimizer, mine.batch
drawn = [torch.randn(batch.shape, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
losses = []

def loop():
    for batch in drawn:
        yield batch
        losses.append(loss)

loader = loop()
{readme}
assert len(losses) == 5
for batch, loss in zip(drawn, losses):
    plain = eager.loss_fn(eager.model, batch)
    plain.backward()
    eager.optimizer.step()
    eager.optimizer.zero_grad()
    assert torch.equal(plain.detach(), loss), (plain, loss)
print("equal to the bit")
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files of this checkout, and a `.venv` that is this interpreter: installing torch again takes minutes."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("needs a git checkout")
    place = tmp_path / "autotune"
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    binaries = place / ".venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "python").write_text(f'#!/bin/sh\nPYTHONPATH="{place}" exec "{sys.executable}" "$@"\n')
    (binaries / "autotune").write_text(f'#!/bin/sh\nexec "{binaries}/python" -m autotune "$@"\n')
    for script in binaries.iterdir():
        script.chmod(0o755)
    for stamp in ("torch", "zoo"):
        (place / ".venv" / f"{stamp}.stamp").touch()
    return place


@pytest.mark.slow
def test_someone_new_tunes_looks_at_the_picture_and_trains_with_the_plan(clone: Path):
    (clone / "my").mkdir()
    (clone / "my" / "file.py").write_text(FACTORY)
    (clone / "configs" / "mine.yaml").write_text("workload: my/file.py:factory\nbudget: 65%\ntime: 10s\ntrials: 3\n")
    alone = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MLFLOW_TRACKING_URI")}
    alone["OMP_WAIT_POLICY"] = "PASSIVE"  # beside other tests threads that spin take the cores from each other

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=clone, env=alone, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = run("make", "tune", "CONFIG=configs/mine.yaml", "ARGS=--name my_model")
    found = dict(line.split(maxsplit=1) for line in said.splitlines() if line.startswith(("plan   ", "report ")))
    assert found["plan"] == "plans/my_model.json"
    page = (clone / found["report"]).read_text()
    assert page.startswith("<!doctype html>")
    assert page.count("<svg ") >= 2
    assert "BEST" in said

    (own,) = (words for words in shell_commands() if "my/file.py:factory" in words)
    assert "predicted" in run(f".venv/bin/{own[0]}", *own[1:], "--dry-run")
    (code,) = blocks("python")
    (clone / "walk.py").write_text(WALK.format(readme=textwrap.dedent(code).replace(DISK, str(clone))))
    assert run(".venv/bin/python", "walk.py").endswith("equal to the bit\n")
