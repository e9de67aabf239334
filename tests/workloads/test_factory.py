import subprocess
import sys
import textwrap

import pytest
import torch

from autotune.errors import ConfigError
from autotune.runtime.train_step import TrainStep
from autotune.workloads.factory import load_workload
from autotune.workloads.reference import ZOO_NAMES
from autotune.workloads.workload import Workload, check_workload
from autotune.workloads.zoo import ZOO

GOOD = """
    import torch
    import autotune
    from torch.nn import Linear

    def loss_fn(model, batch):
        return model(batch).sum()

    def make(batch: int = 2, *, rate: float = 0.1, kind: str = "linear", bias: bool | None = None):
        model = torch.nn.Linear(3, 1)
        return autotune.Workload(model, loss_fn, torch.optim.SGD(model.parameters(), lr=rate), torch.ones(batch, 3))
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A working directory of one's own, with a function that writes a file into it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))

    write("good.py", GOOD)
    yield write
    for name in [name for name, module in sys.modules.items() if str(tmp_path) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]


def refusal(reference, **arguments):
    with pytest.raises(ConfigError) as caught:
        load_workload(reference, arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_file_beside_the_caller_is_a_workload(home):
    workload = load_workload("good.py:make", {"batch": 5, "rate": 1})
    assert workload.batch.shape == (5, 3)
    assert workload.optimizer.defaults["lr"] == 1


def test_a_module_of_the_working_directory_is_a_workload(home):
    home("mine/models.py", GOOD)
    assert load_workload("mine.models:make").batch.shape == (2, 3)


def test_a_file_imports_its_neighbours_as_it_would_when_run(home):
    home("deep/neighbour.py", GOOD)
    home("deep/model.py", "from neighbour import make")
    assert load_workload("deep/model.py:make").batch.shape == (2, 3)


def test_a_file_named_like_a_package_does_not_shadow_it(home):
    home("torch.py", GOOD)
    assert load_workload("torch.py:make").batch.shape == (2, 3)
    assert sys.modules["torch"] is torch


SCALED = """
    import torch
    import autotune

    SCALE = 1.0

    def scale():
        return SCALE

    def loss_fn(model, batch):
        return scale() * model(batch).sum()

    def make():
        model = torch.nn.Linear(3, 1)
        return autotune.Workload(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.0), torch.ones(2, 3))
