"""The eyes and ears of a Gemma 4: the towers in Ollama's single file or llama.cpp's mmproj."""

from collections.abc import Iterator
from dataclasses import dataclass

from webgemma.errors import GgufError
from webgemma.gemma.metadata import Metadata
from webgemma.gemma.tensors import Wanted, canonical_tensors
from webgemma.gguf.reader import Gguf, TensorInfo

SAMPLE_RATE = 16_000  # of the sound that a model hears
PART_SAMPLES = 30 * SAMPLE_RATE  # what a tower hears at once
RAW_SAMPLES = 640  # of a soft token where there are no layers


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """A picture encoder; without layers it is the 12B's patch embedder."""

    width: int
    layers: int
    heads: int
    ffn: int
    patch: int  # pixels of a patch's side
    pool: int  # patches of a soft token's side
    positions: int  # rows of each axis' position table
    output: int  # width of a soft token
    clipped: bool  # linears clamp what goes in and out
    standardised: bool


@dataclass(frozen=True, slots=True)
class AudioConfig:
    """A sound encoder; without layers it is the 12B's projection of raw frames."""

    width: int
    layers: int
    heads: int
    ffn: int
    features: int  # width of what the projector takes
    output: int  # width of a soft token

    def parts(self, samples: int) -> list[slice]:
        """Where the parts of a longer sound lie: each is heard on its own."""
        return [slice(at, at + PART_SAMPLES) for at in range(0, samples, PART_SAMPLES)]

    def soft_tokens(self, samples: int) -> int:
        """How many placeholders a sound takes: all of its parts, between one pair of markers."""
        if not self.layers:
            return -(-samples // RAW_SAMPLES)
        return sum(_heard(min(samples, x.stop) - x.start) for x in self.parts(samples))


def _heard(samples: int) -> int:
    """Soft tokens of one part: frames of 320 samples every 160, halved twice, rounded up."""
    frames = max(1, (samples - 1) // 160)
    return -(-frames // 4)


@dataclass(frozen=True, slots=True)
class EncoderConfigs:
    """What a file can see and hear."""

    vision: VisionConfig | None
    audio: AudioConfig | None
    nbytes: int  # of their weights

    @classmethod
    def from_gguf(cls, gguf: Gguf) -> "EncoderConfigs":
        """The towers in a model file or in an mmproj; none of them is no error."""
        prefix = "clip." if gguf.metadata.get("general.architecture") == "clip" else "gemma4."
        tensors = canonical_tensors(gguf)
        return cls(
            vision=_vision(gguf, Metadata(gguf, prefix + "vision."), tensors),
            audio=_audio(gguf, Metadata(gguf, prefix + "audio."), tensors),
            nbytes=sum(
                x.nbytes for name, x in tensors.items() if name.startswith(("v.", "a.", "mm."))
            ),
        )


def encoder_nbytes(gguf: Gguf, kind: str) -> int:
    """What the weights of a file's "vision" or "audio" tower take."""
    hearing = kind == "audio"
    return sum(
        tensor.nbytes
        for name, tensor in gguf.tensors.items()
        if name.startswith(("a.", "v.", "mm.")) and name.startswith(("a.", "mm.a.")) == hearing
    )


def vision_tensors(vision: VisionConfig) -> Iterator[Wanted]:
    """All tensors of a picture encoder except the bounds of its clipped linears."""
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
    layers = _blocks(tensors, "v.")
    clamps = "v.clamp_data" in tensors or "v.blk.0.attn_q.input_max" in tensors
    if len(table.shape) != 3 or table.shape[2] != 2:
        raise GgufError(
            f"{gguf.name}: v.position_embd.weight has no table for each of the two axes."
        )
    heads = keys.count("attention.head_count") if layers else 0
    if heads and table.width % (4 * heads):  # each half of a head turns in pairs
        raise GgufError(
            f"{gguf.name}: a vision width of {table.width} cannot be {heads} heads "
            "of a multiple of four."
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
    layers = _blocks(tensors, "a.")
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
            f"{gguf.name}: an audio tower of width {audio.width} cannot have {audio.heads} heads."
        )
    return audio


def audio_tensors(audio: AudioConfig) -> Iterator[Wanted]:
    """All tensors of a sound encoder."""
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
    """The clamped linears of a block."""
    for end in ("", "_1"):
        yield "ffn_up" + end, (width, ffn)
        yield "ffn_down" + end, (ffn, width)
    for part in ("attn_q", "attn_k", "attn_v", "attn_out", "conv_pw2"):
        yield part, (width, width)
    yield "conv_pw1", (width, 2 * width)


def _blocks(tensors: dict[str, TensorInfo], tower: str) -> int:
    """How many blocks there are tensors of, counted without a hole."""
    found = {name.split(".")[2] for name in tensors if name.startswith(tower + "blk.")}
    count = 0
    while str(count) in found:
        count += 1
    return count
