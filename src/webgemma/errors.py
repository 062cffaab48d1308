"""Errors that users can meet: each says in a sentence what is wrong, where, and what to do."""


class WebgemmaError(Exception):
    """Base of every error that webgemma raises on purpose: a sentence, and `advice` for programs.

    `reason` is the sentence alone, for whoever has no Python at hand, as on the chat page."""

    def __init__(self, sentence: str, advice: str = "") -> None:
        super().__init__(f"{sentence}; {advice}." if advice else sentence)
        self.reason = f"{sentence}." if advice else sentence


class GgufError(WebgemmaError):
    """A model file is damaged, truncated, of another kind, or uses something unsupported."""


class ModelNotFoundError(WebgemmaError):
    """There is no model of this name or path."""


class InputError(WebgemmaError):
    """A prompt, a message, a token id or an option cannot be used."""


class PromptLengthError(InputError):
    """A prompt does not fit the context."""


class MissingPackageError(InputError):
    """What was asked for needs a package that is not installed."""


class MissingEncoderError(InputError):
    """A model has no encoder for images or for audio."""


class StorageError(WebgemmaError):
    """A browser cannot store a model: there is no space, or it is in use."""


class DeviceError(WebgemmaError):
    """The GPU is missing, lost, out of memory, or refuses a kernel."""


class DeviceLostError(DeviceError):
    """The GPU was reset or removed: the model has to be loaded again."""


class DeviceMemoryError(DeviceError):
    """The GPU has no memory left; `held_nbytes` of it were in use then."""

    def __init__(self, sentence: str, held_nbytes: int, advice: str = "") -> None:
        super().__init__(sentence, advice)
        self.held_nbytes = held_nbytes


class KernelError(WebgemmaError):
    """A kernel is linked or called with something that its WGSL file does not declare."""
