"""Loading a model for the commands that look inside the engine: `check` and `bench`."""

from webgemma.cli.terminal import progress
from webgemma.device import Device
from webgemma.engine.selftest import selftest
from webgemma.gemma.config import Config
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.sync import run_sync


def load_model(gguf: Gguf, config: Config, device: Device) -> Model:
    """The weights on a device that has passed its self-test, with a progress bar."""
    run_sync(selftest(device))
    loaded = 0
    with progress(gguf.name, gguf.nbytes) as show:

        def advance(nbytes: int) -> None:
            nonlocal loaded
            loaded += nbytes
            show(loaded)

        return run_sync(Model.load(gguf, config, device, advance))
