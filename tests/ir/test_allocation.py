"""Bytes that a device charges for one buffer."""

from hypothesis import given
from hypothesis import strategies as st

from autotune.ir.allocation import GPU_BLOCK_BYTES, allocated_bytes


@given(st.integers(0, 2**50))
def test_a_gpu_charges_the_fewest_whole_blocks_that_hold_the_buffer(nbytes: int) -> None:
    charged = allocated_bytes(nbytes, "cuda")
    assert charged % GPU_BLOCK_BYTES == 0
    assert charged - GPU_BLOCK_BYTES < nbytes <= charged


@given(st.integers(0, 2**50))
def test_a_cpu_charges_what_was_requested(nbytes: int) -> None:
    assert allocated_bytes(nbytes, "cpu") == nbytes
