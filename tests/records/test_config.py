import inspect
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import ConfigError
from autotune.records import yaml_file as yamlfile
from autotune.records.config import FRONT_BUDGET, Config, dump_config, load_config
from autotune.workloads.reference import WorkloadRef

CONFIGS = sorted(path for path in (Path(__file__).parents[2] / "configs").glob("*.yaml") if path.stem != "nightly")


@pytest.fixture
def refusal(tmp_path, monkeypatch):
    """The one line that a file of this text, under these options, is refused with."""
    monkeypatch.chdir(tmp_path)

    def refuse(text, **options):
        Path("my.yaml").write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_config("my.yaml", **options)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return refuse


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_of_the_project_names_a_workload_that_takes_its_arguments(path):
    from autotune.workloads.zoo import ZOO

    config = load_config(str(path))
    assert path.stem == config.workload
    inspect.signature(ZOO[config.workload]).bind(**config.arguments)
    assert path.read_text().startswith("# "), "the first line says what the config shows"


def test_resnet18_is_batch_10_of_224_in_65_percent_within_10_minutes():
    config = load_config(str(next(path for path in CONFIGS if path.stem == "resnet18")))
    assert config.ref == WorkloadRef("resnet18", {"batch": 10, "size": 224})
    assert config.parsed_budget.share == 0.65
    assert config.time_seconds < 600  # the last trial and the confirmation may run over


def test_a_bare_reference_is_a_config_of_defaults():
    assert load_config("models.py:make") == Config(workload="models.py:make")


def test_the_schema_lists_every_name_of_kernels_that_a_config_accepts():
    names = Config.model_json_schema()["properties"]["kernels"]["enum"]
    assert names == ["", "aten", "inductor", "any"]
    assert [load_config("resnet18", overrides={"kernels": name}).kernels for name in names] == [
        "",
        "",
        "inductor",
        "any",
    ]


@pytest.mark.parametrize(
    "other", [{"kernels": "inductor"}, {"kernels": "any"}, {"memory_format": "channels_last"}, {"threads": 2}]
)
def test_eagers_bits_and_what_rounds_differently_exclude_each_other(other):
    ((name, value),) = other.items()
    message = f"--exact: eager's bits need eager's own {name.replace('_', ' ')}, but {name} is {value}"
    with pytest.raises(ConfigError, match=message):
        load_config("resnet18", overrides={"exact": True, **other}, from_command_line=True)
    assert load_config("resnet18", overrides={"exact": True, "kernels": "aten"}).exact


def test_options_are_laid_over_the_file(tmp_path):
    (tmp_path / "a.yml").write_text(
        "workload: gpt2\narguments: {batch: 8, dropout: 0.1}\nstores: {ssd: /fast}\nseed: 4\n"
    )
    config = load_config(
        str(tmp_path / "a.yml"),
        overrides={"budget": "1GiB", "trials": None, "stores": {"ramdisk": "/dev/shm"}},
        arguments={"batch": "16", "rate": "1e-3", "deep": "true", "name": "a-1"},
    )
    assert config.arguments == {"batch": 16, "dropout": 0.1, "rate": 0.001, "deep": True, "name": "a-1"}
    assert config.stores == {"ssd": "/fast", "ramdisk": "/dev/shm"}
    assert config.parsed_budget.nbytes == 2**30
    assert (config.trials, config.seed) == (None, 4)


def test_a_config_without_a_budget_gets_that_of_the_objective_that_is_laid_over_it():
    assert load_config(Config(workload="a:b"), overrides={"objective": "pareto"}).budget == FRONT_BUDGET
    named = Config(workload="a:b", budget="65%")
    assert load_config(named, overrides={"objective": "pareto"}).budget == "65%"
    assert load_config(named) == named


VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
)


@given(
    st.dictionaries(st.text(min_size=1, max_size=6), VALUES | st.lists(VALUES, max_size=2), max_size=3), st.booleans()
)
def test_a_dumped_config_is_read_back_equal(tmp_path_factory, arguments, limited):
    config = Config(
        workload="a:b", arguments=arguments, limit="900MiB" if limited else None, stores={"ssd": "x"}, sampler="gp"
    )
    path = tmp_path_factory.mktemp("dump") / "config.yaml"
    path.write_text(dump_config(config))
    assert load_config(str(path)) == config


