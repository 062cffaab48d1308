"""Eyes and ears that compute on a GPU."""

from typing import Any
from weakref import WeakSet

from webgemma.device import Device
from webgemma.errors import DeviceMemoryError
from webgemma.gemma.audio import Ears, Sound, hear
from webgemma.gemma.encoder_config import AudioConfig, VisionConfig, encoder_nbytes
from webgemma.gemma.matrices import Matrices
from webgemma.gemma.record.staged_plan import Tower
from webgemma.gemma.vision import Eyes, Sight, see
from webgemma.gguf.reader import Gguf
from webgemma.images import RgbImage
from webgemma.media.encoders import EncoderFiles, Encoders
from webgemma.progress import Progress


def gpu_encoders(files: EncoderFiles, device: Device, memory_gb: float | None) -> Encoders:
    """The senses of a model on a device, of whose memory so much may be in use."""
    towers: WeakSet[Tower] = WeakSet()

    def check_room(file: Gguf, kind: str) -> None:
        for tower in towers:
            tower.rest()
        nbytes = encoder_nbytes(file, kind)
        if memory_gb is not None and device.nbytes + nbytes > memory_gb * 1e9:
            raise DeviceMemoryError(
                f"{files.name} needs {nbytes / 1e9:.2g} GB more for its {kind} tower, but "
                f"{device.nbytes / 1e9:.2g} GB are in use and memory_gb={memory_gb:g}; "
                "allow more, or load it with a shorter context.",
                device.nbytes + nbytes,
            )

    async def open_eyes(file: Gguf, vision: VisionConfig) -> GpuEyes:
        check_room(file, "vision")
        eyes = await Eyes.load(file, vision, device)
        towers.add(eyes)
        return GpuEyes(eyes)

    async def open_ears(file: Gguf, audio: AudioConfig) -> GpuEars:
        check_room(file, "audio")
        ears = await Ears.load(file, audio, device)
        towers.add(ears)
        return GpuEars(ears)

    return Encoders(files, open_eyes, open_ears)


class GpuTower:
    """What eyes and ears have in common; soft tokens come in one tensor or several."""

    def __init__(self, weights: Matrices) -> None:
        self._weights = weights

    async def read(self, rows: list[Any]) -> bytes:
        """Float32 soft tokens: [n, width]."""
        device = self._weights.device
        readings = [device.read(x.tokens.buffer, 0, x.tokens.nbytes) for x in rows]
        return b"".join([await reading.bytes() for reading in readings])

    def free(self, rows: list[Any]) -> None:
        """Give the memory of a picture or a sound back."""
        for each in rows:
            each.close()

    def close(self) -> None:
        """Give the weights' memory back."""
        self._weights.close()


class GpuEyes(GpuTower):
    """A vision tower on a device, as `Encoders` uses it."""

    def __init__(self, eyes: Eyes) -> None:
        super().__init__(eyes)
        self.vision = eyes.vision
        self._eyes = eyes

    async def look(
        self, picture: RgbImage, width: int, height: int, progress: Progress
    ) -> list[Sight]:
        """Have the device encode a picture."""
        return [await see(self._eyes, picture, width, height, progress)]


class GpuEars(GpuTower):
    """An audio tower on a device, as `Encoders` uses it."""

    def __init__(self, ears: Ears) -> None:
        super().__init__(ears)
        self.audio = ears.audio
        self._ears = ears

    async def listen(self, samples: memoryview, progress: Progress) -> list[Sound]:
        """Have the device encode a sound, each 30 s on their own."""
        heard: list[Sound] = []
        parts = self.audio.parts(len(samples))

        def tell(done: int, total: int) -> None:
            progress(len(heard) * total + done, len(parts) * total)

        try:
            for part in parts:
                heard.append(await hear(self._ears, samples[part], tell))
        except BaseException:
            self.free(heard)
            raise
        return heard
