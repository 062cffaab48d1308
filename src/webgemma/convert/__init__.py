"""Conversion of Hugging Face models to GGUF: Gemma, DiffusionGemma, drafters, EmbeddingGemma."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from webgemma.convert.folder import SourceTensor, open_tensors, read_json, read_optional
from webgemma.convert.metadata import HuggingFaceConfig
from webgemma.convert.modules import check_pooling, dense_layers
from webgemma.convert.names import gguf_name
from webgemma.convert.numbers import FLOATS, INTEGERS, cast_floats, cast_integers, plus_one
from webgemma.convert.vocabulary import adds_eos, tokenizer_metadata
from webgemma.errors import GgufError, InputError, ModelNotFoundError
from webgemma.gemma.config import EMBEDDING, GEMMA3, ORDERING
from webgemma.gguf.sources import Bytes
from webgemma.gguf.writer import NewTensor, write_gguf

FORMATS = ("stored", *(name.lower() for name in FLOATS))


def convert(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    format: str = "stored",
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Convert the model in a folder and write it to a GGUF file.

    Matrices are written in the type they are stored in, or in `format` (bf16, f16, f32); vectors
    and the routers of experts become float32. `progress` is called with the bytes done and the
    total.
    """
    if format not in FORMATS:
        raise InputError(f"{format!r} is not a valid format; choose {', '.join(FORMATS)}.")
    source = Path(folder)
    if not source.is_dir():
        raise ModelNotFoundError(f"There is no folder {source}.")
    with ExitStack() as files:
        tensors = _text_tensors(open_tensors(source, files))
        config = read_json(source / "config.json")
        generation = read_optional(source / "generation_config.json") or {}
        model = HuggingFaceConfig(config, generation)
        if model.embeds:
            check_pooling(source)
        if model.architecture == EMBEDDING:
            tensors |= _checked(dense_layers(source, files))
        if model.tied or model.embeds:
            tensors.pop("output.weight", None)  # a copy of the embedding table
        metadata = model.metadata({name: x.shape for name, x in tensors.items()}, source.name)
        vocab = tensors["token_embd.weight"].shape[0]
        ends = generation.get("eos_token_id", config.get("eos_token_id"))
        tokenizer = read_optional(source / "tokenizer.json")
        is_gemma3 = model.architecture in (GEMMA3, EMBEDDING)
        metadata |= tokenizer_metadata(tokenizer, vocab, ends, scored=is_gemma3)
        if model.embeds:
            ending = adds_eos(tokenizer, read_optional(source / "tokenizer_config.json"))
            metadata["tokenizer.ggml.add_eos_token"] = ending
        new_tensors = _new_tensors(tensors, format, progress, add_one=is_gemma3)
        derived = [] if is_gemma3 or model.embeds else [model.rope_factors()]
        write_gguf(out, metadata, [*derived, *new_tensors])


def _text_tensors(stored: Iterator[SourceTensor]) -> dict[str, SourceTensor]:
    """Return the tensors of the text model under their GGUF names."""
    tensors: dict[str, SourceTensor] = {}
    for tensor in stored:
        name = gguf_name(tensor.name)
        if name is None:
            continue
        if name in tensors:
            raise GgufError(f"{tensors[name].name} and {tensor.name} are the same tensor.")
        tensors |= _checked({name: tensor})
    if "token_embd.weight" not in tensors:
        raise GgufError(
            "The folder's files have no embed_tokens.weight, so they have no text model."
        )
    return tensors


def _checked(tensors: dict[str, SourceTensor]) -> dict[str, SourceTensor]:
    """Return the tensors; GgufError if one is stored in a type that is not converted."""
    for name, tensor in tensors.items():
        if tensor.dtype not in (INTEGERS if name == ORDERING else FLOATS):
            raise GgufError(
                f"{tensor.file.name}: the tensor {tensor.name} is stored as {tensor.dtype}; "
                "only models in BF16, F16 or F32 can be converted."
            )
    return tensors


def _new_tensors(
    tensors: dict[str, SourceTensor],
    format: str,
    progress: Callable[[int, int], None] | None,
    *,
    add_one: bool,
) -> Iterator[NewTensor]:
    """Yield the tensors to write, each read and converted when it is written.

    With `add_one`, norms are stored less 1, as Gemma 3 has them."""
    total, done = sum(tensor.nbytes for tensor in tensors.values()), 0

    def data_of(tensor: SourceTensor, target: str) -> Callable[[], Bytes]:
        def data() -> Bytes:
            nonlocal done
            cast = cast_integers if target == "I32" else cast_floats
            converted = cast(tensor.read(), tensor.dtype, target, tensor.name)
            if add_one and tensor.name.endswith("norm.weight"):
                converted = plus_one(converted)
            done += tensor.nbytes
            if progress is not None:
                progress(done, total)
            return converted

        return data

    for name, tensor in tensors.items():
        matrix = len(tensor.shape) > 1 and not name.endswith(".ffn_gate_inp.weight")
        target = tensor.dtype if format == "stored" else format.upper()
        target = target if matrix else "I32" if name == ORDERING else "F32"
        yield NewTensor(name, tensor.shape[::-1], target, data_of(tensor, target))
