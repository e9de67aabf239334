import hashlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autotune.errors import ConfigError
from autotune.workloads.workload import Workload, check_workload
from autotune.workloads.zoo import ZOO
from tests.workloads.zoo.tiny import TINY

ROOT = Path(__file__).parents[3]
DROPPING = [name for name in ZOO if "dropout" in inspect.signature(ZOO[name]).parameters]


def make(name: str, **arguments: object) -> Workload:
    return ZOO[name](**{**TINY[name], **arguments})


def loss(workload: Workload) -> torch.Tensor:
    assert workload.loss_fn is not None
    return workload.loss_fn(workload.model, workload.batch)


def digest(workload: Workload) -> str:
    parts = [*workload.model.state_dict().values(), *workload.batch]
    return hashlib.sha256(b"".join(part.contiguous().numpy().tobytes() for part in parts)).hexdigest()


def parameters(workload: Workload) -> int:
    return sum(parameter.numel() for parameter in workload.model.parameters())


def test_every_workload_has_a_tiny_one():
    assert TINY.keys() == ZOO.keys()


@pytest.mark.parametrize("name", ZOO)
def test_one_step_moves_every_parameter_that_has_a_gradient(name):
    workload = make(name)
    check_workload(workload, name)
    before = {key: parameter.detach().clone() for key, parameter in workload.model.named_parameters()}
    value = loss(workload)
    value.backward()
    workload.optimizer.step()
    assert torch.isfinite(value)
    after = dict(workload.model.named_parameters())
    assert [key for key, parameter in after.items() if parameter.grad is None] == []
    still = [key for key, parameter in after.items() if torch.equal(parameter, before[key])]
    assert all(not after[key].grad.any() for key in still)
    assert len(still) <= len(after) // 10


@pytest.mark.parametrize("name", ZOO)
def test_a_seed_is_the_same_bits_and_another_seed_is_not(name):
    assert digest(make(name)) == digest(make(name)) != digest(make(name, seed=1))


@pytest.mark.parametrize("name", ZOO)
def test_the_callers_draws_go_on_as_if_nothing_was_drawn(name):
    torch.manual_seed(7)
    undisturbed = torch.rand(4)
    torch.manual_seed(7)
    make(name)
    assert torch.equal(torch.rand(4), undisturbed)


@pytest.mark.parametrize("name", ZOO)
def test_bfloat16_is_the_parameters_and_the_loss_stays_float32(name):
    workload = make(name, dtype="bfloat16")
    assert {parameter.dtype for parameter in workload.model.parameters()} == {torch.bfloat16}
    assert all(part.dtype == torch.bfloat16 for part in workload.batch if part.is_floating_point())
    value = loss(workload)
    value.backward()
    assert value.dtype == torch.float32
    assert torch.isfinite(value)


@pytest.mark.parametrize("name", DROPPING)
def test_dropout_draws_anew_in_every_step_and_only_when_asked(name):
    with torch.random.fork_rng(devices=[]):
        dropping, keeping = make(name, dropout=0.2), make(name)
        assert loss(dropping) != loss(dropping)
        assert loss(keeping) == loss(keeping)


@pytest.mark.parametrize("name", ZOO)
def test_the_optimizer_can_be_chosen(name):
    assert type(make(name, optimizer="sgd").optimizer) is torch.optim.SGD
    assert type(make(name, optimizer="adamw").optimizer) is torch.optim.AdamW
    assert make(name, optimizer="sgd").optimizer.defaults["momentum"] == 0.9


@pytest.mark.parametrize(
    ("name", "count"),
    [("resnet18", 11_689_512), ("resnet50", 25_557_032), ("mobilenet_v2", 3_504_872), ("segformer", 3_719_027)],
)
def test_published_models_have_their_published_parameters(name, count):
    assert parameters(ZOO[name](batch=1, size=32)) == count


@pytest.mark.parametrize("name", ["vit", "gpt2", "bert"])
def test_transformers_are_six_layers_384_wide_with_six_heads_and_eager_attention(name):
    config = ZOO[name](batch=1).model.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (6, 384, 6)
    assert config._attn_implementation == "eager"


def test_gpt2_embeds_and_answers_with_one_tensor():
    model = make("gpt2").model
    assert model.lm_head.weight is model.transformer.wte.weight


def test_bert_masks_something_in_every_sequence_and_the_mask_changes_the_loss():
    workload = make("bert", batch=8)
    ids, mask, labels = workload.batch
    assert (mask.sum(1) < mask.shape[1]).all()
    assert ((labels >= 0) <= mask.bool()).all(), "no padding is guessed"
    seen = workload.loss_fn(workload.model, (ids, torch.ones_like(mask), labels))
    assert seen != loss(workload)


def test_the_loop_over_cells_is_the_fused_lstm():
    looped, fused = make("lstm"), make("lstm_fused")
    assert torch.equal(looped.model.head.weight, fused.model.head.weight)
    torch.testing.assert_close(loss(looped), loss(fused))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch": 0}, "batch must be at least 1 (got 0)"),
        ({"width": 200}, "width must be a multiple of 64, or below 128 for one head (got 200); try 192"),
        ({"dropout": 1.5}, "dropout must be at least 0 and below 1 (got 1.5)"),
        ({"dtype": "int8"}, "dtype 'int8' is unknown; known: float32, bfloat16, float16, float64"),
        ({"optimizer": "lion"}, "optimizer 'lion' is unknown; known: sgd, adamw"),
        ({"device": "cup"}, "device 'cup' is unknown; write cpu, cuda or cuda:1"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(arguments, words):
    with pytest.raises(ConfigError) as caught:
        make("gpt2", **arguments)
    assert str(caught.value) == words


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'autotune-training\[zoo\]'"):
        make("resnet18")


@pytest.mark.slow
def test_another_process_draws_the_same_bits_and_prints_no_warning():
    code = (
        "from tests.workloads.zoo.test_zoo import digest, make\n"
        "for name in ('resnet18', 'gpt2', 'bert', 'vit'): print(digest(make(name)))"
    )
    names = ("resnet18", "gpt2", "bert", "vit")
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert run.stdout.split() == [digest(make(name)) for name in names]
    assert run.stderr == ""
