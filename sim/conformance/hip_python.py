"""Runs an unmodified third-party client, PyPI's hip-python, on the simulator."""

import ctypes
import sys

import numpy as np
from hip import hip


def checked(answer):
    """The results of a call, without its status."""
    status, *results = answer if isinstance(answer, tuple) else (answer,)
    if status != hip.hipError_t.hipSuccess:
        raise RuntimeError(str(status))
    return results[0] if len(results) == 1 else tuple(results)


def main(path):
    properties = hip.hipDeviceProp_t()
    checked(hip.hipGetDeviceProperties(properties, 0))
    assert properties.gcnArchName.startswith(b"gfx942") and properties.warpSize == 64
    assert checked(hip.hipGetDeviceCount()) == 1
    units = checked(hip.hipDeviceGetAttribute(hip.hipDeviceAttribute_t.hipDeviceAttributeMultiprocessorCount, 0))
    assert units == properties.multiProcessorCount == 304
    print(f"  device {properties.name.decode()}, {units} compute units")

    n = 100_003
    x = np.random.default_rng(1).normal(size=n).astype(np.float32)
    y = np.arange(n, dtype=np.float32)
    expected = np.float32(3.5) * x + y
    bytes_ = x.nbytes
    dx, dy = checked(hip.hipMalloc(bytes_)), checked(hip.hipMalloc(bytes_))
    stream = checked(hip.hipStreamCreate())
    start, stop = checked(hip.hipEventCreate()), checked(hip.hipEventCreate())
    kinds = hip.hipMemcpyKind
    checked(hip.hipMemcpy(dx, x, bytes_, kinds.hipMemcpyHostToDevice))
    checked(hip.hipMemcpyAsync(dy, y, bytes_, kinds.hipMemcpyHostToDevice, stream))

    with open(path, "rb") as file:
        module = checked(hip.hipModuleLoadData(file.read()))
    kernel = checked(hip.hipModuleGetFunction(module, b"saxpy"))
    checked(hip.hipEventRecord(start, stream))
    checked(hip.hipModuleLaunchKernel(
        kernel, gridDimX=-(-n // 256), gridDimY=1, gridDimZ=1, blockDimX=256, blockDimY=1, blockDimZ=1,
        sharedMemBytes=0, stream=stream, kernelParams=None,
        extra=(dy, dx, ctypes.c_float(3.5), ctypes.c_int(n))))
    checked(hip.hipEventRecord(stop, stream))
    checked(hip.hipEventSynchronize(stop))
    milliseconds = checked(hip.hipEventElapsedTime(start, stop))
    assert milliseconds > 0

    result = np.empty_like(y)
    checked(hip.hipMemcpyAsync(result, dy, bytes_, kinds.hipMemcpyDeviceToHost, stream))
    checked(hip.hipStreamSynchronize(stream))
    # The compiler may fuse product and sum.
    assert np.allclose(result, expected, rtol=1e-6, atol=1e-6)

    pointer, size = checked(hip.hipModuleGetGlobal(module, b"table"))
    table = np.empty(size // 4, np.int32)
    checked(hip.hipMemcpy(table, pointer, size, kinds.hipMemcpyDeviceToHost))
    assert table.tolist() == [10, 20, 30, 40]

    checked(hip.hipMemsetAsync(dx, 0, bytes_, stream))
    checked(hip.hipDeviceSynchronize())
    checked(hip.hipMemcpy(result, dx, bytes_, kinds.hipMemcpyDeviceToHost))
    assert not result.any()
    free, total = checked(hip.hipMemGetInfo())
    assert 0 < free < total

    for event in (start, stop):
        checked(hip.hipEventDestroy(event))
    checked(hip.hipStreamDestroy(stream))
    checked(hip.hipModuleUnload(module))
    checked(hip.hipFree(dx))
    checked(hip.hipFree(dy))
    print(f"  saxpy of {n} elements right, {milliseconds:.2f} ms between events")


if __name__ == "__main__":
    main(*sys.argv[1:])
