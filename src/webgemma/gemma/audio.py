"""The audio encoder on the device: samples in, soft tokens out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from webgemma.device import Device
from webgemma.errors import DeviceError, InputError
from webgemma.gemma.clipped import EPS, Bounds, ClippedInput, EncoderOps, read_bounds
from webgemma.gemma.encoder_config import (
    RAW_SAMPLES,
    SEGMENT_SAMPLES,
    AudioConfig,
    audio_tensors,
)
from webgemma.gemma.matrices import Matrices, packed_floats
from webgemma.gemma.mel import MelTables, log_mel, raw_frames
from webgemma.gemma.record.matmul import THREADS, UNBOUNDED, Clamp
from webgemma.gemma.record.ops import ROW_THREADS, Ops
from webgemma.gemma.record.rounding import whole_row
from webgemma.gemma.record.staged_plan import Encoded, EncoderWeights, StagedPlan
from webgemma.gemma.tensors import canonical_tensors, check_tensors, read_floats
from webgemma.gguf.reader import Gguf, TensorInfo
from webgemma.graph import Argument, Tensor
from webgemma.progress import Progress, ignore_progress

REACH = 12  # positions that a position attends to: itself and the 11 before it
TAPS = 5  # of the light convolution
CONVOLUTIONS = (("a.conv1d.0", 1), ("a.conv1d.1", 128))  # and their input channels
QKV = ("attn_q", "attn_k", "attn_v")  # all read the same rows
QUERY_SCALE = 1 / math.log(2)
KEY_SCALE = math.log(1 + math.e) / math.log(2)
ATTENTION_TOKENS = 5  # of a workgroup: times the distances, almost as many as it has threads
# Tensors that the device gets in another form, or not at all.
DERIVED = (
    *("conv1d.0.weight", "conv1d.1.weight", "conv_dw.weight", "per_dim_scale.weight"),
    *("ffn_post_norm.weight", "ffn_post_norm_1.weight", "attn_k_rel.weight", "_min", "_max"),
)


class AudioEncoder(EncoderWeights):
    """An audio encoder's weights on a device."""

    def __init__(self, audio: AudioConfig, device: Device, precision: str = "exact") -> None:
        super().__init__(device, audio.layers + 1, precision)
        self.audio = audio
        self.bounds: dict[str, Bounds] = {}  # of clipped linears, by name
        self.distance_keys: dict[str, Tensor] = {}  # of each layer: [REACH, width]
        self.tables = MelTables.upload(self) if audio.layers else None
        self.ones = self.vector_of([1.0] * audio.features)
        self.zeros = self.vector_of([0.0] * audio.features)

    @classmethod
    async def load(
        cls, gguf: Gguf, audio: AudioConfig, device: Device, precision: str = "exact"
    ) -> Self:
        """Load the encoder of an mmproj, or of a file that holds text model and encoders."""
        tensors = canonical_tensors(gguf)
        specs = list(audio_tensors(audio))
        check_tensors(gguf, specs, tensors)
        _check_kernels_fit(gguf, audio)
        encoder = cls(audio, device, precision)
        try:
            loaded = [
                name for name, _, _ in specs if name in tensors and not name.endswith(DERIVED)
            ]
            linears = [
                name.removesuffix(".weight") for name in loaded if len(tensors[name].shape) > 1
            ]
            encoder.bounds = await read_bounds(gguf, linears, tensors)
            for name, stack in _stacks(loaded, tensors, encoder.bounds).items():
                encoder.allocate(name, stack)
                await encoder.load_tensors(gguf, name, stack)
            if audio.layers:
                await encoder._derive(gguf, tensors)
                await encoder._derive_distance_keys(gguf, tensors)
            await encoder.wait_until_loaded()
        except BaseException:
            encoder.close()
            raise
        return encoder

    async def _derive(self, gguf: Gguf, tensors: dict[str, TensorInfo]) -> None:
        """Upload vectors in the order in which kernels read them, and scaled as they are used."""

        async def read(name: str) -> list[float]:
            return await read_floats(gguf, tensors[name + ".weight"])

        def upload(name: str, values: list[float]) -> None:
            self.vectors[name + ".weight"] = self.vector_of(values)

        for name, inputs in CONVOLUTIONS:
            upload(name, _by_taps(await read(name), inputs))
        for layer in (f"a.blk.{index}." for index in range(self.audio.layers)):
            taps = await read(layer + "conv_dw")
            upload(layer + "conv_dw", [tap for i in range(TAPS) for tap in taps[i::TAPS]])
            scales = await read(layer + "per_dim_scale")
            factor = QUERY_SCALE / math.sqrt(len(scales))
            upload(layer + "per_dim_scale", [factor * scale for scale in scales])
            for name in (layer + "ffn_post_norm", layer + "ffn_post_norm_1"):
                upload(name, [0.5 * weight for weight in await read(name)])  # half a feed-forward

    async def _derive_distance_keys(self, gguf: Gguf, tensors: dict[str, TensorInfo]) -> None:
        """Compute W [sin(δ s), cos(δ s)] of every layer for the distances δ = 0 … 11."""
        width, plan = self.audio.width, StagedPlan(self.device)
        try:
            with Matrices(self.device) as weights:
                waves = plan.upload(packed_floats(_waves(width)), "waves")
                waves.shape = (REACH, width)
                ops = Ops(weights, plan.recorder, plan.batch(REACH), REACH, EPS)
                for layer in (f"a.blk.{index}." for index in range(self.audio.layers)):
                    name = layer + "attn_k_rel.weight"
                    weights.allocate(name, [tensors[name]])
                    await weights.load_tensors(gguf, name, [tensors[name]])
                    keys = self.memory.tensor(*waves.shape, label=name)
                    self.distance_keys[layer] = ops.linear(waves, weights.matrices[name], keys)
                await weights.wait_until_loaded()
                await plan.finish()
        finally:
            plan.close()


