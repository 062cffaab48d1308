"""Training inside the tab: what the tests have run there by Pyodide's Python."""

from pyodide.http import pyfetch

from webgemma.device import aopen_device
from webgemma.gemma.config import Config
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.lora.data import Example
from webgemma.lora.fresh import new_adapter
from webgemma.lora.trainer import Options, Trainer


async def losses(kind: str, ids: list[int], rates: list[float]) -> list[float]:
    """Of some steps that learn the ids by heart, each at its rate."""
    data = await (await pyfetch(f"{kind}.gguf")).bytes()
    gguf = await Gguf.aopen(BytesSource(data, f"{kind}.gguf"))
    config = Config.from_gguf(gguf)
    with await Model.load(gguf, config, await aopen_device()) as model:
        adapter = new_adapter(config, rank=4, seed=2)
        trainer = Trainer(model, adapter, Options(sequences=1, dropout=0.1))
        example = Example(tuple(ids), (True,) * len(ids), 1)
        found = [(await trainer.step([[example]], rate)).loss for rate in rates]
        trainer.close()
    return found
