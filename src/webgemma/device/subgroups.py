"""Which neighbouring threads of a workgroup can shuffle values among each other: found by trying.

WebGPU does not say how threads are assigned to subgroups. Kernels that shuffle need 4, 8, 16 or 32
neighbours in one subgroup, in order."""

import struct

from webgemma.device.interface import Device, Dispatch, Kernel, Plan

THREADS = 256
SIZES = (4, 8, 16, 32)
ENABLE = "enable subgroups;\n"  # the first line of a program, on devices that require it

# For each thread, the thread whose value a shuffle by 1, 2, 4, 8 and 16 returns.
PROBE = f"""
@group(0) @binding(0) var<storage, read_write> source: array<u32>;

@compute @workgroup_size({THREADS})
fn main(@builtin(local_invocation_index) thread: u32) {{
    source[5u * thread] = subgroupShuffleXor(thread, 1u);
    source[5u * thread + 1u] = subgroupShuffleXor(thread, 2u);
    source[5u * thread + 2u] = subgroupShuffleXor(thread, 4u);
    source[5u * thread + 3u] = subgroupShuffleXor(thread, 8u);
    source[5u * thread + 4u] = subgroupShuffleXor(thread, 16u);
}}
"""


def probe(features: frozenset[str]) -> Kernel:
    """Return the kernel that tries all shuffles, for a device with these features."""
    enable = ENABLE if "enable-subgroups" in features else ""
    return Kernel("subgroup probe", enable + PROBE, ("write",))


async def shuffles(device: Device) -> frozenset[str]:
    """Return those of "shuffle4" to "shuffle32" that a device with subgroups supports."""
    buffer = device.buffer(4 * 5 * THREADS, "subgroup probe")
    try:
        pipeline = device.pipeline(probe(device.features))
        group = device.bind(pipeline, [(buffer, 0, buffer.nbytes)])
        device.run(Plan([Dispatch("subgroup probe", pipeline, group, (1, 1, 1))]))
        sources = struct.unpack(f"<{5 * THREADS}I", await device.read(buffer).bytes())
    finally:
        device.free(buffer)
    works = [
        all(sources[5 * thread + i] == thread ^ distance for thread in range(THREADS))
        for i, distance in enumerate((1, 2, 4, 8, 16))
    ]
    return frozenset(f"shuffle{size}" for size in SIZES if all(works[: size.bit_length() - 1]))
