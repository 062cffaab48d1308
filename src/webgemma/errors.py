"""Errors that users can meet: each says in a sentence what is wrong, where, and what to do."""


class WebgemmaError(Exception):
    """Base of every error that webgemma raises on purpose."""


class GgufError(WebgemmaError):
    """A model file is damaged, truncated, of another kind, or uses something unsupported."""


class ModelNotFoundError(WebgemmaError):
    """There is no model of this name or path."""


class InputError(WebgemmaError):
    """A prompt, a message, a token id or an option cannot be used."""


class MissingPackageError(InputError):
    """What was asked for needs a package that is not installed."""


class MissingEncoderError(InputError):
    """A model has no encoder for images or for audio: `reason`, without what to do in Python."""

    def __init__(self, reason: str, advice: str = "") -> None:
        super().__init__(f"{reason}; {advice}." if advice else f"{reason}.")
        self.reason = f"{reason}."


class StorageError(WebgemmaError):
    """A browser cannot store a model: there is no space, or it is in use."""


class DeviceError(WebgemmaError):
    """The GPU is missing, lost, out of memory, or refuses a kernel."""


class DeviceLostError(DeviceError):
    """The GPU was reset or removed: the model has to be loaded again."""


class DeviceMemoryError(DeviceError):
    """The GPU has no memory left; `held_nbytes` of it were in use then."""

    def __init__(self, sentence: str, held_nbytes: int) -> None:
        super().__init__(sentence)
        self.held_nbytes = held_nbytes


class KernelError(WebgemmaError):
    """A kernel is linked or called with something that its WGSL file does not declare."""
