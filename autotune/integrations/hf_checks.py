"""Refuse settings of a `transformers.Trainer` under which a plan would have no effect or another result."""

from collections.abc import Iterator
from typing import Any

from autotune.errors import ConfigError
from autotune.integrations.compiled_models import refuse_compiled


def refuse_arguments(trainer: Any) -> None:
    """Raise ConfigError for the first setting of a constructed trainer that a plan does not support."""
    for setting, reason in _unsupported(trainer):
        raise ConfigError(f"{setting} is not supported under a plan: {reason}")
    refuse_compiled(trainer.model)


def _unsupported(trainer: Any) -> Iterator[tuple[str, str]]:
    """Yield each unsupported setting with its value, and the reason with the next step."""
    arguments, accelerator = trainer.args, trainer.accelerator
    shards = "it runs its own forward and backward; leave it out, or use the trainer without a plan"
    kernels = "a plan chooses its own kernels; leave it out, or use the trainer without a plan"
    if arguments.deepspeed or getattr(trainer, "is_deepspeed_enabled", False):
        yield f"deepspeed={arguments.deepspeed!r}", shards
    if arguments.fsdp or getattr(trainer, "is_fsdp_enabled", False):
        yield f"fsdp={arguments.fsdp!r}", shards
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        yield "a model with a distributed_config", "its weights are sharded; load it without one"
    if getattr(trainer, "is_model_parallel", False):
        yield f"hf_device_map={trainer.model.hf_device_map}", "a plan is for one device; load the model on one"
    if getattr(accelerator, "parallelism_config", None) is not None:
        yield "parallelism_config", "the parts of a sharded batch need communication; leave it out"
    if arguments.n_gpu > 1:
        yield f"DataParallel on {arguments.n_gpu} GPUs", "start one process per GPU with torchrun"
    if arguments.torch_compile:
        yield "torch_compile=True", kernels
    plugin = getattr(getattr(accelerator, "state", None), "dynamo_plugin", None)
    backend = getattr(getattr(plugin, "backend", None), "value", "NO")
    if backend != "NO":
        yield f"dynamo_backend={backend!r} of Accelerate, or ACCELERATE_DYNAMO_BACKEND,", kernels
    checkpoints = any(getattr(arguments, f"{name}_checkpointing", False) for name in ("gradient", "activation"))
    if checkpoints and hasattr(trainer.model, "peft_config"):
        yield "activation or gradient_checkpointing=True with PEFT", "leave it out; a plan chooses what to recompute"
    optimizer = str(getattr(arguments.optim, "value", arguments.optim))
    if "lomo" in optimizer:
        yield f"optim={optimizer!r}", "it updates weights within backward; use another optimizer"
