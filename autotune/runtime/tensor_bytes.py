"""Memory of CPU tensors as bytes, by address: `Tensor.numpy` makes a storage unresizable for ever, and a weight's memory
could never be given back. An array lasts no longer than the tensor that it was made of.
"""

import ctypes

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]


def storage_bytes(tensor: Tensor) -> Bytes:
    """Of its whole storage."""
    storage = tensor.untyped_storage()
    return _at(storage.data_ptr(), storage.nbytes())


def element_bytes(tensor: Tensor) -> Bytes:
    """Of its elements; the tensor is contiguous."""
    return _at(tensor.data_ptr(), tensor.nbytes)


def _at(address: int, nbytes: int) -> Bytes:
    if not nbytes:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
