"""Kernels of regions that need no compiler: inductor's decompositions, run op by op by ATen."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import fx

from autotune.kernels.compiled_region import CompiledRegion


def decompose(monkeypatch: pytest.MonkeyPatch, change: Callable[[fx.GraphModule], None] = lambda graph: None) -> None:
    """Let every region run its decompositions, after a change of them."""
    graphs: dict[str, fx.GraphModule] = {}

    def compile_(region: CompiledRegion) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
        if region.signature not in graphs:
            graph = graphs[region.signature] = region._trace()[0]
            change(graph)
            graph.recompile()

        def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return [output.clone() for output in graphs[region.signature](*tensors)]

        return run

    monkeypatch.setattr(CompiledRegion, "is_loaded", True)
    monkeypatch.setattr(CompiledRegion, "compile", compile_)


def run_graph(
    graph: fx.GraphModule, tensors: Sequence[torch.Tensor], like: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Run a region's graph; outputs have the strides of `like`, as those of a compiled region have."""
    return [
        torch.empty_strided(other.shape, other.stride(), dtype=output.dtype).copy_(output)
        if output.shape == other.shape
        else output
        for output, other in zip(graph(*tensors), like, strict=True)
    ]
