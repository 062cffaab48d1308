"""Loading a model for the commands that use the engine's parts: check, bench and train."""

from webgemma.cli.terminal import bytes_bar
from webgemma.device import Device
from webgemma.engine.selftest import check_matrix_units, selftest
from webgemma.gemma.config import Config
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.sync import run_sync


def load_model(gguf: Gguf, config: Config, device: Device) -> Model:
    """Load the weights on a device that passes its self-test, with a progress bar."""
    run_sync(selftest(device))
    run_sync(check_matrix_units(device))
    loaded = 0
    with bytes_bar(gguf.name, gguf.nbytes) as show:

        def advance(nbytes: int) -> None:
            nonlocal loaded
            loaded += nbytes
            show(loaded)

        return run_sync(Model.load(gguf, config, device, advance))