@pytest.mark.parametrize("text", ["1e-3", "1E5", "yes", "012", "1:30", "null", "2026-11-20", "65%", "*x", "a: b"])
def test_a_string_that_looks_like_something_else_stays_a_string(text):
    assert yamlfile.scalar(yamlfile.text({"key": text}).removeprefix("key: ").rstrip(), "key") == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "workload: gpt2\nplanners:\n  offload: [window]\n  ofload: [window]\n",
            "my.yaml:4: unknown key 'ofload' in planners; known: order, recompute, reorder, offload, update, inplace, "
            "allocator; did you mean 'offload'?",
        ),
        (
            "workload: a\nstores:\n  sdd: x",
            "my.yaml:3: unknown key 'sdd' in stores; known: ssd, ramdisk, host; did you mean 'ssd'?",
        ),
        ("budget: 65%", "my.yaml: no workload; write a zoo name, package.module:factory or path/file.py:factory"),
        ("workload: a\ntime:", "my.yaml:2: time: input should be a valid string (got None)"),
        ("workload: a\ntime: 90", "my.yaml:2: time: cannot read '90' as a time; write 90s, 10m or 1.5h"),
        (
            "workload: a\nbudget: 0.65",
            "my.yaml:2: budget: cannot read '0.65' as a budget; write 65%, 6GiB, 512MiB, 123456B or step:512MiB",
        ),
        (
            "workload: a\nlimit: 900",
            "my.yaml:2: limit: cannot read '900' as bytes; write 6GiB, 512MiB or 123456B",
        ),
        (
            "workload: a\nobjective: tim",
            "my.yaml:2: objective: input should be 'time', 'pareto', 'throughput' or 'batch' (got 'tim')",
        ),
        (
            "workload: a\nmicro_batches: yes",
            "my.yaml:2: micro_batches: input should be 'auto', 'never' or 'always' (got True)",
        ),
        ("workload: a\nseed: true", "my.yaml:2: seed: input should be a valid integer (got True)"),
        (
            "workload: a\nseed: 2147483648",
            "my.yaml:2: seed: input should be less than or equal to 2147483647 (got 2147483648)",
        ),
        ("workload: a\ntrials: 0", "my.yaml:2: trials: input should be greater than or equal to 1 (got 0)"),
        ("workload: a\nseed: 1\nworkload: b", "my.yaml:3: 'workload' is repeated; the first one is on line 1"),
        ("workload: [a\n", "my.yaml:2: not YAML: expected ',' or ']', but got '<stream end>'"),
        ("- a\n", "my.yaml: contains no mapping; write at least `workload: NAME`"),
        ("", "my.yaml: contains no mapping; write at least `workload: NAME`"),
    ],
)
def test_a_fault_is_told_with_its_line_and_the_next_move(refusal, text, words):
    assert refusal(text) == words


def test_a_misspelt_workload_is_called_misspelt_and_not_missing(refusal):
    assert refusal("seed: 1\nwrokload: a") == "my.yaml:2: unknown key 'wrokload'; did you mean 'workload'?"


def test_an_unknown_planner_is_named_with_the_known(refusal):
    words = refusal("workload: a\nplanners:\n  order: [tarced]")
    assert words.startswith("my.yaml:3: planners.order: no planner 'tarced'; known: traced, ")
    assert words.endswith("; did you mean 'traced'?")
    assert refusal("workload: a\nplanners: {order: []}").startswith("my.yaml:2: planners.order: no planner is left")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"overrides": {"budget": "x"}},
            "--budget: cannot read 'x' as a budget; write 65%, 6GiB, 512MiB, 123456B or step:512MiB",
        ),
        (
            {"overrides": {"stores": {"ramdik": "/y"}}},
            "--store: unknown key 'ramdik' in stores; known: ssd, ramdisk, host; did you mean 'ramdisk'?",
        ),
        ({"arguments": {"x": "a: b"}}, "--set x: 'a: b' is a mapping; write it into a YAML file"),
        ({"arguments": {"x": "*.py"}}, "--set x: cannot read '*.py' as a YAML value; put it in double quotes"),
    ],
)
def test_a_fault_of_an_option_is_told_by_the_option_and_not_by_a_line(refusal, options, words):
    assert refusal("workload: a\nbudget: 65%\nstores: {ssd: x}", from_command_line=True, **options) == words


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"budget": "x"}, "budget: cannot read 'x' as a budget; write 65%, 6GiB, 512MiB, 123456B or step:512MiB"),
        ({"planners": {"order": []}}, "planners: planners.order: no planner is left"),
    ],
)
def test_a_fault_of_an_argument_is_told_by_the_argument_and_not_by_an_option(refusal, overrides, words):
    assert refusal("workload: a\nbudget: 65%", overrides=overrides).startswith(words)


def test_a_missing_file_gets_the_nearest_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("resnet18.yaml").write_text("workload: resnet18")
    with pytest.raises(ConfigError) as caught:
        load_config("resnet81.yaml")
    assert str(caught.value) == ("resnet81.yaml: no such file; known: resnet18.yaml; did you mean 'resnet18.yaml'?")


@pytest.mark.parametrize(
    ("options", "budget"),
    [
        ({}, "65%"),
        ({"objective": "time"}, "65%"),
        ({"objective": "pareto"}, "110%"),
        ({"objective": "pareto", "budget": "6GiB"}, "6GiB"),
        ({"objective": "pareto", "budget": "65%"}, "65%"),
    ],
)
def test_a_front_without_a_budget_of_its_own_ends_at_eager(options: dict[str, str], budget: str):
    config = load_config("resnet18", overrides=options)
    assert config.budget == budget
    assert load_config(config, overrides={"time": "1h"}).budget == budget
