"""The options of `webgemma train` that decide what is learned."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, cast, get_type_hints

from webgemma.errors import GgufError, InputError
from webgemma.gemma.config import Config
from webgemma.lora.adapter import TARGET_GROUPS, TARGETS, Adapter, new_adapter
from webgemma.lora.checkpoint import Checkpoint
from webgemma.lora.optimiser import AdamW
from webgemma.lora.schedule import Schedule, Shape
from webgemma.lora.trainer import TrainingOptions


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Their values; a checkpoint has them, too, so that --resume needs none."""

    rank: int
    alpha: float | None
    targets: str
    layers: str | None
    learning_rate: float
    epochs: int
    steps: int | None
    batch: int
    accumulate: int
    max_length: int
    schedule: str
    warmup: float
    dropout: float
    decay: float
    held_out: float
    seed: int
    keep_activations: bool
    precision: str

    def resumed(self, given: Collection[str], checkpoint: Checkpoint) -> TrainSettings:
        """Return the settings of a checkpoint; InputError if one that was given differs."""
        stored, kinds = checkpoint.notes.get("settings"), get_type_hints(TrainSettings)
        if isinstance(stored, dict):
            stored = {"precision": "exact", **stored}  # before there was a choice
        if not isinstance(stored, dict) or stored.keys() != kinds.keys():
            raise GgufError(f"The checkpoint {checkpoint.path} has no settings of this command.")
        for name, value in stored.items():
            kind = bool if isinstance(value, bool) else kinds[name]
            if not isinstance(value, kinds[name]) or (kind is bool) != (kinds[name] is bool):
                raise GgufError(f"The checkpoint {checkpoint.path}: its {name} cannot be used.")
            now = getattr(self, name)
            if name in given and now != value:
                then = "not given" if value is None else value
                raise InputError(
                    f"--{name.replace('_', '-')} is {now}, but the training that "
                    f"{checkpoint.path.parent} holds was begun with {then}: leave the option out, "
                    "or begin anew with --force."
                )
        return TrainSettings(**stored)

    def training_options(self) -> TrainingOptions:
        """Return the options of the trainer."""
        optimiser = AdamW(decay=self.decay)
        given = (self.batch, self.dropout, self.seed, optimiser, not self.keep_activations)
        return TrainingOptions(*given, self.precision)

    def course(self) -> Schedule:
        """Return the schedule."""
        shape = cast(Shape, self.schedule)
        given = (self.learning_rate, self.epochs, self.accumulate, self.warmup, shape)
        return Schedule(*given, self.seed, self.steps)

    def adapter(self, config: Config) -> Adapter:
        """Return the adapter to train."""
        chosen = {"rank": self.rank, "alpha": self.alpha, "layers": _layers(self.layers)}
        return new_adapter(config, _targets(self.targets), **cast(Any, chosen), seed=self.seed)


def _targets(names: str) -> tuple[str, ...]:
    """Return the targets that are named, or those of a group."""
    listed = tuple(name.strip() for name in names.split(",") if name.strip())
    known = (*TARGET_GROUPS, *TARGETS)
    if unknown := [name for name in listed if name not in known]:
        raise InputError(f"There is no target {unknown[0]!r}; there are: {', '.join(known)}.")
    return tuple(target for name in listed for target in TARGET_GROUPS.get(name, (name,)))


def _layers(ranges: str | None) -> set[int] | None:
    """Return the layers of a text like "0-5,9"."""
    if ranges is None:
        return None
    found: set[int] = set()
    for part in ranges.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:\s*-\s*(\d{1,4}))?\s*", part, re.ASCII)
        if match is None:
            raise InputError(f"{part!r} is not a range of layers; write them like 0-5,9.")
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found
