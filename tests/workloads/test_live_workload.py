"""A live workload that is saved is the same step in another process, and its file is private."""

import functools
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autotune.capture.tracer import capture
from autotune.errors import ConfigError
from autotune.runtime.gpu.event_timing import describe_kernels
from autotune.workloads import live_workload
from autotune.workloads.factory import load_workload
from autotune.workloads.live_workload import load_live_workload, save_workload
from autotune.workloads.reference import lies_here
from autotune.workloads.workload import Workload


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


class Tied(nn.Module):
    """A model with a tied weight, a frozen one, and a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def workload() -> Workload:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters())
    loss_fn(model, torch.ones(2, 4)).backward()
    optimizer.step()
    return Workload(model, loss_fn, optimizer, torch.ones(2, 4))


def test_a_copy_has_every_bit_the_optimizer_the_ties_and_the_graph(tmp_path: Path):
    step, path = workload(), tmp_path / "Tied.live"
    save_workload(step, path)
    copy = load_workload(str(path))
    assert all(torch.equal(a, b) for a, b in zip(step.model.parameters(), copy.model.parameters(), strict=True))
    assert [p.requires_grad for p in copy.model.parameters()] == [p.requires_grad for p in step.model.parameters()]
    assert copy.model.first.weight is copy.model.second.weight
    assert copy.optimizer is not None
    assert copy.optimizer.param_groups[0]["params"][0] is copy.model.first.weight
    assert copy.optimizer.state[copy.model.first.weight]["step"] == 1
    assert capture(copy).graph.digest == capture(step).graph.digest


SCRIPT = """
import sys, torch
from pathlib import Path
from autotune.capture.tracer import capture
from autotune.workloads.live_workload import save_workload
from autotune.workloads.workload import Workload
SCALE = 2.5
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Conv2d(3, 4, 3)
    def forward(self, x):
        return self.layer(x) * SCALE
def make(weight):
    def loss_fn(model, batch):
        return (model(batch) * weight).square().mean()
    return loss_fn
if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    model = Net().to(memory_format=torch.channels_last).eval()
    model.layer.register_forward_hook(lambda module, inputs, output: output / SCALE)
    step = Workload(model, make(torch.ones(4, 1, 1)), None, torch.ones(2, 3, 8, 8))
    save_workload(step, Path(sys.argv[1]))
    print(capture(step).graph.digest)
"""


def test_functions_of_a_script_closures_and_hooks_are_the_same_graph_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    script, path = tmp_path / "train.py", tmp_path / "Net.live"
    script.write_text(SCRIPT)
    digest = subprocess.run([sys.executable, script, path], capture_output=True, text=True, check=True).stdout.strip()
    monkeypatch.setattr(sys, "path", [*sys.path])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        step = load_workload(str(path))
        loaded = capture(step).graph.digest, torch.get_default_dtype(), torch.get_num_threads()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)
    assert loaded == (digest, torch.float64, 1)


def test_switches_of_kernels_and_precision_go_with_the_workload(tmp_path: Path):
    path, cudnn, products = tmp_path / "Tied.live", torch.backends.cudnn, torch.backends.cuda.matmul
    before = live_workload._read_precision()
    try:
        cudnn.benchmark = True
        products.fp32_precision = "tf32"  # from here on PyTorch's older functions for it raise an error
        cudnn.conv.fp32_precision = "ieee"
        torch.backends.cuda.enable_cudnn_sdp(False)
        save_workload(workload(), path)
        cudnn.benchmark, products.fp32_precision, cudnn.conv.fp32_precision = False, "ieee", "tf32"
        torch.backends.cuda.enable_cudnn_sdp(True)
        load_live_workload(path)
        assert (cudnn.benchmark, products.fp32_precision, cudnn.conv.fp32_precision) == (True, "tf32", "ieee")
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert "products tf32" in describe_kernels()
    finally:
        cudnn.benchmark = False
        torch.backends.cuda.enable_cudnn_sdp(True)
        for place, precision in zip(live_workload._PRECISIONS, before[1], strict=True):
            torch._C._set_fp32_precision_setter(*place, precision)
        torch.set_float32_matmul_precision(before[0])


def test_the_file_is_private_and_a_file_that_others_may_write_is_refused(tmp_path: Path):
    path = tmp_path / "Tied.live"
    save_workload(workload(), path)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o620)
    with pytest.raises(ConfigError, match="written by another user"):
        load_live_workload(path)


def test_a_removed_file_names_the_next_step(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"existed while a training process tuned.*autotune tune file.py:factory"):
        load_workload(str(tmp_path / "Net.live"))


def test_a_saved_workload_is_never_run_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert not lies_here("Net.live")


def test_a_truncated_file_is_refused(tmp_path: Path):
    path = tmp_path / "Tied.live"
    save_workload(workload(), path)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_live_workload(path)


class Locked:
    """An object that cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def of_attribute() -> Workload:
    step = workload()
    step.model.first.log = {"file": Locked()}
    return step


def of_closure() -> Workload:
    lock = threading.Lock()

    def locked(model: nn.Module, batch: Any) -> torch.Tensor:
        with lock:
            return loss_fn(model, batch)

    return Workload(Tied(), functools.partial(locked), None, torch.ones(2, 4))


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (of_attribute, r"model\.first\.log\['file'\]\.lock"),
        (of_closure, r"loss_fn\.func: variable lock"),
        (lambda: Workload(Tied(), loss_fn, None, [torch.ones(2, 4), Locked()]), r"batch\[1\]\.lock"),
    ],
)
def test_what_cannot_be_pickled_is_named_with_the_next_step(make: Any, place: str, tmp_path: Path):
    path = tmp_path / "Tied.live"
    with pytest.raises(ConfigError, match=rf"^{place} cannot be sent .*write a factory"):
        save_workload(make(), path)
    assert not path.exists()


def test_saving_changes_nothing(tmp_path: Path):
    step = workload()
    before, state = [p.detach().clone() for p in step.model.parameters()], torch.get_rng_state()
    gradients = [p.grad for p in step.model.parameters()]
    save_workload(step, tmp_path / "Tied.live")
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))
    assert all(p.grad is gradient for p, gradient in zip(step.model.parameters(), gradients, strict=True))


def test_a_damaged_pickle_is_no_crash(tmp_path: Path):
    path = tmp_path / "Net.live"
    path.write_bytes(pickle.dumps(1))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_live_workload(path)
