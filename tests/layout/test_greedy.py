import random

import numpy as np

from autotune.layout import Buffers
from autotune.layout.greedy import _place, place_in_python


def test_compiled_and_python_place_alike():
    draw = random.Random(0)
    for _ in range(60):
        count = draw.randrange(1, 40)
        born = [draw.randrange(30) for _ in range(count)]
        died = [birth + draw.randrange(1, 12) for birth in born]
        sizes = [draw.choice((0, 1, 63, 64, 100, 70_000)) for _ in born]
        buffers = Buffers.from_lives(sizes, born, died, alignment=draw.choice((1, 64)))
        order = np.array(draw.sample(range(count), count))
        for tight in (False, True):
            assert _place(buffers, order, tight).tolist() == place_in_python(buffers, order, tight).tolist()


def test_best_fit_takes_the_narrowest_gap_and_first_fit_the_lowest():
    # 0 to 8 is free at the bottom and 10 to 12 above; the last one needs 2
    buffers = Buffers.from_lives((8, 2, 2, 2, 2), (0, 0, 0, 0, 5), (4, 9, 4, 9, 9), alignment=1)
    order = np.array((0, 1, 2, 3, 4))
    assert place_in_python(buffers, order, True).tolist() == [0, 8, 10, 12, 10]
    assert place_in_python(buffers, order, False).tolist() == [0, 8, 10, 12, 0]
