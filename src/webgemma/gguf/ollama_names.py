"""Names of Ollama's models, such as "gemma4:e2b": read, checked, and shown short."""

import re
from dataclasses import astuple, dataclass

from webgemma.errors import InputError

DEFAULT_HOST = "registry.ollama.ai"
DEFAULT_NAMESPACE = "library"
DEFAULT_TAG = "latest"

_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://")
_PARTS = {  # the rule for each part of a name, for the program and for people
    "host": (r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,349}", "350 letters, digits or _ - . :"),
    "namespace": (r"[A-Za-z0-9_][A-Za-z0-9_-]{0,79}", "80 letters, digits or _ -"),
    "model": (r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}", "80 letters, digits or _ - ."),
    "tag": (r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}", "80 letters, digits or _ - ."),
}


@dataclass(frozen=True, slots=True)
class ModelName:
    """A full and valid model name; `str` gives the short form that Ollama shows."""

    host: str
    namespace: str
    model: str
    tag: str

    def __post_init__(self) -> None:
        for part, (rule, letters) in _PARTS.items():
            value = getattr(self, part)
            if not re.fullmatch(rule, value):
                shown = repr(value if len(value) <= 60 else value[:60] + "…")
                raise InputError(
                    f"Not a model name: its {part} {shown} must be 1 to {letters}, the first a "
                    "letter, digit or _. Write [HOST/][NAMESPACE/]MODEL[:TAG], as in 'gemma4:e2b'."
                )

    @classmethod
    def parse(cls, text: str) -> "ModelName":
        """Read `[scheme://][HOST/][NAMESPACE/]MODEL[:TAG]`; what is left out takes its default."""
        host, namespace, tag = DEFAULT_HOST, DEFAULT_NAMESPACE, DEFAULT_TAG
        if text.rfind(":") > text.rfind("/"):
            text, _, tag = text.rpartition(":")
        text, slash, model = text.rpartition("/")
        if slash:
            text, slash, namespace = text.rpartition("/")
            if slash:
                host = _SCHEME.sub("", text)
        return cls(host, namespace, model, tag)

    def __str__(self) -> str:
        name = f"{self.model}:{self.tag}"
        if self.host != DEFAULT_HOST:
            return f"{self.host}/{self.namespace}/{name}"
        return name if self.namespace == DEFAULT_NAMESPACE else f"{self.namespace}/{name}"

    def folded(self) -> tuple[str, ...]:
        """What Ollama compares: the parts without regard to case."""
        return tuple(part.lower() for part in astuple(self))
