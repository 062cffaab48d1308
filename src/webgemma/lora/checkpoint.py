"""Checkpoints: a file with all that a training needs to continue as if it had not been interrupted.

It holds the adapter's numbers, AdamW's moments and the losses so far, the facts that have to be the
same for the rest (model, data, options, schedule), and a digest of it all."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from webgemma.errors import GgufError, InputError, ModelNotFoundError
from webgemma.gguf.safetensors import NewSafetensor, Safetensors, write_safetensors
from webgemma.gguf.sources import Bytes
from webgemma.lora.adapter import Adapter
from webgemma.lora.data import Example
from webgemma.lora.schedule import MAX_STEPS, Schedule
from webgemma.lora.trainer import TrainingOptions

FORMAT = "webgemma training 1"
_LOSSES, _HELD_OUT_LOSSES = "losses", "held_out_losses"
_DIGEST_CHUNK_NBYTES = 1 << 24

Facts = Mapping[str, Any]

# Facts that are digests: they differ as a whole.
_DIFFERENCES = {
    "model": "the model is another one",
    "adapter": "the adapter has other matrices, ranks or scales",
    "examples": "the examples to train on are not the same",
    "held_out": "the held-out examples are not the same",
}
# Of checkpoints that were written before there was a choice.
_OLDER = {"precision": "exact"}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint says; the numbers stay in its file."""

    path: Path
    step: int  # so many are done
    losses: tuple[float, ...]
    held_out_losses: tuple[float, ...]
    facts: Facts
    notes: Facts  # of who wrote it

    def check(self, facts: Facts) -> None:
        """Raise InputError, which names what differs, unless a training has the same facts."""
        differences = []
        for name, now in facts.items():
            then = self.facts.get(name, _OLDER.get(name))
            if then != now:
                plain = f"{name} is {now}, there it was {str(then)[:40]}"
                differences.append(_DIFFERENCES.get(name, plain))
        if differences:
            raise InputError(
                f"{self.path} cannot be continued with other settings or data: "
                f"{'; '.join(differences)}."
            )


def training_facts(
    adapter: Adapter,
    options: TrainingOptions,
    schedule: Schedule,
    examples: Sequence[Example],
    held_out: Sequence[Example],
) -> dict[str, Any]:
    """Return what has to be the same when a training is continued, except the model."""
    facts: dict[str, Any] = asdict(options)
    facts |= facts.pop("optimiser")
    facts |= {"order_seed" if key == "seed" else key: v for key, v in asdict(schedule).items()}
    facts["adapter"] = _digest(
        f"{name}:{pair.rank}:{pair.inputs}:{pair.outputs}:{pair.scale!r}".encode()
        for name, pair in adapter.pairs.items()
    )
    for name, some in (("examples", examples), ("held_out", held_out)):
        facts[name] = _digest(map(_packed, some))
    return facts


def _packed(example: Example) -> bytes:
    return array("I", (example.line, *example.ids)).tobytes() + bytes(example.supervised)


def write_checkpoint(
    path: str | os.PathLike[str],
    step: int,
    tensors: Sequence[NewSafetensor],
    losses: Sequence[float],
    held_out_losses: Sequence[float],
    facts: Facts,
    notes: Facts | None = None,
) -> None:
    """Write a checkpoint in place of the one before; GgufError, and that one stays, if it fails."""
    stored = [*tensors, _floats(_LOSSES, losses), _floats(_HELD_OUT_LOSSES, held_out_losses)]
    state = json.dumps({"step": step, "facts": dict(facts), "notes": dict(notes or {})})
    parts = ((t.name, t.shape, [t.data]) for t in stored)
    metadata = {"format": FORMAT, "state": state, "sha256": _content_digest(state, parts)}
    write_safetensors(path, stored, metadata)


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read and verify a checkpoint; GgufError if it is damaged or something else."""
    path = Path(path)
    try:
        with Safetensors.open(path) as file:
            return _read(path, file)
    except ModelNotFoundError:
        raise ModelNotFoundError(f"There is no checkpoint {path}.") from None
    except GgufError as error:
        raise GgufError(f"The checkpoint {path} cannot be used: {error}") from None


def _read(path: Path, file: Safetensors) -> Checkpoint:
    found = file.metadata.get("format", "")
    if found != FORMAT:
        raise GgufError(
            "it was written by another version of webgemma."
            if found.startswith("webgemma training")
            else "it is not the checkpoint of a training."
        )
    text = file.metadata.get("state", "")
    parts = ((t.name, t.shape, _chunks(file, t.name, t.nbytes)) for t in file.tensors.values())
    if _content_digest(text, parts) != file.metadata.get("sha256"):
        raise GgufError("its content does not have the digest it was written with; it is damaged.")
    try:
        state = json.loads(text)
        step, facts, notes = (state[key] for key in ("step", "facts", "notes"))
    except (ValueError, KeyError, TypeError, RecursionError):
        raise GgufError("its state cannot be read.") from None
    losses, held_out = _losses(file, _LOSSES), _losses(file, _HELD_OUT_LOSSES)
    if not all(map(isfinite, losses)):
        raise GgufError("its losses are not finite.")
    count = type(step) is int and max(len(losses), len(held_out)) <= step <= MAX_STEPS
    if not count or not isinstance(facts, dict) or not isinstance(notes, dict):
        raise GgufError("its state cannot be that of a training.")
    return Checkpoint(path, step, losses, held_out, facts, notes)


def _floats(name: str, values: Sequence[float]) -> NewSafetensor:
    return NewSafetensor(name, "F64", (len(values),), struct.pack(f"<{len(values)}d", *values))


def _losses(file: Safetensors, name: str) -> tuple[float, ...]:
    if file.dtype(name) != "F64" or len(file.shape(name)) != 1:
        raise GgufError(f"its {name} are not numbers.")
    data = bytes(file.read(name))
    return struct.unpack(f"<{len(data) // 8}d", data)


def _chunks(file: Safetensors, name: str, nbytes: int) -> Iterable[Bytes]:
    for at in range(0, nbytes, _DIGEST_CHUNK_NBYTES):
        yield file.read(name, at, min(_DIGEST_CHUNK_NBYTES, nbytes - at))


def _content_digest(
    state: str, tensors: Iterable[tuple[str, tuple[int, ...], Iterable[Bytes]]]
) -> str:
    digest = hashlib.sha256(state.encode("utf-8", "surrogatepass"))
    for name, shape, chunks in tensors:
        digest.update(f"\n{name} {shape}\n".encode("utf-8", "surrogatepass"))
        for chunk in chunks:
            digest.update(chunk)
    return digest.hexdigest()


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part + b"\n")
    return digest.hexdigest()
