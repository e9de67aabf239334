"""View the memory of CPU tensors as NumPy bytes, by address.

`Tensor.numpy` would make a storage unresizable permanently, so that a weight's memory could never be released. A view is
valid only as long as its tensor.
"""

import ctypes
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Bytes = NDArray[np.uint8]


def storage_bytes(tensor: "Tensor") -> Bytes:
    """Return a view of a tensor's whole storage."""
    storage = tensor.untyped_storage()
    return _view(storage.data_ptr(), storage.nbytes())


def element_bytes(tensor: "Tensor") -> Bytes:
    """Return a view of the elements of a contiguous tensor."""
    return _view(tensor.data_ptr(), tensor.nbytes)


def _view(address: int, nbytes: int) -> Bytes:
    if not nbytes:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
