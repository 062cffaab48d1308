"""Functions that the tests of training call inside the tab, in Pyodide's Python."""

from pyodide.http import pyfetch

from webgemma.device import aopen_device
from webgemma.gemma.config import Config
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.lora.adapter import new_adapter
from webgemma.lora.data import Example
from webgemma.lora.trainer import Trainer, TrainingOptions


async def losses(kind: str, ids: list[int], rates: list[float]) -> list[float]:
    """Return the losses of steps that memorise the ids, each with its learning rate."""
    data = await (await pyfetch(f"{kind}.gguf")).bytes()
    gguf = await Gguf.aopen(BytesSource(data, f"{kind}.gguf"))
    config = Config.from_gguf(gguf)
    with await Model.load(gguf, config, await aopen_device()) as model:
        adapter = new_adapter(config, rank=4, seed=2)
        trainer = Trainer(model, adapter, TrainingOptions(batch_size=1, dropout=0.1))
        example = Example(tuple(ids), (True,) * len(ids), 1)
        found = [(await trainer.step([[example]], rate)).loss for rate in rates]
        trainer.close()
    return found
