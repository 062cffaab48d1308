"""What the tests have run inside the tab, by Pyodide's Python: only JSON goes in and comes out."""

import asyncio
from array import array
from typing import Any

from pyodide.http import pyfetch

from webgemma import Gemma
from webgemma.device import Kernel, Plan, aopen_device
from webgemma.device.browser import BrowserDevice
from webgemma.errors import DeviceError
from webgemma.gemma.audio import Ears, hear
from webgemma.gemma.encoder_config import EncoderConfigs
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.graph import Recorder, Tensor

COUNT = """
struct Params { step: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> total: array<u32>;
@compute @workgroup_size(1) fn main() { total[0] += params.step; }
"""


async def load(kind: str, **options: Any) -> Gemma:
    """A model that the test's server has."""
    with open(f"/{kind}.gguf", "wb") as file:
        file.write(await (await pyfetch(f"{kind}.gguf")).bytes())
    return await Gemma.aload(f"/{kind}.gguf", "gpu", **options)


async def tokens(kind: str, ids: list[int], settings: dict[str, Any], **options: Any) -> Any:
    """What computes, and the tokens that follow."""
    with await load(kind, **options) as gemma:
        return gemma.device, [piece.token async for piece in gemma.agenerate(ids, **settings)]


async def logits(kind: str, ids: list[int]) -> list[list[float]]:
    """Logits after each of the ids, without numpy."""
    with await load(kind, kv="f32") as gemma:
        return [list(row) for row in await gemma.alogits(ids)]


async def continued(kind: str, ids: list[int], count: int) -> list[list[int]]:
    """Tokens from a session, from one that was left half-way, and from one that was restored."""
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": count}
    found = []
    with await load(kind, kv="f32") as gemma:
        found.append([piece.token async for piece in gemma.agenerate(ids, **settings)])
        stream = gemma.agenerate(ids, **settings)
        async for _ in stream:
            break
        await stream.aclose()
        found.append([piece.token async for piece in gemma.agenerate(ids, **settings)])
        await gemma.asave("/saved")
    with await load(kind, kv="f32") as gemma:
        kept = await gemma.arestore("/saved")
        assert kept[: len(ids)] == ids
        found.append([piece.token async for piece in gemma.agenerate(ids, **settings)])
    return found


async def heard(kind: str, samples: list[float]) -> list[list[list[float]]]:
    """Rows of mel bins and the soft tokens of a sound, by ears that the test's server has."""
    source = BytesSource(await (await pyfetch(f"{kind}.gguf")).bytes(), "ears.gguf")
    gguf, device = await Gguf.aopen(source), await opened()
    audio = EncoderConfigs.from_gguf(gguf).audio
    assert audio is not None
    with await Ears.load(gguf, audio, device) as ears:
        (await hear(ears, array("f", samples[::-1]))).close()  # what is recorded runs again
        sound = await hear(ears, array("f", samples))
        found = [await rows(device, tensor) for tensor in (sound.mel, sound.tokens)]
        sound.close()
    assert device.nbytes == 0
    device.close()
    return found


async def rows(device: BrowserDevice, tensor: Tensor) -> list[list[float]]:
    """The numbers of a matrix on the device."""
    values = array("f", await device.read(tensor.buffer, 0, tensor.nbytes).bytes())
    return [
        list(values[at : at + tensor.shape[1]]) for at in range(0, len(values), tensor.shape[1])
    ]


async def bundled(text: str) -> str:
    """What the bundled model replies, loaded as anybody would."""
    gemma = await Gemma.aload()
    with gemma:
        pieces = gemma.achat(text, temperature=0, max_tokens=16)
        return "".join([piece.text async for piece in pieces])


async def facts() -> dict[str, Any]:
    """What the browser's device says of itself."""
    device = await opened()
    limits = device.limits
    return {
        "name": device.name,
        "software": device.software,
        "features": sorted(device.features),
        "binding_nbytes": limits.binding_nbytes,
        "threads": limits.workgroup_threads,
    }


async def opened() -> BrowserDevice:
    """The browser's device."""
    device = await aopen_device()
    assert isinstance(device, BrowserDevice)
    return device


def counter(device: BrowserDevice, step: int) -> tuple[Plan, Tensor]:
    """A plan that adds to a number, and the number."""
    total = Tensor((4,), 16, device.buffer(16, "total"))
    recorder = Recorder(device)
    recorder.call(Kernel("count", COUNT, ("uniform", "write")), (1,), [step], total)
    return recorder.plan(), total


async def counted() -> list[int]:
    """A plan that ran five times, read late and in another order; then a copy, and a write."""
    device = await opened()
    plan, total = counter(device, 3)
    readings = [device.run(plan, (total.buffer, 0, 4)) for _ in range(5)]
    found = [await readings[i].bytes() for i in (4, 0, 2, 1, 3)]
    other = device.buffer(16)
    device.copy(total.buffer, other, 16)
    found.append(await device.read(other, 0, 4).bytes())
    device.write(other, memoryview(b"....\7\0\0\0")[4:], 4)
    found.append(await device.read(other, 4, 4).bytes())
    plan.close(device)
    device.free(total.buffer)
    device.free(other)
    assert device.nbytes == 0
    device.close()
    return [int.from_bytes(data, "little") for data in found]


async def mistake(kind: str) -> str:
    """The sentence for something that goes wrong, at the latest when bytes are waited for."""
    device = await opened()
    try:
        plan, total = counter(device, 1)
        if kind == "lost":
            device._gpu.device.destroy()
            await asyncio.sleep(0.05)
        elif kind == "lost while reading":
            device.run(plan)
            device._gpu.device.destroy()
        elif kind == "freed and run":
            device.free(total.buffer)
        elif kind == "kernel":
            device.pipeline(Kernel("wrong", "fn main() { nonsense }", ("write",)))
        elif kind == "binding":
            device.bind(plan.dispatches[0].pipeline, [(total.buffer, 0, 16)])
        elif kind == "odd write":
            device.write(total.buffer, b"abc")
        elif kind == "large buffer":
            device.buffer(device.limits.buffer_nbytes + 1, "all")
        elif kind == "no memory":  # SwiftShader promises more than it gives
            device.buffer(device.limits.buffer_nbytes, "much")
        reading = device.run(plan, (total.buffer, 0, 4))
        assert reading is not None
        await reading.bytes()
    except DeviceError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        device.close()
    return "nothing went wrong"
