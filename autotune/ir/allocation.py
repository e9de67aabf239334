"""Bytes that a device's allocator charges for one buffer.

The caching allocator of a GPU hands out blocks of whole 512 bytes, and counts blocks. A graph captured on a GPU therefore
has rounded values, and planners, simulator and meters count alike. On a CPU the requested bytes count.
"""

GPU_BLOCK_BYTES = 512
"""Granularity of blocks of PyTorch's caching allocator in bytes (`kMinBlockSize` of c10/core/AllocatorConfig.h)."""


def allocated_bytes(nbytes: int, device_kind: str) -> int:
    """Return the bytes of the block that a buffer of `nbytes` occupies on a device: `cpu` or `cuda`.

    >>> allocated_bytes(4, "cpu"), allocated_bytes(4, "cuda"), allocated_bytes(0, "cuda")
    (4, 512, 0)
    """
    if device_kind != "cuda":
        return nbytes
    return -(-nbytes // GPU_BLOCK_BYTES) * GPU_BLOCK_BYTES
