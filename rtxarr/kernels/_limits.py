"""What a GPU can do, asked of its driver once."""

import functools

from rtxarr import _device


@functools.cache
def capability(device_id: int) -> int:
    """Give the compute capability, 90 for 9.0."""
    return int(_device.cupy.cuda.Device(device_id).compute_capability)


@functools.cache
def shared_memory(device_id: int) -> int:
    """Give the bytes of shared memory that a block can have."""
    runtime = _device.cupy.cuda.runtime
    return runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, device_id)