@dataclass(frozen=True, slots=True)
class Unclamped:
    """The output of a clipped linear that its reader has yet to clamp."""

    values: Tensor
    bounds: Clamp

    def arguments(self, name: str) -> dict[str, Argument]:
        """Return the parameters of a kernel that clamps it."""
        return {f"{name}_low": self.bounds.low, f"{name}_high": self.bounds.high}


class AudioRecorder(EncoderOps):
    """Records the encoding of one segment of so many soft tokens."""

    def __init__(self, encoder: AudioEncoder, plan: StagedPlan, tokens: int) -> None:
        super().__init__(encoder, encoder.bounds, plan.recorder, plan.batch(tokens), tokens)
        self.plan = plan
        self.encoder = encoder
        self.audio = encoder.audio

    def subsample(self, mel: Tensor) -> Tensor:
        """Record two convolutions that halve time and bins, then all bins of a time as one row."""
        frames, bins = mel.shape
        halves = -(-frames // 2)
        (first, _), (second, channels) = CONVOLUTIONS
        x = self.scratch(halves, bins // 2, channels)
        y = self.scratch(self.rows, bins // 4 * 32)
        vector = self.encoder.vector
        self.recorder.call(
            "mel_conv",
            (bins // 2, halves),
            mel=mel,
            W=vector(first + ".weight"),
            y=x,
            frames=frames,
            bins=bins,
            norm=vector(first + ".norm.weight"),
            eps=EPS,
            THREADS=self.row_threads(32),
            CHANNELS=channels,
        )
        self.recorder.call(
            "audio_conv",
            (self.rows,),
            x=x,
            W=vector(second + ".weight"),
            y=y,
            times=halves,
            eps=EPS,
            norm=vector(second + ".norm.weight"),
            IN=channels,
        )
        return self.clipped_linear(y, "a.input_projection")

    async def layers(self, x: Tensor) -> None:
        """Record all layers, in place, each as a stage."""
        names = [f"a.blk.{index}." for index in range(self.audio.layers)]
        h = self.norm(x, self.encoder.vector(names[0] + "ffn_norm.weight"))
        h = self.clamp(h, self.shared_bounds([names[0] + "ffn_up"]))
        for index, name in enumerate(names):
            await self.plan.run(x, h)
            following = names[(index + 1) % len(names)]  # after the last one h is unused
            h = self.layer(name, x, h, following)

    def layer(self, name: str, x: Tensor, h: Tensor, following: str) -> Tensor:
        """Record a conformer block: half a feed-forward, attention, convolution, the other half.

        h is the input of the first half; returned is that of the following block's."""
        forwarded = self.feed_forward(name, h, "")
        readers = [name + part for part in QKV]
        h = self.add(x, forwarded, name + "ffn_post_norm", name + "attn_pre_norm", readers)
        attended = self.attention(name, h)
        conv = [name + "conv_pw1"]
        h = self.add(x, attended, name + "attn_post_norm", name + "conv_norm", conv)
        convolved = self.convolution(name, h)
        h = self.add(x, convolved, "", name + "ffn_norm_1", [name + "ffn_up_1"])
        forwarded = self.feed_forward(name, h, "_1")
        post, end = name + "ffn_post_norm_1", name + "ln2"
        return self.add(x, forwarded, post, following + "ffn_norm", [following + "ffn_up"], end)

    def add(
        self, x: Tensor, y: Unclamped, post: str, then: str, readers: Sequence[str], end: str = ""
    ) -> Tensor:
        """Record x = x + y, or x + rms(y) · post, and then rms(x) · end if there is one, in place.

        Return rms(x) · then, as these linears read it."""
        (h, _), vector = self.input_of(x.shape[1], self.present(readers)), self.encoder.vector
        bounds = self.shared_bounds(readers)
        self.recorder.call(
            "audio_residual",
            (self.rows,),
            **whole_row(h),
            x=x,
            y=y.values,
            eps=EPS,
            **y.arguments("y"),
            post=vector(post + ".weight"),
            end=vector(end + ".weight"),
            next=vector(then + ".weight"),
            h_low=bounds.low,
            h_high=bounds.high,
            THREADS=self.kept_row_threads,
            WIDTH=self.audio.width,
            NORMED=bool(post),
            ENDING=bool(end),
        )
        return h

    def feed_forward(self, name: str, h: Tensor, half: str) -> Unclamped:
        """Record W_down silu(W_up h); `half` is the suffix of its tensors' names."""
        up, down = f"{name}ffn_up{half}", f"{name}ffn_down{half}"
        u = self.unclamped_linear(h, up)
        then, width = self.shared_bounds([down]), self.audio.ffn
        if self.reads_halves(down):
            low, high = u.bounds
            source = {"x": u.values, "x_low": low, "x_high": high, **then._asdict()}
            hidden = self.rounded(width, row_source="silu", **source)
            return self.unclamped_linear(hidden, down)
        self.recorder.call(
            "silu",
            self.vec4_grid(width),
            batch=self.batch,
            x=u.values,
            width=width,
            low=u.bounds.low,
            high=u.bounds.high,
            then_low=then.low,
            then_high=then.high,
        )
        return self.unclamped_linear(u.values, down)

    def attention(self, name: str, h: Tensor) -> Unclamped:
        """Record softmax(cap(q · k + q · r)) v over the last 12 positions, r the distance's key."""
        width, heads = self.audio.width, self.audio.heads
        readers = [name + part for part in QKV]
        raw = self.scratch(self.rows, 3 * width)
        inputs, first = ClippedInput(self, h), 0
        shared = self.shared_bounds(readers) != UNBOUNDED  # then h is clamped
        for reader in self.present(readers):
            x = h if shared else inputs.of(reader)
            self.linear(x, self.weight(reader), raw, first)
            first += self.weight(reader).rows
        arguments: dict[str, Argument] = {}
        for reader in readers:
            arguments |= Unclamped(raw, self.bounds_of(reader).output).arguments(reader[-1])
        out = self.scratch(self.rows, width)
        then = self.shared_bounds([name + "attn_out"])
        self.recorder.call(
            "audio_attention",
            (heads, -(-self.rows // ATTENTION_TOKENS)),
            **arguments,
            batch=self.batch,
            raw=raw,
            r=self.encoder.distance_keys[name],
            out=out,
            q_scale=self.encoder.vector(name + "per_dim_scale.weight"),
            heads=heads,
            k_scale=KEY_SCALE,
            low=then.low,
            high=then.high,
            THREADS=self.row_threads(THREADS),
            HEAD_DIM=width // heads,
            TOKENS=ATTENTION_TOKENS,
        )
        return self.unclamped_linear(out, name + "attn_out")

    def convolution(self, name: str, h: Tensor) -> Unclamped:
        """Record a gated linear unit, five taps in time for each channel, and a channel mix."""
        u = self.unclamped_linear(h, name + "conv_pw1")
        c, _ = self.input_of(h.shape[1], [name + "conv_pw2"])
        then = self.shared_bounds([name + "conv_pw2"])
        self.recorder.call(
            "light_conv",
            (self.rows,),
            **whole_row(c),
            u=u.values,
            eps=EPS,
            **u.arguments("u"),
            taps=self.encoder.vector(name + "conv_dw.weight"),
            norm=self.encoder.vector(name + "norm_conv.weight"),
            h_low=then.low,
            h_high=then.high,
            THREADS=self.kept_row_threads,
            WIDTH=self.audio.width,
        )
        return self.unclamped_linear(c, name + "conv_pw2")

    def project(self, x: Tensor) -> Tensor:
        """Record W rms(x + the bias of the encoder's last linear): [n, output]."""
        encoder, h = self.encoder, self.scratch(*x.shape)
        self.recorder.call(
            "shifted_norm",
            (self.rows,),
            x=x,
            h=h,
            width=x.shape[1],
            eps=EPS,
            shift=encoder.vectors.get("a.pre_encode.out.bias", encoder.zeros),
            w=encoder.vectors.get("mm.a.soft_emb_norm.weight", encoder.ones),
            THREADS=self.row_threads(ROW_THREADS),
        )
        return self.clipped_linear(h, "mm.a.input_projection")

    def unclamped_linear(self, h: Tensor, name: str) -> Unclamped:
        """Record W h, where h is already clamped for this linear."""
        product = self.linear(h, self.weight(name))
        return Unclamped(product, self.bounds_of(name).output)

    def present(self, linears: Sequence[str]) -> list[str]:
        """Return those of these linears that are not stacked under another."""
        return [name for name in linears if name + ".weight" in self.encoder.matrices]

    def shared_bounds(self, linears: Sequence[str]) -> Clamp:
        """Return the bounds of these linears' input; none where they differ."""
        bounds = {self.bounds_of(name).input for name in linears}
        return bounds.pop() if len(bounds) == 1 else UNBOUNDED


class EncodedAudio(Encoded):
    """An encoded segment of audio on the device, until it is closed."""

    def __init__(self, device: Device, mel: Tensor, tokens: Tensor) -> None:
        super().__init__(device, mel, tokens)
        self.mel = mel  # [frames, bins]; without layers the raw frames, [n, 640]
        self.tokens = tokens  # [n, output], what the text model reads


async def encode_audio(
    encoder: AudioEncoder, samples: Any, progress: Progress = ignore_progress
) -> EncodedAudio:
    """Encode at most 30 s of audio: float32 samples at 16 kHz, as a buffer."""
    view = memoryview(samples)
    if not view.nbytes:
        raise InputError("The audio has no samples: there is nothing to encode.")
    if view.nbytes > 4 * SEGMENT_SAMPLES:
        raise InputError(
            f"Audio of {view.nbytes // 4} samples is longer than the 30 s that are encoded at "
            "once; split it into segments."
        )

    async def record(plan: StagedPlan, audio: Tensor) -> None:
        if encoder.tables is None:
            audio.shape = (audio.shape[0] // RAW_SAMPLES, RAW_SAMPLES)
            await plan.finish(audio, AudioRecorder(encoder, plan, audio.shape[0]).project(audio))
            return
        frames = log_mel(plan, encoder.tables, audio)
        recorder = AudioRecorder(encoder, plan, -(-frames.shape[0] // 4))
        x = recorder.subsample(frames)
        await recorder.layers(x)
        projected = recorder.project(recorder.clipped_linear(x, "a.pre_encode.out"))
        await plan.finish(frames, projected)

    data = view.cast("B") if encoder.tables else raw_frames(view.tobytes())
    results = await encoder.encode((view.nbytes,), data, record, progress)
    return EncodedAudio(encoder.device, *results)


def _check_kernels_fit(gguf: Gguf, audio: AudioConfig) -> None:
    """Raise DeviceError for shapes that no Gemma 4 has and that the kernels do not support."""
    size = audio.width // audio.heads if audio.layers else 0
    shapes = {"heads": size, "feed-forward layers": audio.ffn, "features": audio.features}
    for what, count in shapes.items():
        if count % 4:
            raise DeviceError(
                f"{gguf.name}: its audio encoder has {what} of {count}, but the GPU kernels read "
                "four at a time",
                "use device='cpu'",
            )


def _stacks(
    names: Sequence[str], tensors: dict[str, TensorInfo], bounds: dict[str, Bounds]
) -> dict[str, list[TensorInfo]]:
    """Return what is loaded, by its name on the device.

    Queries, keys and values of one format that clamp their input alike are stacked."""
    stacks = {name: [tensors[name]] for name in names}
    for first in [name for name in names if name.endswith(".attn_q.weight")]:
        linears = [first.replace("attn_q.weight", part) for part in QKV]
        stack = [tensors[linear + ".weight"] for linear in linears]
        shared = len({bounds.get(linear, Bounds()).input for linear in linears}) == 1
        if shared and len({tensor.format for tensor in stack}) == 1:
            stacks[first] = stack
            for linear in linears[1:]:
                del stacks[linear + ".weight"]
    return stacks


def _by_taps(weight: list[float], inputs: int) -> list[float]:
    """Reorder [out, inputs, 9] as [inputs / 4, 9, 4, out]: what four channels need is together."""
    at_once = min(4, inputs)
    return [
        value
        for first in range(0, inputs, at_once)
        for tap in range(9)
        for channel in range(first, first + at_once)
        for value in weight[9 * channel + tap :: 9 * inputs]
    ]


def _waves(width: int) -> list[float]:
    """Return [sin(δ s), cos(δ s)] for the distances δ = 0 … 11: [distance, width].

    The speeds s fall from 1 to 1 / 10000 in equal ratios."""
    last = max(1, width // 2 - 1)
    speeds = [10000 ** (-j / last) for j in range(width // 2)]
    return [
        wave(distance * speed)
        for distance in range(REACH)
        for wave in (math.sin, math.cos)
        for speed in speeds
    ]
