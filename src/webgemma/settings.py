"""Generation settings, declared once: name, type, default, range and help.

API keywords, command line options, page controls and the GPU's table of settings derive from
`Settings`. To add a setting, declare it here and use it in the kernel and in the reference."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Annotated, Any, Literal, TypedDict, cast, get_args, get_type_hints

from webgemma.errors import InputError
from webgemma.values import real_number, shown, whole_number

MAX_TOP_LOGPROBS = 20
MAX_STEPS = 4096  # of a canvas


@dataclass(frozen=True, slots=True)
class Setting:
    """The declaration of a setting. A default of None leaves the choice to the model."""

    help: str
    default: Any = None
    low: float = -math.inf
    high: float = math.inf
    applies: Literal["all", "sampling", "diffusion"] = "sampling"  # to which kind of model
    on_page: bool = False
    # Filled in from `Settings`:
    name: str = ""
    type: type = float  # int, float, bool, str, or a collection
    choices: tuple[str, ...] = ()  # the values of a str
    optional: bool = False  # whether None is a value

    def check(self, value: Any) -> Any:
        """Return the value in the setting's own type; InputError if it has another or no place."""
        if value is None and self.optional:
            return None
        if self.name == "stop":
            return _stop_strings(value)
        if self.name == "logit_bias":
            return _biases(value)
        if self.choices:
            if not isinstance(value, str) or value not in self.choices:
                names = ", ".join(self.choices[:-1]) + f" or {self.choices[-1]}"
                raise InputError(f"{self.name} is {shown(value)}; it must be {names}.")
            return str(value)
        if self.type is bool:
            if not isinstance(value, bool):
                raise InputError(f"{self.name} is {shown(value)}; it must be True or False.")
            return value
        number = whole_number(value) if self.type is int else real_number(value)
        if number is None or not self.low <= number <= self.high:
            kind = "a whole number" if self.type is int else "a number"
            span = f"of at least {self.low}"
            if self.high < math.inf:
                span = f"between {self.low} and {self.high}"
            raise InputError(f"{self.name} is {shown(value)}; it must be {kind} {span}.")
        return number

    def nearest(self, value: Any) -> Any:
        """Return the value that another program's option means: a number, moved into the range.

        Programs read 64.0 and 64.9 as the whole number 64, and numbers beyond a range as its end;
        InputError for what no program reads."""
        number = real_number(value) if self.type in (int, float) else None
        if number is None:
            return self.check(value)
        moved = min(max(number, self.low), self.high)
        return self.check(int(moved) if self.type is int else moved)


class Settings(TypedDict, total=False):
    """How to generate. Where a setting is left out, the model's default holds, then Gemma's.

    Sampling applies them in llama.cpp's order, which Ollama uses: penalties and bias on the logits,
    the top_k likeliest, of those the ones closest to the expected surprisal that hold typical_p of
    the probability, of those the fewest that hold top_p of it, of those all with at least min_p of
    the likeliest one's, then temperature and the draw. Temperature 0 takes the likeliest token
    after penalties and bias."""

    max_tokens: Annotated[
        int | None,
        Setting("The longest reply, in tokens.", low=0, applies="all", on_page=True),
    ]
    stop: Annotated[
        str | Sequence[str],
        Setting("End the reply before this text; may repeat.", default=(), applies="all"),
    ]
    seed: Annotated[
        int | None,
        Setting("The same seed gives the same text.", None, 0, 2**64 - 1, "all", on_page=True),
    ]
    temperature: Annotated[
        float, Setting("0: always the likeliest token.", 1.0, 0, 100, on_page=True)
    ]
    top_k: Annotated[
        int, Setting("Choose among the k likeliest tokens; 0: all.", 64, 0, 2**31, on_page=True)
    ]
    typical_p: Annotated[
        float,
        Setting("Choose among the tokens whose surprisal is typical.", 1.0, 0, 1, on_page=True),
    ]
    top_p: Annotated[
        float,
        Setting("Choose among the tokens that hold this probability.", 0.95, 0, 1, on_page=True),
    ]
    min_p: Annotated[
        float,
        Setting("Drop tokens below this share of the likeliest one's.", 0.0, 0, 1, on_page=True),
    ]
    repetition_penalty: Annotated[
        float, Setting("Above 1: avoid recent tokens, by a factor.", 1.0, 1e-3, 1e3, on_page=True)
    ]
    presence_penalty: Annotated[
        float,
        Setting("Above 0: avoid recent tokens, by a difference.", 0.0, -1e3, 1e3, on_page=True),
    ]
    frequency_penalty: Annotated[
        float,
        Setting(
            "Above 0: avoid recent tokens, by a difference for each time.",
            0.0,
            -1e3,
            1e3,
            on_page=True,
        ),
    ]
    recent: Annotated[
        int, Setting("Tokens back that the penalties cover; 0: none, -1: all.", 64, -1, 2**31)
    ]
    logit_bias: Annotated[Mapping[int, float], Setting("Added to the logits of tokens.", {})]
    top_logprobs: Annotated[
        int,
        Setting("How many of the likeliest tokens each piece reports.", 0, 0, MAX_TOP_LOGPROBS),
    ]
    speculate: Annotated[
        Literal["auto", "lookup", "mtp", "off"],
        Setting(
            "Check drafts of the next tokens: auto, lookup (of what was said before), mtp (of the "
            "model's drafter), off. It changes the speed only.",
            "auto",
        ),
    ]
    max_drafts: Annotated[int, Setting("Drafts that a step checks, at most.", 7, 1, 8)]
    steps: Annotated[
        int | None,
        Setting("Denoising steps of a canvas, at most.", None, 1, MAX_STEPS, "diffusion"),
    ]
    entropy_bound: Annotated[
        float | None,
        Setting("Entropy that a step may accept, in nats.", None, 0, 1e9, "diffusion"),
    ]
    t_min: Annotated[
        float | None, Setting("Temperature of a canvas's last step.", None, 1e-3, 100, "diffusion")
    ]
    t_max: Annotated[
        float | None, Setting("Temperature of a canvas's first step.", None, 1e-3, 100, "diffusion")
    ]
    watch: Annotated[
        bool, Setting("Report the canvas after every step.", False, applies="diffusion")
    ]


