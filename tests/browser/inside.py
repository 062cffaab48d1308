"""Functions that the tests call inside the tab, in Pyodide's Python, with JSON in and out."""

import asyncio
from array import array
from typing import Any

from pyodide.http import pyfetch

from webgemma import Gemma
from webgemma.device import Dispatch, Kernel, Plan, aopen_device
from webgemma.device.browser import BrowserDevice
from webgemma.errors import DeviceError, MissingPackageError
from webgemma.gemma.audio import AudioEncoder, encode_audio
from webgemma.gemma.encoder_config import EncoderConfigs
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.graph import BufferPool, Tensor

COUNT = """
struct Params { step: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> total: array<u32>;
@compute @workgroup_size(1) fn main() { total[0] += params.step; }
"""


async def load(kind: str, **options: Any) -> Gemma:
    """Load a model from the test's server."""
    with open(f"/{kind}.gguf", "wb") as file:
        file.write(await (await pyfetch(f"{kind}.gguf")).bytes())
    return await Gemma.aload(f"/{kind}.gguf", "gpu", **options)


async def tokens(kind: str, ids: list[int], settings: dict[str, Any], **options: Any) -> Any:
    """Return the device's name, and the tokens that follow."""
    with await load(kind, **options) as gemma:
        return gemma.device, [piece.token async for piece in gemma.agenerate(ids, **settings)]


async def side_by_side(kind: str, texts: list[str], settings: dict[str, Any]) -> Any:
    """Return the tokens of replies: of a batch, and of tasks on one model."""
    with await load(kind, kv="f32") as gemma:
        batch = {index: reply async for index, reply in gemma.abatch(texts, **settings)}

        async def one(text: str) -> list[int]:
            return [piece.token async for piece in gemma.achat(text, **settings)]

        tasks = await asyncio.gather(*map(one, texts))
        return [[p.token for p in batch[n].pieces] for n in range(len(texts))], tasks


async def without_xgrammar(kind: str) -> Any:
    """Return why a reply cannot keep to choices, and the tokens of two beside each other that may
    call a tool, which need no constraint."""
    with await load(kind, kv="f32") as gemma:
        try:
            async for _ in gemma.achat("in", choices=["a", "b"]):
                raise AssertionError("there is no constraint")
        except MissingPackageError as error:
            sentence = str(error)

        async def one() -> list[int]:
            tools = [{"name": "clock"}]
            pieces = gemma.achat("in", tools=tools, temperature=0, max_tokens=5)
            return [piece.token async for piece in pieces]

        return sentence, await asyncio.gather(one(), one())


async def logits(kind: str, ids: list[int]) -> list[list[float]]:
    """Return the logits after each of the ids, without numpy."""
    with await load(kind, kv="f32") as gemma:
        return [list(row) for row in await gemma.alogits(ids)]


async def embedded(kind: str, texts: list[Any]) -> list[list[float]]:
    """Return the vectors of texts, without numpy."""
    with await load(kind, precision="exact") as gemma:
        return [list(row) for row in await gemma.aembed(texts)]


async def continued(kind: str, ids: list[int], count: int) -> list[list[int]]:
    """Return the tokens of a session, of one that was stopped before, and of a restored one."""
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
        restored = await gemma.arestore("/saved")
        assert restored[: len(ids)] == ids
        found.append([piece.token async for piece in gemma.agenerate(ids, **settings)])
    return found


async def encoded_audio(kind: str, samples: list[float]) -> list[list[list[float]]]:
    """Return the mel bins and the soft tokens of audio, by an encoder of the test's server."""
    source = BytesSource(await (await pyfetch(f"{kind}.gguf")).bytes(), "audio.gguf")
    gguf, device = await Gguf.aopen(source), await opened()
    config = EncoderConfigs.from_gguf(gguf).audio
    assert config is not None
    with await AudioEncoder.load(gguf, config, device) as encoder:
        (await encode_audio(encoder, array("f", samples[::-1]))).close()  # records the plan
        encoded = await encode_audio(encoder, array("f", samples))
        found = [await rows(device, tensor) for tensor in (encoded.mel, encoded.tokens)]
        encoded.close()
    assert device.nbytes == 0
    device.close()
    return found


async def rows(device: BrowserDevice, tensor: Tensor) -> list[list[float]]:
    """Read a matrix from the device."""
    values = array("f", await device.read(tensor.buffer, 0, tensor.nbytes).bytes())
    return [
        list(values[at : at + tensor.shape[1]]) for at in range(0, len(values), tensor.shape[1])
    ]


async def bundled(text: str) -> str:
    """Return the reply of the bundled model."""
    gemma = await Gemma.aload()
    with gemma:
        pieces = gemma.achat(text, temperature=0, max_tokens=16)
        return "".join([piece.text async for piece in pieces])


async def facts() -> dict[str, Any]:
    """Return the facts of the browser's device."""
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
    """Open the browser's device."""
    device = await aopen_device()
    assert isinstance(device, BrowserDevice)
    return device


def counter(device: BrowserDevice, step: int) -> tuple[Plan, Tensor]:
    """Return a plan that adds to a number, and the number."""
    total = Tensor((4,), 16, device.buffer(16, "total"))
    return counting_plan(device, step, total, 1), total


def counting_plan(device: BrowserDevice, step: int, total: Tensor, dispatches: int) -> Plan:
    """Return a plan of so many dispatches that each add to a number."""
    own = BufferPool(device)
    params = own.upload(step.to_bytes(16, "little"), 4, label="params")
    pipeline = device.pipeline(Kernel("count", COUNT, ("uniform", "write")))
    bound = [(tensor.buffer, 0, 16) for tensor in (params, total)]
    dispatch = Dispatch("count", pipeline, device.bind(pipeline, bound), (1, 1, 1))
    return Plan([dispatch] * dispatches, buffers=own.buffers)


async def counted() -> list[int]:
    """Run a plan five times, read late and in another order; then copy, and write."""
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


async def recovered() -> list[str | int]:
    """Return the error of a program that does not compile, and what a right one computes then."""
    device = await opened()
    device.pipeline(Kernel("wrong", "fn main() { nonsense }", ("write",)))
    error = ""
    try:
        await device.compiled()
    except DeviceError as raised:
        error = str(raised)
    plan, total = counter(device, 3)
    await device.compiled()
    device.run(plan)
    data = await device.read(total.buffer, 0, 4).bytes()
    device.close()
    return [error, int.from_bytes(data, "little")]


async def mistake(kind: str) -> str:
    """Return the error of a mistake, which comes at the latest when bytes are awaited."""
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
