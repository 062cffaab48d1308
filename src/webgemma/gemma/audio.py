"""The ears of Gemma 4 over a Recorder: samples in, soft tokens out, all on the device."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from webgemma.device import Device
from webgemma.errors import DeviceError, InputError
from webgemma.gemma.clipped import EPS, UNLIMITED, Bounds, ClippedSteps, Limits, read_bounds
from webgemma.gemma.encoder_config import PART_SAMPLES, RAW_SAMPLES, AudioConfig, audio_tensors
from webgemma.gemma.matrices import Matrices, packed_floats
from webgemma.gemma.mel import MelTables, log_mel, raw_frames
from webgemma.gemma.record.ops import ROW_THREADS, SOFTWARE_TILE, THREADS, Steps
from webgemma.gemma.record.staged_plan import Bench, Encoded, Tower
from webgemma.gemma.tensors import canonical_tensors, check_tensors, read_floats
from webgemma.gguf.reader import Gguf, TensorInfo
from webgemma.graph import Tensor
from webgemma.progress import Progress, unwatched

REACH = 12  # positions that a position attends to: itself and the 11 before it
TAPS = 5  # of the light convolution
CONVOLVED = (("a.conv1d.0", 1), ("a.conv1d.1", 128))  # and how many channels go in
QKV = ("attn_q", "attn_k", "attn_v")  # all read the same rows
QUERY_SCALE = 1 / math.log(2)
KEY_SCALE = math.log(1 + math.e) / math.log(2)
ATTENTION_TOKENS = 5  # of a workgroup: with each distance, almost as many as it has threads
# What the device gets in another form, or not at all.
DERIVED = (
    *("conv1d.0.weight", "conv1d.1.weight", "conv_dw.weight", "per_dim_scale.weight"),
    *("ffn_post_norm.weight", "ffn_post_norm_1.weight", "attn_k_rel.weight", "_min", "_max"),
)


class Ears(Tower):
    """An audio tower's weights on a device."""

    def __init__(self, audio: AudioConfig, device: Device) -> None:
        super().__init__(device, steps=audio.layers + 1)
        self.audio = audio
        self.bounds: dict[str, Bounds] = {}  # of clipped linears, by name
        self.distance_keys: dict[str, Tensor] = {}  # of each block: [REACH, width]
        self.tables = MelTables.on(self) if audio.layers else None
        self.ones = self.vector_of([1.0] * audio.features)
        self.zeros = self.vector_of([0.0] * audio.features)

    @classmethod
    async def load(cls, gguf: Gguf, audio: AudioConfig, device: Device) -> Self:
        """Bring the tower of an mmproj, or of a file that holds text and towers, to a device."""
        tensors = canonical_tensors(gguf)
        wanted = list(audio_tensors(audio))
        check_tensors(gguf, wanted, tensors)
        _check_kernels_fit(gguf, audio)
        ears = cls(audio, device)
        try:
            for name, _, _ in wanted:
                if name in tensors and not name.endswith(DERIVED):
                    ears.reserve_tensors(name, [tensors[name]])
                    await ears.fill_tensors(gguf, name, [tensors[name]])
            linears = [name.removesuffix(".weight") for name in ears.matrices]
            ears.bounds = await read_bounds(gguf, linears, tensors)
            if audio.layers:
                await ears._derive(gguf, tensors)
                await ears._derive_distance_keys(gguf, tensors)
            await ears.settle()
        except BaseException:
            ears.close()
            raise
        return ears

    async def _derive(self, gguf: Gguf, tensors: dict[str, TensorInfo]) -> None:
        """Vectors in the order in which kernels read them, and scaled as they are used."""

        async def read(name: str) -> list[float]:
            return await read_floats(gguf, tensors[name + ".weight"])

        def keep(name: str, values: list[float]) -> None:
            self.vectors[name + ".weight"] = self.vector_of(values)

        for name, inputs in CONVOLVED:
            keep(name, _by_taps(await read(name), inputs))
        for block in (f"a.blk.{index}." for index in range(self.audio.layers)):
            taps = await read(block + "conv_dw")
            keep(block + "conv_dw", [tap for i in range(TAPS) for tap in taps[i::TAPS]])
            scales = await read(block + "per_dim_scale")
            factor = QUERY_SCALE / math.sqrt(len(scales))
            keep(block + "per_dim_scale", [factor * scale for scale in scales])
            for name in (block + "ffn_post_norm", block + "ffn_post_norm_1"):
                keep(name, [0.5 * weight for weight in await read(name)])  # half a feed-forward

    async def _derive_distance_keys(self, gguf: Gguf, tensors: dict[str, TensorInfo]) -> None:
        """W [sin(δ s), cos(δ s)] of every layer for the distances δ = 0 … 11."""
        width, bench = self.audio.width, Bench(self.device)
        try:
            with Matrices(self.device) as passing:
                waves = bench.put(packed_floats(_waves(width)), "waves")
                waves.shape = (REACH, width)
                steps = Steps(passing, bench.recorder, bench.state(REACH), REACH, EPS)
                for block in (f"a.blk.{index}." for index in range(self.audio.layers)):
                    name = block + "attn_k_rel.weight"
                    passing.reserve_tensors(name, [tensors[name]])
                    await passing.fill_tensors(gguf, name, [tensors[name]])
                    keys = Tensor(waves.shape, waves.nbytes, self.keep(waves.nbytes, name))
                    self.distance_keys[block] = steps.linear(waves, passing.matrices[name], keys)
                await passing.settle()
                await bench.finish()
        finally:
            bench.clear()


