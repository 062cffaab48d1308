"""How much memory a GPU has left: nobody tells, so it is asked for and given back."""

from webgemma.device import Buffer, Device
from webgemma.errors import DeviceMemoryError

PIECE_NBYTES = 256 << 20


async def free_nbytes(device: Device, wanted_nbytes: int) -> int:
    """So many bytes, or fewer if the device cannot give that much now."""
    small = device.buffer(16, "small")
    taken: list[Buffer] = []
    free = 0
    try:
        while free < wanted_nbytes:
            taken.append(device.buffer(PIECE_NBYTES, "room"))
            await device.read(small, 0, 4).bytes()  # a browser tells of missing memory late
            free += PIECE_NBYTES
    except DeviceMemoryError:
        pass
    finally:
        for buffer in (*taken, small):
            device.free(buffer)
    return min(free, max(0, wanted_nbytes))
