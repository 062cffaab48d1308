"""The errors a user can meet: each says in a sentence what is wrong, where, and what to do."""


class WebgemmaError(Exception):
    """Base of every error that webgemma raises on purpose."""


class GgufError(WebgemmaError):
    """A model file is damaged, cut short, of another kind, or uses something we cannot read."""


class ModelNotFoundError(WebgemmaError):
    """No model answers to this name or path."""


class InputError(WebgemmaError):
    """A prompt, a message, a token id or an option cannot be used."""


class StorageError(WebgemmaError):
    """A browser cannot store a model: there is no room, or it is in use."""


class DeviceError(WebgemmaError):
    """The GPU is missing, lost, out of memory, or refuses a kernel."""


class DeviceMemoryError(DeviceError):
    """The GPU has no memory left; `held_nbytes` of it were in use then."""

    def __init__(self, sentence: str, held_nbytes: int) -> None:
        super().__init__(sentence)
        self.held_nbytes = held_nbytes
