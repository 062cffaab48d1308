"""Trials of a device when it is opened: a sum, and one tile on its matrix units.

A driver may offer what it computes wrongly; then something else is used."""

import struct

from webgemma.device.interface import Device, Dispatch, Kernel, MatrixShape, Plan
from webgemma.device.subgroups import ENABLE
from webgemma.errors import DeviceError

THREADS = 64
SUM = f"""
@group(0) @binding(0) var<storage, read> x: array<u32>;
@group(0) @binding(1) var<storage, read_write> y: array<u32>;

@compute @workgroup_size({THREADS})
fn main(@builtin(global_invocation_id) thread: vec3<u32>) {{
    y[thread.x] = 3u * x[thread.x] + thread.x;
}}
"""


async def check_sums(device: Device) -> None:
    """Raise DeviceError unless a device adds correctly."""
    x = [i * i * 77777 for i in range(THREADS)]
    kernel = Kernel("sum", SUM, ("read", "write"))
    data = await _computed(device, kernel, [struct.pack(f"<{THREADS}I", *x)], 4 * THREADS)
    if list(struct.unpack(f"<{THREADS}I", data)) != [3 * x[i] + i for i in range(THREADS)]:
        raise DeviceError(f"{device.name} computes wrong sums: update its driver.")


async def matrix_products(device: Device) -> tuple[MatrixShape, ...]:
    """Return those of a device's matrix shapes whose product is right."""
    return tuple([shape for shape in device.matrix_shapes if await _multiplies(device, shape)])


async def _multiplies(device: Device, shape: MatrixShape) -> bool:
    m, n, k = shape
    a = [[(3 * i + j) % 7 - 3 for j in range(k)] for i in range(m)]
    b = [[(i + 5 * j) % 9 - 4 for j in range(n)] for i in range(k)]
    inputs = [
        struct.pack(f"<{len(x) * len(x[0])}e", *(v for row in x for v in row)) for x in (a, b)
    ]
    kernel = Kernel(
        "matrix probe", _product(shape, device.subgroup_sizes[1]), ("read", "read", "write")
    )
    try:
        data = await _computed(device, kernel, inputs, 4 * m * n)
    except DeviceError:
        return False
    columns = list(zip(*b, strict=True))
    expected = [
        sum(x * y for x, y in zip(row, column, strict=True)) for row in a for column in columns
    ]
    return list(struct.unpack(f"<{m * n}f", data)) == expected


def _product(shape: MatrixShape, threads: int) -> str:
    """Return the WGSL of one product; matrix types have columns before rows."""
    m, n, k = shape
    return f"""enable f16;
{ENABLE}enable chromium_experimental_subgroup_matrix;
@group(0) @binding(0) var<storage, read> a: array<f16>;  // [{m}, {k}]
@group(0) @binding(1) var<storage, read> b: array<f16>;  // [{k}, {n}]
@group(0) @binding(2) var<storage, read_write> c: array<f32>;  // [{m}, {n}]

@compute @workgroup_size({threads or 32})
fn main() {{
    let left = subgroupMatrixLoad<subgroup_matrix_left<f16, {k}, {m}>>(&a, 0u, false, {k}u);
    let right = subgroupMatrixLoad<subgroup_matrix_right<f16, {n}, {k}>>(&b, 0u, false, {n}u);
    var result: subgroup_matrix_result<f32, {n}, {m}>;
    result = subgroupMatrixMultiplyAccumulate(left, right, result);
    subgroupMatrixStore(&c, 0u, result, false, {n}u);
}}
"""


async def _computed(device: Device, kernel: Kernel, inputs: list[bytes], nbytes: int) -> bytes:
    """Return what one workgroup of a kernel computes from its inputs."""
    buffers = [device.buffer(len(data), kernel.name) for data in inputs]
    buffers.append(device.buffer(nbytes, kernel.name))
    try:
        for buffer, data in zip(buffers, inputs, strict=False):
            device.write(buffer, data)
        pipeline = device.pipeline(kernel)
        group = device.bind(pipeline, [(buffer, 0, buffer.nbytes) for buffer in buffers])
        device.run(Plan([Dispatch(kernel.name, pipeline, group, (1, 1, 1))]))
        return await device.read(buffers[-1], 0, nbytes).bytes()
    finally:
        for buffer in buffers:
            device.free(buffer)