@dataclass(frozen=True, slots=True)
class Loose:
    """What a clipped linear made; who reads it has yet to hold it between limits."""

    values: Tensor
    limits: Limits


class AudioRecorder(ClippedSteps):
    """Records what becomes of one sound of so many soft tokens."""

    def __init__(self, ears: Ears, bench: Bench, tokens: int) -> None:
        super().__init__(ears, ears.bounds, bench.recorder, bench.state(tokens), tokens)
        self.bench = bench
        self.ears = ears
        self.audio = ears.audio

    def subsample(self, mel: Tensor) -> Tensor:
        """Two convolutions, each halving time and bins, then all bins of a time in one vector."""
        frames, bins = mel.shape
        halves = -(-frames // 2)
        (first, _), (second, channels) = CONVOLVED
        x = self.recorder.scratch(halves, bins // 2, channels)
        y = self.recorder.scratch(self.batch, bins // 4 * 32)
        vector = self.ears.vector
        self.call(
            "mel_convolve",
            (bins // 2, halves),
            [frames, bins, EPS],
            *(mel, vector(first + ".weight"), vector(first + ".norm.weight"), x),
            pieces=("sum",),
            THREADS=self.row_threads(32),
            CHANNELS=channels,
        )
        self.call(
            "convolve",
            (self.batch,),
            [halves, EPS],
            *(x, vector(second + ".weight"), vector(second + ".norm.weight"), y),
            IN=channels,
        )
        return self.clipped(y, "a.input_projection")

    async def body(self, x: Tensor) -> None:
        """All layers, in place."""
        names = [f"a.blk.{index}." for index in range(self.audio.layers)]
        h = self.norm(x, names[0] + "ffn_norm.weight")
        h = self.clip(h, self.agreed([names[0] + "ffn_up"]))
        for index, name in enumerate(names):
            await self.bench.run(x, h)
            following = names[(index + 1) % len(names)]  # after the last one nobody reads h
            h = self.block(name, x, h, following)

    def block(self, name: str, x: Tensor, h: Tensor, following: str) -> Tensor:
        """A conformer block: half a feed-forward, attention, convolution, the other half.

        h is what the first half reads; given back is what that of the following block reads."""
        f = self.feed_forward(name, h, "")
        readers = [name + part for part in QKV]
        h = self.add(x, f, name + "ffn_post_norm", name + "attn_pre_norm", readers)
        a = self.attention(name, h)
        h = self.add(x, a, name + "attn_post_norm", name + "conv_norm", [name + "conv_pw1"])
        c = self.convolution(name, h)
        h = self.add(x, c, "", name + "ffn_norm_1", [name + "ffn_up_1"])
        f = self.feed_forward(name, h, "_1")
        post, end = name + "ffn_post_norm_1", name + "ln2"
        return self.add(x, f, post, following + "ffn_norm", [following + "ffn_up"], end)

    def add(
        self, x: Tensor, y: Loose, post: str, then: str, readers: Sequence[str], end: str = ""
    ) -> Tensor:
        """x = x + y, or x + rms(y) · post, and then rms(x) · end if there is one, in place.

        Gives rms(x) · then, as these linears read it."""
        h = self.recorder.scratch(*x.shape)
        vectors = [self.ears.vector(name + ".weight") for name in (post, end, then)]
        self.call(
            "sound_residual",
            (self.batch,),
            [EPS, *y.limits, *self.agreed(readers)],
            *(x, y.values, *vectors, h),
            pieces=("sum",),
            THREADS=self._keeping_threads(),
            WIDTH=self.audio.width,
            NORMED=int(bool(post)),
            ENDING=int(bool(end)),
        )
        return h

    def feed_forward(self, name: str, h: Tensor, which: str) -> Loose:
        """W_down silu(W_up h); `which` of the two is the end of its tensors' names."""
        up, down = f"{name}ffn_up{which}", f"{name}ffn_down{which}"
        u = self.loose(h, up)
        params = [self.audio.ffn, *u.limits, *self.agreed([down])]
        grid = self.fours(self.audio.ffn)
        self.call("silu", grid, params, self.state, u.values, pieces=("state", "silu"))
        return self.loose(u.values, down)

    def attention(self, name: str, h: Tensor) -> Loose:
        """Each position over the last 12: softmax(cap(q · k + q · r)) v, r the distance's key."""
        width, heads = self.audio.width, self.audio.heads
        readers = [name + part for part in QKV]
        raw = self.recorder.scratch(self.batch, 3 * width)
        limits: list[float] = []
        for number, reader in enumerate(readers):
            bounds = self.bounds_of(reader)
            x = h if bounds.input == self.agreed(readers) else self.clip(h, bounds.input)
            self.linear(x, self.ears.matrices[reader + ".weight"], raw, number * width)
            limits += bounds.output
        out = self.recorder.scratch(self.batch, width)
        scales = self.ears.vector(name + "per_dim_scale.weight")
        self.call(
            "sound_attention",
            (heads, -(-self.batch // ATTENTION_TOKENS)),
            [heads, KEY_SCALE, *limits, *self.agreed([name + "attn_out"])],
            *(self.state, raw, scales, self.ears.distance_keys[name], out),
            pieces=("state",),
            THREADS=self.row_threads(THREADS),
            HEAD_DIM=width // heads,
            TOKENS=ATTENTION_TOKENS,
        )
        return self.loose(out, name + "attn_out")

    def convolution(self, name: str, h: Tensor) -> Loose:
        """A gated linear unit, five taps in time for each channel, and a mix of the channels."""
        u = self.loose(h, name + "conv_pw1")
        c = self.recorder.scratch(*h.shape)
        vectors = [self.ears.vector(f"{name}{part}.weight") for part in ("conv_dw", "norm_conv")]
        self.call(
            "light_convolve",
            (self.batch,),
            [EPS, *u.limits, *self.agreed([name + "conv_pw2"])],
            *(u.values, *vectors, c),
            pieces=("sum", "silu"),
            THREADS=self._keeping_threads(),
            WIDTH=self.audio.width,
        )
        return self.loose(c, name + "conv_pw2")

    def project(self, x: Tensor) -> Tensor:
        """W rms(x + the bias of the tower's last linear): into the width of the text model."""
        ears = self.ears
        h = self.recorder.scratch(*x.shape)
        shift = ears.vectors.get("a.pre_encode.out.bias", ears.zeros)
        weights = ears.vectors.get("mm.a.soft_emb_norm.weight", ears.ones)
        self.call(
            "shifted_norm",
            (self.batch,),
            [x.shape[1], EPS],
            *(x, shift, weights, h),
            pieces=("sum",),
            THREADS=self.row_threads(ROW_THREADS),
        )
        return self.clipped(h, "mm.a.input_projection")

    def loose(self, h: Tensor, name: str) -> Loose:
        """W h, where h is already as this linear reads it."""
        product = self.linear(h, self.ears.matrices[name + ".weight"])
        return Loose(product, self.bounds_of(name).output)

    def agreed(self, linears: Sequence[str]) -> Limits:
        """Between which these linears take what they read; no limits where they differ."""
        limits = {self.bounds_of(name).input for name in linears}
        return limits.pop() if len(limits) == 1 else UNLIMITED

    def _keeping_threads(self) -> int:
        """Of a workgroup whose threads keep their shares of a row."""
        return SOFTWARE_TILE if self.software else ROW_THREADS


class Sound(Encoded):
    """What a sound has become on the device, until it is closed."""

    def __init__(self, device: Device, mel: Tensor, tokens: Tensor) -> None:
        super().__init__(device, mel, tokens)
        self.mel = mel  # [frames, bins]; without layers the raw frames, [n, 640]
        self.tokens = tokens  # [n, output], what the text model reads


async def hear(ears: Ears, samples: Any, progress: Progress = unwatched) -> Sound:
    """Have the device hear a sound of at most 30 s: float32 samples at 16 kHz, as a buffer."""
    view = memoryview(samples)
    if not view.nbytes:
        raise InputError("There is nothing to hear: the sound has no samples.")
    if view.nbytes > 4 * PART_SAMPLES:
        raise InputError(
            f"A sound of {view.nbytes // 4} samples is longer than the 30 s that ears hear at "
            "once; give them its parts."
        )

    async def record(bench: Bench, sound: Tensor) -> None:
        if ears.tables is None:
            sound.shape = (sound.shape[0] // RAW_SAMPLES, RAW_SAMPLES)
            await bench.finish(sound, AudioRecorder(ears, bench, sound.shape[0]).project(sound))
            return
        frames = log_mel(bench, ears.tables, sound)
        recorder = AudioRecorder(ears, bench, -(-frames.shape[0] // 4))
        x = recorder.subsample(frames)
        await recorder.body(x)
        await bench.finish(frames, recorder.project(recorder.clipped(x, "a.pre_encode.out")))

    data = view.cast("B") if ears.tables else raw_frames(view.tobytes())
    return Sound(ears.device, *await ears.work((view.nbytes,), data, record, progress))


def _check_kernels_fit(gguf: Gguf, audio: AudioConfig) -> None:
    """Refuse shapes that no Gemma 4 has and that the kernels would compute wrongly."""
    size = audio.width // audio.heads if audio.layers else 0
    shapes = {"heads": size, "feed-forward layers": audio.ffn, "features": audio.features}
    for what, count in shapes.items():
        if count % 4:
            raise DeviceError(
                f"{gguf.name}: its ears have {what} of {count}, but the GPU reads four at a time; "
                "use device='cpu'."
            )


def _by_taps(weight: list[float], inputs: int) -> list[float]:
    """[out, inputs, 9] as [inputs / 4, 9, 4, out]: what four channels need lies together."""
    four = min(4, inputs)
    return [
        value
        for first in range(0, inputs, four)
        for tap in range(9)
        for channel in range(first, first + four)
        for value in weight[9 * channel + tap :: 9 * inputs]
    ]


def _waves(width: int) -> list[float]:
    """[sin(δ s), cos(δ s)] for the distances δ = 0 … 11: [distance, width].

    The speeds s fall from 1 to 1 / 10000 in equal ratios."""
    last = max(1, width // 2 - 1)
    speeds = [10000 ** (-j / last) for j in range(width // 2)]
    return [
        wave(distance * speed)
        for distance in range(REACH)
        for wave in (math.sin, math.cos)
        for speed in speeds
    ]
