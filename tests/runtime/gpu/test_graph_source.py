"""A capture keeps memory of a graph that the host writes over, until the output in it is freed."""

from types import SimpleNamespace
from typing import Any

import torch

from autotune.capture.program import Call, Meta, Read
from autotune.ir.schedule import Run, Schedule
from autotune.kernels.compiled_region import CompiledRegion
from autotune.runtime.gpu.graph_source import GraphWriter
from autotune.runtime.gpu.step_split import Part, SplitStep
from autotune.testing.graphs import Builder


def meta(numbers: int) -> Meta:
    return Meta((numbers,), (1,), torch.float32, torch.device("cpu"))


def test_memory_that_a_region_writes_over_is_kept_by_the_output_of_as_many_exact_bytes() -> None:
    """On a GPU all three values have blocks of 512 bytes."""
    built = Builder()
    built.op("create", [], [("source", 512)])
    built.op("region", ["source"], [("short", 512), ("long", 512)], inplace=["source"])
    metas = [meta(128), meta(100), meta(128)]
    code: Any = SimpleNamespace(__name__="region")
    region = CompiledRegion(code, "signature", metas[:1], metas[1:])
    calls = Call(torch.rand, (128,), (), 0), Call(region, (Read(0),), (), (1, 2))
    program: Any = SimpleNamespace(
        graph=built.graph("short", "long"), calls=calls, metas=metas, tensors={}, batch=(), free=(), tangent=None
    )
    split = SplitStep((Part.GRAPH, Part.HOST), {1: (0,)}, 1, (), "")
    writer = GraphWriter(program, Schedule((Run(0), Run(1, reuses_buffer_of=0))), split)
    assert " v2 = v0; del v0" in writer.capture_source().splitlines()
