"""What a model brings along: its context, its chat template's size, Ollama's settings."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, TypedDict

from webgemma.denoising import Denoising
from webgemma.errors import InputError
from webgemma.gemma.config import Config, Diffusion
from webgemma.models import FoundModel

Message = Mapping[str, Any]
DEFAULT_CONTEXT = 32768  # unless more is asked for: the GPU sets its cache aside at once


class Settings(TypedDict, total=False):
    """How to generate; what is left out is the model's own default, then Gemma's."""

    max_tokens: int | None  # None: until the model ends or the context is full
    stop: str | Sequence[str]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    recent: int
    logit_bias: Mapping[int, float]
    seed: int | None
    top_logprobs: int  # how many of the likeliest tokens each piece reports, 20 at most
    steps: int  # at most, for each block: this and what follows are DiffusionGemma's
    entropy_bound: float
    t_min: float
    t_max: float
    watch: bool  # whether pieces with the canvas after each step come, too


DENOISING_NAMES = frozenset({"steps", "entropy_bound", "t_min", "t_max"})
SHARED_NAMES = frozenset({"max_tokens", "stop", "seed"})  # that make sense to every model


def settings_for(config: Config, given: Settings, defaults: Settings) -> Settings:
    """What a user gave after the defaults; InputError for what means nothing to this model."""
    known = Settings.__annotations__.keys()
    diffusion = DENOISING_NAMES | {"watch"}
    fitting = SHARED_NAMES | diffusion if config.diffusion else known - diffusion
    for name in given:
        if name not in known:
            raise InputError(f"There is no setting {name!r}; there are: {', '.join(known)}.")
        if name not in fitting:
            kind = "denoises whole blocks" if config.diffusion else "writes token by token"
            there = ", ".join(key for key in known if key in fitting)
            raise InputError(f"{name} means nothing to a model that {kind}; there are: {there}.")
    kept: Any = {name: value for name, value in defaults.items() if name in fitting}
    return {**kept, **given}


def denoising_of(diffusion: Diffusion, settings: Settings) -> Denoising:
    """The file's schedule, with what a user changed."""
    asked: Any = {name: value for name, value in settings.items() if name in DENOISING_NAMES}
    own = {field.name: getattr(diffusion, field.name) for field in fields(Denoising)}
    return Denoising(**{**own, **asked})


def context_of(config: Config, asked: int | None, default: object) -> int:
    """Positions at most: what is asked for, else the model's default, else a usual amount."""
    if asked is None:
        fitting = isinstance(default, int) and 1 <= default <= config.context
        return default if fitting else min(config.context, DEFAULT_CONTEXT)  # type: ignore[return-value]
    if not 1 <= asked <= config.context:
        raise InputError(
            f"A context of {asked} is not possible; this model's is 1 to {config.context}."
        )
    return asked


def chat_size(found: FoundModel, config: Config) -> Literal["small", "large"]:
    """E2B and E4B, the models with per-layer embeddings, have the small template."""
    renderer = found.ollama.config.get("renderer") if found.ollama else None
    if renderer in ("gemma4-small", "gemma4-large"):
        return "small" if renderer == "gemma4-small" else "large"
    return "small" if config.ple else "large"


# Ollama's name of a parameter -> ours.
_OLLAMA_PARAMS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "repeat_last_n": "recent",
    "stop": "stop",
    "seed": "seed",
    "num_predict": "max_tokens",
}


def ollama_defaults(found: FoundModel) -> tuple[Settings, list[Message], int | None]:
    """Settings, opening messages and context length that an Ollama model brings along."""
    if found.ollama is None:
        return {}, [], None
    params = found.ollama.params
    settings: Any = {ours: params[name] for name, ours in _OLLAMA_PARAMS.items() if name in params}
    for name in ("seed", "max_tokens"):  # negative means unset to Ollama
        if isinstance(settings.get(name), int) and settings[name] < 0:
            settings[name] = None
    system = found.ollama.system
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    context = params.get("num_ctx")
    return settings, opening + list(found.ollama.messages), context
