"""Ready workloads with random weights, nothing downloaded: well-kept models from transformers, and a recurrent one.

To add one: a file with a factory whose keyword arguments all have defaults, and a line here. Every factory takes `batch`,
`dtype`, `optimizer`, `seed` and `device`; the same seed gives the same bits in every process.
"""

from collections.abc import Callable

from autotune.workload import Workload
from autotune.zoo.bert import bert
from autotune.zoo.gpt2 import gpt2
from autotune.zoo.lstm import lstm, lstm_fused
from autotune.zoo.mobilenet import mobilenet_v2
from autotune.zoo.resnet import resnet18, resnet50, resnet152
from autotune.zoo.segformer import segformer
from autotune.zoo.vit import vit

ZOO: dict[str, Callable[..., Workload]] = {
    "resnet18": resnet18,
    "resnet50": resnet50,
    "resnet152": resnet152,
    "mobilenet_v2": mobilenet_v2,
    "segformer": segformer,
    "vit": vit,
    "gpt2": gpt2,
    "bert": bert,
    "lstm": lstm,
    "lstm_fused": lstm_fused,
}