def _declared() -> dict[str, Setting]:
    found = {}
    for name, hint in get_type_hints(Settings, include_extras=True).items():
        type_, declaration = get_args(hint)
        choices = get_args(type_) or (type_,)
        words = choices if all(isinstance(choice, str) for choice in choices) else ()
        plain = next((c for c in choices if c in (int, float, bool)), None)
        own = plain if plain and set(choices) <= {plain, NoneType} else str if words else type_
        optional = NoneType in choices
        found[name] = replace(declaration, name=name, type=own, choices=words, optional=optional)
    return found


SETTINGS: Mapping[str, Setting] = _declared()


def _described(setting: Setting) -> str:
    default = "" if setting.default in (None, (), {}) else f" Gemma's default is {setting.default}."
    only = "DiffusionGemma only. " if setting.applies == "diffusion" else ""
    return f"    - `{setting.name}`: {only}{setting.help}{default}"


Settings.__doc__ = "\n".join(  # for help(Settings) and help(Gemma.chat)
    [f"{Settings.__doc__ or ''}\n", *(_described(setting) for setting in SETTINGS.values())]
)


def applicable(diffusion: bool) -> dict[str, Setting]:
    """Return the settings that mean something to a model that denoises, or to one that samples."""
    kinds = ("all", "diffusion" if diffusion else "sampling")
    return {name: setting for name, setting in SETTINGS.items() if setting.applies in kinds}


def resolve(
    given: Settings, defaults: Settings | None = None, *, diffusion: bool = False
) -> Settings:
    """Return a value for every applicable setting: what is given, the defaults, Gemma's defaults.

    InputError for an unknown setting, one that does not apply, and a value out of its range."""
    known = applicable(diffusion)
    for name in given:
        if name not in SETTINGS:
            raise InputError(
                f"There is no setting {shown(name)}; there are: {', '.join(SETTINGS)}."
            )
        if name not in known:
            kind = "denoises canvases" if diffusion else "samples tokens"
            raise InputError(
                f"{name} does not apply to a model that {kind}; there are: {', '.join(known)}."
            )
    fitting = {name: value for name, value in (defaults or {}).items() if name in known}
    complete = {name: setting.default for name, setting in known.items()} | fitting | {**given}
    checked = {name: setting.check(complete[name]) for name, setting in known.items()}
    return cast(Settings, checked)


def _stop_strings(stops: Any) -> tuple[str, ...]:
    listed = (stops,) if isinstance(stops, str) else stops
    is_list = isinstance(listed, Sequence)
    if not (is_list and all(isinstance(stop, str) and stop for stop in listed)):
        raise InputError(
            f"stop is {shown(stops)}; a stop string must be text of at least one character."
        )
    return tuple(map(str, listed))


def _biases(biases: Any) -> dict[int, float]:
    if not isinstance(biases, Mapping):
        raise InputError(f"logit_bias is {shown(biases)}; it must map token ids to numbers.")
    checked = {}
    for given, bias in biases.items():
        token = _TOKEN.check(given)
        checked[token] = replace(_BIAS, name=f"logit_bias of {token}").check(bias)
    return checked


_TOKEN = Setting("", low=0, high=2**31, name="logit_bias token", type=int)
_BIAS = Setting("", low=-1e9, high=1e9)


def is_greedy(settings: Settings) -> bool:
    """Return whether no random draw takes part in sampling."""
    return settings["temperature"] == 0 or settings["top_k"] == 1


def penalised_tokens(settings: Settings, length: int) -> int:
    """Return how many of the last of `length` tokens the penalties cover."""
    return length if settings["recent"] < 0 else min(settings["recent"], length)
