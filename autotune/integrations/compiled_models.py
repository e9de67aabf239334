"""Refuse models that torch.compile compiled."""

import torch

from autotune.errors import ConfigError


def refuse_compiled(model: torch.nn.Module) -> None:
    """Raise ConfigError for a model with a compiled module: a plan chooses its own kernels."""
    for name, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            raise ConfigError(
                f"{name or 'the model'} is compiled by torch.compile, but a plan chooses its own kernels; leave "
                "torch.compile out, or train without a plan"
            )
