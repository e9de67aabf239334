"""Find the NVML handle of the GPU that torch uses.

NVML numbers all GPUs of the machine by their bus. CUDA numbers those that CUDA_VISIBLE_DEVICES names, fastest first by
default. The two agree on UUIDs alone.
"""

from collections.abc import Mapping
from typing import Any

_MIG = "MIG-"


def find_handle(nvml: Any, cuda: Any, environment: Mapping[str, str]) -> Any:
    """Return the handle of the current device: of a whole GPU, or of the MIG slice that this process sees.

    Args:
        nvml: The module `pynvml`, initialized.
        cuda: `torch.cuda`; None where torch sees no GPU, for the first GPU of the machine.
        environment: Environment variables of this process.

    Raises:
        nvml.NVMLError: NVML knows no such device.
    """
    if cuda is None:
        return nvml.nvmlDeviceGetHandleByIndex(0)
    index = cuda.current_device()
    visible = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if index < len(visible) and visible[index].startswith(_MIG):
        return nvml.nvmlDeviceGetHandleByUUID(visible[index])
    uuid = str(cuda.get_device_properties(index).uuid)
    if uuid.startswith(_MIG):
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
    return _first_slice(nvml, handle)


def _first_slice(nvml: Any, handle: Any) -> Any:
    """Return the first MIG slice of a GPU in MIG mode, which is the one that CUDA uses by default; else the GPU itself."""
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:  # a GPU without MIG
        return handle
    if not current:
        return handle
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            return nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except nvml.NVMLError:  # an unused number
            continue
    return handle