"""


def test_steps_of_two_files_of_one_name_read_each_their_own_globals(home):
    home("a/train.py", SCALED)
    home("b/train.py", SCALED)
    first, second = (load_workload(f"{folder}/train.py:make") for folder in "ab")
    step = TrainStep(first.model, first.loss_fn, first.optimizer, first.batch)
    eager = float(step(first.batch))
    second.loss_fn.__globals__["SCALE"] = 7.0
    assert float(step(first.batch)) == eager
    first.loss_fn.__globals__["SCALE"] = 2.0
    assert float(step(first.batch)) == 2 * eager


def test_a_file_that_is_loaded_again_leaves_one_module(home):
    for _ in range(2):
        load_workload("good.py:make")
    assert len([name for name in sys.modules if name.startswith("autotune_workload_good")]) == 1


def test_a_zoo_name_is_a_workload():
    assert load_workload("lstm", {"tokens": 2, "width": 8, "vocabulary": 8}).batch[0].shape == (32, 2)


def test_the_names_that_are_known_without_an_import_are_those_of_the_zoo():
    assert tuple(ZOO) == ZOO_NAMES


def test_a_misspelt_zoo_name_gets_the_nearest():
    words = refusal("restnet50")
    assert words.startswith("restnet50: no zoo workload; known: resnet18, ")
    assert words.endswith("did you mean 'resnet50'?")


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("good.py", "good.py: names no factory; write good.py:FUNCTION"),
        ("good.make", "good.make: no zoo workload; for a factory of your own write good:make"),
        (
            "good.py:",
            "good.py:: not a reference; write a zoo name, package.module:factory or path/file.py:factory",
        ),
        ("good.py:amke", "good.py:amke: good.py has no 'amke'; known: loss_fn, make; did you mean 'make'?"),
        ("good.py:__name__", "good.py:__name__: a str; name a function that returns autotune.Workload"),
        (
            "no.such:make",
            "no.such:make: no module 'no' here or installed; install it, or write path/file.py:factory",
        ),
        (
            "torch.such:make",
            "torch.such:make: no module 'torch.such' here or installed; install it, or write path/file.py:factory",
        ),
    ],
)
def test_what_is_not_there_is_named_with_the_next_move(home, reference, words):
    assert refusal(reference) == words


def test_a_missing_file_is_named_with_the_directory_that_was_searched(home, tmp_path):
    assert refusal("bad/model.py:make") == (
        f"bad/model.py:make: no such file in {tmp_path}; give the path of the file that holds the factory"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"bacth": 8}, "takes no argument 'bacth'; known: batch, rate, kind, bias; did you mean 'batch'?"),
        ({"batch": "eight"}, "batch must be int (got 'eight')"),
        ({"batch": True}, "batch must be int (got True)"),
        ({"rate": "fast"}, "rate must be float (got 'fast')"),
        ({"bias": 1}, "bias must be bool | None (got 1)"),
    ],
)
def test_arguments_are_refused_by_name(home, arguments, words):
    assert refusal("good.py:make", **arguments) == f"good.py:make: {words}"


def test_a_zoo_argument_of_no_known_option_is_refused_by_name():
    assert refusal("gpt2", dtype="int8").startswith("gpt2: dtype must be float32 or bfloat16 or ")
    assert refusal("gpt2", batch=0) == "gpt2: batch must be at least 1 (got 0)"
    assert refusal("resnet18", dropout=0.1).startswith("resnet18: takes no argument 'dropout'; known: batch, size")


def test_an_argument_without_default_is_asked_for(home):
    home("needy.py", "def make(path, *, batch): ...")
    assert refusal("needy.py:make", batch=2) == "needy.py:make: needs path; give it with --set path=VALUE"


def test_a_factory_that_raises_is_told_by_the_users_own_line(home):
    home(
        "broken.py",
        """
        import torch

        def pick(data):
            return torch.stack(data)

        def make():
            return pick([])
        """,
    )
    with pytest.raises(ConfigError) as caught:
        load_workload("broken.py:make")
    assert str(caught.value) == (
        "broken.py:make: raised RuntimeError: stack expects a non-empty TensorList "
        "at broken.py:5 (return torch.stack(data)); -v shows the traceback"
    )
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_file_that_fails_on_import_is_told_by_its_line(home):
    home("failing.py", "import sys\nsys.exit(3)")
    assert refusal("failing.py:make") == (
        "failing.py:make: raised SystemExit: 3 at failing.py:2 (sys.exit(3)); "
        'move the code of the script itself below: if __name__ == "__main__"'
    )
    assert not [name for name in sys.modules if "failing" in name]


def test_a_missing_import_of_the_file_itself_is_not_taken_for_a_missing_module(home):
    home("lacking.py", "import nosuchthing")
    for reference in ("lacking.py:make", "lacking:make"):
        assert refusal(reference) == (
            f"{reference}: raised ModuleNotFoundError: No module named 'nosuchthing' "
            "at lacking.py:1 (import nosuchthing); -v shows the traceback"
        )


def test_a_syntax_error_is_told_by_its_line(home):
    home("wrong.py", "\n\ndef make(:\n")
    assert "raised SyntaxError: " in refusal("wrong.py:make")
    assert " at wrong.py:3; " in refusal("wrong.py:make")


def test_an_error_with_no_line_of_the_users_is_told_without_one():
    assert refusal("torch:zeros") == (
        'torch:zeros: raised TypeError: zeros() missing 1 required positional arguments: "size"; -v shows the traceback'
    )


def test_running_out_of_memory_is_no_fault_of_the_config(home):
    home("greedy.py", "def make():\n    raise MemoryError")
    with pytest.raises(MemoryError):
        load_workload("greedy.py:make")


def test_a_bare_model_is_refused_with_what_to_return():
    assert refusal("torch.nn:Linear", in_features=2, out_features=2) == (
        "torch.nn:Linear returned a bare model (Linear) without batch and loss; "
        "return autotune.Workload(model, loss_fn, optimizer, batch)"
    )


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, "w returned None; return autotune.Workload(model, loss_fn, optimizer, batch)"),
        ((1, "a"), "w returned a tuple (int, str); return autotune.Workload(model, loss_fn, optimizer, batch)"),
        (Workload(torch.relu, batch=1), "w: model is builtin_function_or_method, not a torch.nn.Module"),
        (Workload(torch.nn.ReLU()), "w: batch is None; give the tensors of one step"),
    ],
)
def test_what_is_no_workload_is_named(result, words):
    with pytest.raises(ConfigError) as caught:
        check_workload(result, "w")
    assert str(caught.value) == words


def test_an_optimizer_needs_a_loss_and_a_loss_needs_no_optimizer():
    model, batch = torch.nn.Linear(2, 2), torch.ones(2)
    check_workload(Workload(model, lambda model, batch: model(batch).sum(), None, batch), "w")
    check_workload(Workload(model, batch=batch), "w")
    check_workload(Workload(model, lambda model, batch: model(batch).sum(), sgd(model), batch), "w")
    with pytest.raises(ConfigError, match=r"^w: optimizer without loss_fn; give both to train, neither for inference$"):
        check_workload(Workload(model, None, sgd(model), batch), "w")


def test_an_optimizer_of_another_model_is_refused():
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"^w: 2 of the optimizer's 2 parameters are not the model's; make it from "):
        check_workload(Workload(model, torch.sum, sgd(other), torch.ones(2)), "w")


def test_an_optimizer_of_some_of_the_parameters_is_the_users_choice():
    model = torch.nn.Linear(2, 2)
    check_workload(Workload(model, torch.sum, torch.optim.SGD([model.bias], lr=0.1), torch.ones(2)), "w")


def test_neither_the_package_nor_a_config_imports_torch():
    code = "import sys, autotune, autotune.records.config; dir(autotune); autotune.__version__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_package_offers_its_public_names_and_names_them_when_another_is_asked_for():
    import autotune

    assert autotune.Workload is Workload
    assert dir(autotune) == sorted(autotune.__all__)
    assert {"TrainStep", "Workload", "__version__"} < set(autotune.__all__)
    with pytest.raises(
        AttributeError, match=r"no attribute 'Worklaod'; it has .*TrainStep, WorkerError, Workload, __version__"
    ):
        autotune.Worklaod  # noqa: B018
