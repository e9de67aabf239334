"""Ready workloads with random weights and no downloads: models from transformers, and a recurrent model.

To add a workload, write a file with a factory whose keyword arguments all have defaults. Add a line here, and the name to
`ZOO_NAMES` in `workloads/reference.py`. Every factory has the arguments `batch`, `dtype`, `optimizer`, `seed` and
`device`. Equal seeds produce equal bits in every process.

In: keyword arguments of a factory.
Out: a `Workload` with random weights.
Read first: this file.
"""

from collections.abc import Callable

from autotune.workloads.workload import Workload
from autotune.workloads.zoo.bert import bert
from autotune.workloads.zoo.gpt2 import gpt2
from autotune.workloads.zoo.lstm import lstm, lstm_fused
from autotune.workloads.zoo.mobilenet import mobilenet_v2
from autotune.workloads.zoo.resnet import resnet18, resnet50, resnet152
from autotune.workloads.zoo.segformer import segformer
from autotune.workloads.zoo.vit import vit

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
