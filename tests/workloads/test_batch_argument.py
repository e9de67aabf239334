"""The argument that sets the batch size: found by its usual names, or refused with the factory's name and what to do."""

from pathlib import Path

import pytest

from autotune.errors import ConfigError
from autotune.workloads.batch_argument import USUAL_NAMES, BatchArgument, find_batch_argument
from autotune.workloads.zoo import ZOO


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sized.py").write_text(
        "def usual(bs=3, batch_size=5): ...\n"
        "def rows(rows=7, width=2): ...\n"
        "def needed(batch): ...\n"
        "def text(batch='all'): ...\n"
        "def nothing(): ...\n"
    )


@pytest.mark.parametrize("name", ZOO)
def test_every_zoo_workload_has_one(name: str):
    assert find_batch_argument(name, {"batch": 3}) == BatchArgument("batch", 3)
    assert find_batch_argument(name, {}).size >= 1


@pytest.mark.usefixtures("factories")
def test_the_first_usual_name_counts_and_the_config_s_value_comes_before_the_default():
    assert find_batch_argument("sized.py:usual", {}) == BatchArgument("batch_size", 5)
    assert find_batch_argument("sized.py:usual", {"batch_size": 9}).size == 9
    assert find_batch_argument("sized.py:usual", {}, "bs") == BatchArgument("bs", 3)
    assert find_batch_argument("sized.py:rows", {}, "rows") == BatchArgument("rows", 7)


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    ("reference", "arguments", "name", "words"),
    [
        ("sized.py:rows", {}, None, "sized.py:rows: no argument of the factory sets the batch size .* it takes rows, width.*--batch-argument NAME"),
        ("sized.py:nothing", {}, None, "it takes none"),
        ("sized.py:rows", {}, "row", "takes no batch argument 'row'.*did you mean 'rows'"),
        ("sized.py:needed", {}, None, "batch has no default, not a batch size; give it with --set batch=8"),
        ("sized.py:text", {}, None, "batch is 'all', not a batch size"),
        ("sized.py:usual", {"batch_size": 0}, None, "batch_size is 0"),
        ("sized.py:usual", {"batch_size": True}, None, "batch_size is True"),
        ("step.live", {}, None, "step.live: the batch of a running training process cannot be changed; write a factory"),
    ],
)  # fmt: skip
def test_a_factory_without_a_usable_one_is_refused(reference: str, arguments: dict[str, object], name: str, words: str):
    with pytest.raises(ConfigError, match=words) as error:
        find_batch_argument(reference, arguments, name)
    assert "\n" not in str(error.value)


def test_the_usual_names_are_the_documented_ones():
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "batch-size.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in guide for name in USUAL_NAMES)


@pytest.mark.usefixtures("factories")
def test_a_file_that_changes_the_working_directory_moves_no_path_of_this_process():
    Path("moving.py").write_text("import os\nos.chdir('/')\ndef make(batch=3): ...\n", encoding="utf-8")
    place = Path.cwd()
    assert find_batch_argument("moving.py:make", {}).size == 3
    assert Path.cwd() == place
