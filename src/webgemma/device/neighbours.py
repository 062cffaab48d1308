"""Which neighbouring threads of a workgroup shuffle values among each other: found out by trying.

WebGPU does not say how threads are put into subgroups. Kernels that shuffle need 4, 8, 16 or 32
neighbours in one subgroup, in order."""

import struct

from webgemma.device import Device, Dispatch, Kernel, Plan

THREADS = 256
SIZES = (4, 8, 16, 32)
ENABLE = "enable subgroups;\n"  # before all else, on devices that want it

# For each thread, the one whose value a shuffle by 1, 2, 4, 8 and 16 brings.
PROBE = f"""
@group(0) @binding(0) var<storage, read_write> seen: array<u32>;

@compute @workgroup_size({THREADS})
fn main(@builtin(local_invocation_index) thread: u32) {{
    seen[5u * thread] = subgroupShuffleXor(thread, 1u);
    seen[5u * thread + 1u] = subgroupShuffleXor(thread, 2u);
    seen[5u * thread + 2u] = subgroupShuffleXor(thread, 4u);
    seen[5u * thread + 3u] = subgroupShuffleXor(thread, 8u);
    seen[5u * thread + 4u] = subgroupShuffleXor(thread, 16u);
}}
"""


def probe(features: frozenset[str]) -> Kernel:
    """The kernel that tries them, for a device with these features."""
    enable = ENABLE if "enable-subgroups" in features else ""
    return Kernel("neighbours", enable + PROBE, ("write",))


async def shuffles(device: Device) -> frozenset[str]:
    """Of "shuffle4" to "shuffle32" those that this device, which has subgroups, can do."""
    buffer = device.buffer(4 * 5 * THREADS, "neighbours")
    try:
        pipeline = device.pipeline(probe(device.features))
        group = device.bind(pipeline, [(buffer, 0, buffer.nbytes)])
        device.run(Plan([Dispatch("neighbours", pipeline, group, (1, 1, 1))]))
        seen = struct.unpack(f"<{5 * THREADS}I", await device.read(buffer).bytes())
    finally:
        device.free(buffer)
    right = [
        all(seen[5 * thread + i] == thread ^ step for thread in range(THREADS))
        for i, step in enumerate((1, 2, 4, 8, 16))
    ]
    return frozenset(f"shuffle{size}" for size in SIZES if all(right[: size.bit_length() - 1]))
