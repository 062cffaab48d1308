"""Configurations of the vision and audio encoders in a model file (Ollama) or an mmproj."""

from collections.abc import Iterator
from dataclasses import dataclass

from webgemma.errors import GgufError
from webgemma.gemma.config import GEMMA3
from webgemma.gemma.metadata import Metadata
from webgemma.gemma.tensors import TensorSpec, canonical_tensors
from webgemma.gguf.reader import Gguf, TensorInfo

SAMPLE_RATE = 16_000  # of the audio that models take
SEGMENT_SAMPLES = 30 * SAMPLE_RATE  # samples that the audio encoder takes at once
RAW_SAMPLES = 640  # samples per soft token of an audio encoder without layers


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Vision encoder; without layers it is 12B's patch embedder."""

    width: int
    layers: int
    heads: int
    ffn: int
    patch: int  # pixels per side of a patch
    pool: int  # patches per side of a soft token
    positions: int  # rows of the position table of each axis
    output: int  # width of a soft token
    clipped: bool  # linears clamp their inputs and outputs
    standardised: bool  # the pooled features are shifted and scaled


@dataclass(frozen=True, slots=True)
class AudioConfig:
    """Audio encoder; without layers it is 12B's projection of raw samples."""

    width: int
    layers: int
    heads: int
    ffn: int
    features: int  # width of the projection's input
    output: int  # width of a soft token

    def segments(self, samples: int) -> list[slice]:
        """Return the segments of 30 s, which are encoded separately."""
        return [slice(at, at + SEGMENT_SAMPLES) for at in range(0, samples, SEGMENT_SAMPLES)]

    def soft_tokens(self, samples: int) -> int:
        """Return the number of soft tokens of so many samples, over all segments."""
        if not self.layers:
            return -(-samples // RAW_SAMPLES)
        return sum(_segment_tokens(min(samples, x.stop) - x.start) for x in self.segments(samples))


def _segment_tokens(samples: int) -> int:
    """Return soft tokens of a segment: frames (320 samples every 160) halved twice, rounded up."""
    frames = max(1, (samples - 1) // 160)
    return -(-frames // 4)


@dataclass(frozen=True, slots=True)
class EncoderConfigs:
    """Encoders in a file."""

    vision: VisionConfig | None
    audio: AudioConfig | None
    nbytes: int  # size of their weights

    @classmethod
    def from_gguf(cls, gguf: Gguf) -> "EncoderConfigs":
        """Return the configurations of the encoders in a model file or an mmproj, if any.

        Gemma 3's, which webgemma does not run, does not count."""
        prefix = "clip." if gguf.metadata.get("general.architecture") == "clip" else "gemma4."
        tensors = canonical_tensors(gguf)
        if is_of_gemma3(gguf):
            return cls(None, None, 0)
        return cls(
            vision=_vision(gguf, Metadata(gguf, prefix + "vision."), tensors),
            audio=_audio(gguf, Metadata(gguf, prefix + "audio."), tensors),
            nbytes=sum(
                x.nbytes for name, x in tensors.items() if name.startswith(("v.", "a.", "mm."))
            ),
        )


def is_of_gemma3(gguf: Gguf) -> bool:
    """Return whether a file is a Gemma 3 or the projector (mmproj) of one, a SigLIP."""
    keys = ("general.architecture", "clip.projector_type", "clip.vision.projector_type")
    return any(gguf.metadata.get(key) == GEMMA3 for key in keys)


def encoder_nbytes(gguf: Gguf, kind: str) -> int:
    """Return the size of the weights of a file's "vision" or "audio" encoder."""
    is_audio = kind == "audio"
    return sum(
        tensor.nbytes
        for name, tensor in gguf.tensors.items()
        if name.startswith(("a.", "v.", "mm.")) and name.startswith(("a.", "mm.a.")) == is_audio
    )


def vision_tensors(vision: VisionConfig) -> Iterator[TensorSpec]:
    """Yield all tensors of a vision encoder except the bounds of its clipped linears."""
    width, side = vision.width, vision.patch
    yield "v.position_embd.weight", (width, vision.positions, 2), True
    yield "mm.input_projection.weight", (width, vision.output), True
    if not vision.layers:
        pixels = 3 * side * side
        yield "v.patch_embd.weight", (pixels, width), True
        yield "v.patch_embd.bias", (width,), True
        for number, size in ((1, pixels), (2, width), (3, width)):
            yield f"v.patch_norm.{number}.weight", (size,), True
            yield f"v.patch_norm.{number}.bias", (size,), True
        return
    yield "v.patch_embd.weight", (side, side, 3, width), True
    if vision.standardised:
        yield "v.std_bias", (width,), True
        yield "v.std_scale", (width,), True
    for index in range(vision.layers):
        name = f"v.blk.{index}."
        for norm in ("ln1", "ln2", "attn_post_norm", "ffn_post_norm"):
            yield f"{name}{norm}.weight", (width,), True
        for linear in ("attn_q", "attn_k", "attn_v", "attn_out"):
            yield f"{name}{linear}.weight", (width, width), True
        for norm in ("attn_q_norm", "attn_k_norm"):
            yield f"{name}{norm}.weight", (width // vision.heads,), True
        for linear in ("ffn_gate", "ffn_up"):
            yield f"{name}{linear}.weight", (width, vision.ffn), True
        yield f"{name}ffn_down.weight", (vision.ffn, width), True
        yield f"{name}out_scale.weight", (1,), False


def _vision(gguf: Gguf, keys: Metadata, tensors: dict[str, TensorInfo]) -> VisionConfig | None:
    projection = tensors.get("mm.input_projection.weight")
    table = tensors.get("v.position_embd.weight")
    if projection is None or table is None:
        if any(name.startswith("v.") for name in tensors):
            raise GgufError(
                f"{gguf.name}: vision tensors without v.position_embd.weight and "
                "mm.input_projection.weight; the file is incomplete."
            )
        return None
    layers = _layer_count(tensors, "v.")
    clamps = "v.clamp_data" in tensors or "v.blk.0.attn_q.input_max" in tensors
    if len(table.shape) != 3 or table.shape[2] != 2:
        raise GgufError(
            f"{gguf.name}: v.position_embd.weight must hold one table for each of the two axes."
        )
    heads = keys.count("attention.head_count") if layers else 0
    if heads and table.width % (4 * heads):  # RoPE rotates pairs in each half of a head
        raise GgufError(
            f"{gguf.name}: a vision encoder of width {table.width} cannot have {heads} heads, "
            "whose size must be a multiple of four."
        )
    return VisionConfig(
        width=table.width,
        layers=layers,
        heads=heads,
        ffn=keys.count("feed_forward_length") if layers else 0,
        patch=keys.count("patch_size", 16) if layers else 48,
        pool=keys.count("projector.scale_factor", 3) if layers else 1,
        positions=table.shape[1],
        output=projection.rows,
        clipped=clamps,
        standardised="v.std_scale" in tensors,
    )


def _audio(gguf: Gguf, keys: Metadata, tensors: dict[str, TensorInfo]) -> AudioConfig | None:
    projection = tensors.get("mm.a.input_projection.weight")
    if projection is None:
        if any(name.startswith("a.") for name in tensors):
            raise GgufError(
                f"{gguf.name}: audio tensors without mm.a.input_projection.weight; "
                "the file is incomplete."
            )
        return None
    layers = _layer_count(tensors, "a.")
    audio = AudioConfig(
        width=keys.count("embedding_length") if layers else projection.width,
        layers=layers,
        heads=keys.count("attention.head_count") if layers else 0,
        ffn=keys.count("feed_forward_length") if layers else 0,
        features=projection.width,
        output=projection.rows,
    )
    if layers and audio.width % (2 * audio.heads):
        raise GgufError(
            f"{gguf.name}: an audio encoder of width {audio.width} cannot have {audio.heads} heads."
        )
    return audio


def audio_tensors(audio: AudioConfig) -> Iterator[TensorSpec]:
    """Yield all tensors of an audio encoder."""
    width, ffn = audio.width, audio.ffn
    if not audio.layers:
        yield "mm.a.input_projection.weight", (RAW_SAMPLES, audio.output), True
        return
    yield "a.conv1d.0.weight", (3, 3, 1, 128), True
    yield "a.conv1d.0.norm.weight", (128,), True
    yield "a.conv1d.1.weight", (3, 3, 128, 32), True
    yield "a.conv1d.1.norm.weight", (32,), True
    yield "a.input_projection.weight", (1024, width), True
    yield "a.pre_encode.out.weight", (width, audio.features), True
    yield "a.pre_encode.out.bias", (audio.features,), True
    yield "mm.a.soft_emb_norm.weight", (audio.features,), False
    yield "mm.a.input_projection.weight", (audio.features, audio.output), True
    for block in (f"a.blk.{index}." for index in range(audio.layers)):
        for linear, shape in _audio_linears(width, ffn):
            yield f"{block}{linear}.weight", shape, True
            for bound in ("input_min", "input_max", "output_min", "output_max"):
                yield f"{block}{linear}.{bound}", (1,), False
        yield block + "attn_k_rel.weight", (width, width), True
        yield block + "per_dim_scale.weight", (width // audio.heads,), True
        yield block + "conv_dw.weight", (5, width), True
        for norm in (
            *("ffn_norm", "ffn_post_norm", "ffn_norm_1", "ffn_post_norm_1"),
            *("attn_pre_norm", "attn_post_norm", "conv_norm", "norm_conv", "ln2"),
        ):
            yield f"{block}{norm}.weight", (width,), True


def _audio_linears(width: int, ffn: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the clipped linears of a conformer block and their shapes."""
    for end in ("", "_1"):
        yield "ffn_up" + end, (width, ffn)
        yield "ffn_down" + end, (ffn, width)
    for part in ("attn_q", "attn_k", "attn_v", "attn_out", "conv_pw2"):
        yield part, (width, width)
    yield "conv_pw1", (width, 2 * width)


def _layer_count(tensors: dict[str, TensorInfo], prefix: str) -> int:
    """Return the number of consecutive layers, from 0 on, that the file has tensors of."""
    present = {name.split(".")[2] for name in tensors if name.startswith(prefix + "blk.")}
    count = 0
    while str(count) in present:
        count += 1
    return count
