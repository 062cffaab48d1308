"""Training in a browser tab: the same losses as natively, step by step."""

from collections.abc import Iterator
from typing import Any

import pytest
from browser.serving import serving
from browser.test_tab import PYODIDE, Tab, wheel
from helpers.gpu import device
from helpers.tiny import KINDS, tiny_gguf

from webgemma.gemma.config import Config
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.lora.adapter import new_adapter
from webgemma.lora.data import Example
from webgemma.lora.trainer import Trainer, TrainingOptions
from webgemma.sync import run_sync

IDS = [2, *range(40, 300, 13)]
RATES = [0.005] * 5  # larger ones amplify another order of sums to 1e-2 within five steps


@pytest.fixture(scope="module")
def tab(chromium: Any) -> Iterator[Tab]:
    files = {f"pyodide/{path.name}": path for path in PYODIDE.iterdir() if path.is_file()}
    models = {f"{kind}.gguf": tiny_gguf(KINDS[kind]) for kind in ("small", "moe")}
    with serving({**files, **models, "webgemma.whl": wheel()}) as origin:
        page = chromium.new_page()
        page.goto(f"{origin}/python.html")
        yield Tab(page, origin, [])
        page.close()


def native(kind: str) -> list[float]:
    gguf = run_sync(Gguf.aopen(BytesSource(tiny_gguf(KINDS[kind]), "tiny.gguf")))
    config = Config.from_gguf(gguf)
    with run_sync(Model.load(gguf, config, device())) as model:
        adapter = new_adapter(config, rank=4, seed=2)
        trainer = Trainer(model, adapter, TrainingOptions(batch_size=1, dropout=0.1))
        example = Example(tuple(IDS), (True,) * len(IDS), 1)
        found = [run_sync(trainer.step([[example]], rate)).loss for rate in RATES]
        trainer.close()
    return found


@pytest.mark.parametrize("kind", ["small", "moe"])
def test_losses_as_natively(tab: Tab, kind: str) -> None:
    found = tab.call("inside_training.losses", kind, IDS, RATES)
    assert found[-1] < 0.8 * found[0]
    assert found == pytest.approx(native(kind), rel=1e-3)
