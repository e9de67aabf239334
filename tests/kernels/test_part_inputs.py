"""Parts of values that compiled regions take as inputs."""

import torch

from autotune.capture.program import Meta, Read, View
from autotune.kernels import part_inputs

aten = torch.ops.aten


def test_a_part_of_a_complex_value_has_the_type_of_its_numbers():
    whole = Meta((4,), (1,), torch.complex64, torch.device("cpu"))
    imaginary = View(aten.select.int, (View(aten.view_as_real.default, (Read(0),)), -1, 1))
    assert part_inputs._describe(imaginary, [whole]) == Meta((4,), (2,), torch.float32, torch.device("cpu"))
