"""Every ready workload, small enough to train in a blink: arguments for its factory."""

from typing import Any

_CONVOLUTIONS: dict[str, Any] = {"batch": 2, "size": 32}
_TEXT: dict[str, Any] = {"batch": 2, "tokens": 16, "depth": 1, "width": 32, "vocabulary": 64}

TINY: dict[str, dict[str, Any]] = {
    "resnet18": {**_CONVOLUTIONS, "width": 8, "depth": 1},
    "resnet50": {**_CONVOLUTIONS, "width": 4, "depth": 1},
    "resnet152": {**_CONVOLUTIONS, "width": 4, "depth": 1},
    "mobilenet_v2": {**_CONVOLUTIONS, "width": 8},
    "segformer": {**_CONVOLUTIONS, "width": 8, "depth": 1},
    "vit": {**_CONVOLUTIONS, "width": 32, "depth": 1},
    "gpt2": _TEXT,
    "bert": _TEXT,
    "lstm": {**_TEXT, "tokens": 4, "depth": 2},
    "lstm_fused": {**_TEXT, "tokens": 4, "depth": 2},
}
