"""Opening an engine: the GPU where there is one, else the reference on the CPU."""

from webgemma.device import aopen_device
from webgemma.engine.embedding import open_embedding_engine
from webgemma.engine.gpu import open_gpu_engine
from webgemma.engine.interface import Engine, EngineOptions
from webgemma.errors import DeviceError
from webgemma.gemma.config import Config
from webgemma.gguf.reader import Gguf
from webgemma.sync import IN_BROWSER


async def open_engine(gguf: Gguf, config: Config, context: int, options: EngineOptions) -> Engine:
    """Open the GPU where there is one (with "auto", not a software one), else the reference.

    A browser has no reference, because it has no numpy."""
    options.check()
    if options.device == "cpu" and IN_BROWSER:
        raise DeviceError("A browser computes on its GPU only", "load the model with device='gpu'")
    if options.device != "cpu":
        required = options.device == "gpu" or options.gpu is not None or IN_BROWSER
        try:
            device = await aopen_device(options.gpu, software=required)
        except DeviceError:
            if required:
                raise
        else:
            if config.embedding:
                return await open_embedding_engine(gguf, config, device, context, options)
            return await open_gpu_engine(gguf, config, device, context, options)
    from webgemma.engine.cpu import CpuEngine  # numpy: natively only

    return CpuEngine(gguf, config, options.encoder_files(gguf, config))
