"""The eyes of Gemma 4 over a Recorder: pixels in, soft tokens out, all on the device."""

import math
import struct
from dataclasses import dataclass, replace
from typing import Self

from webgemma.device import Device, Limits
from webgemma.errors import DeviceError, GgufError
from webgemma.gemma.attention import EVERYTHING, Heads, attend
from webgemma.gemma.clipped import EPS, Bounds, ClippedSteps, read_bounds
from webgemma.gemma.encoder_config import VisionConfig, vision_tensors
from webgemma.gemma.image_resize import check_pixels, resized
from webgemma.gemma.matrices import whole_words
from webgemma.gemma.record.ops import ROW_THREADS
from webgemma.gemma.record.staged_plan import Bench, Encoded, Tower
from webgemma.gemma.tensors import canonical_tensors, check_tensors, read_floats
from webgemma.gguf.reader import Gguf, TensorInfo
from webgemma.graph import Tensor
from webgemma.images import RgbImage
from webgemma.progress import Progress, unwatched

LAYER_NORM_EPS = 1e-5  # of the 12B's patch embedder
ROPE_BASE = 100.0
# The order in which `v.clamp_data` keeps the bounds of a block's linears.
CLIPPED = ("attn_q", "attn_k", "attn_v", "attn_out", "ffn_gate", "ffn_up", "ffn_down")
HEAD_DIMS = (16, 24, 32, 64, 72, 128)  # that attention_prefill.wgsl can cut up


@dataclass(frozen=True, slots=True)
class Looks:
    """How sight_attention.wgsl is cut: the size of a head, and the queries of a workgroup."""

    head_dim: int
    queries: int

    @classmethod
    def within(cls, head_dim: int, limits: Limits) -> "Looks | None":
        """The most queries that a workgroup has memory and threads for."""
        for queries in (64, 48, 32, 24, 16):
            looks = cls(head_dim, queries)
            fits = looks.nbytes <= limits.workgroup_nbytes
            if fits and looks.threads <= limits.workgroup_threads:
                return looks
        return None

    @property
    def threads(self) -> int:
        """Each has four queries and eight keys."""
        return self.queries // 4 * self.head_dim // 8

    @property
    def slice_fours(self) -> int:
        """Fours of dimensions that the threads bring at once, one each for four queries or keys."""
        fours = self.head_dim // 4
        most = self.threads // (self.queries // 4 + fours)
        return next(n for n in range(most, 0, -1) if fours % n == 0)

    @property
    def nbytes(self) -> int:
        """Of a workgroup's memory."""
        query_line, key_line = self.queries // 4 + 1, self.head_dim // 4 + 1
        slices = 8 * self.slice_fours * (query_line + key_line)
        return 16 * (max(slices, self.head_dim * query_line) + self.threads)

    @property
    def constants(self) -> dict[str, int]:
        """As sight_attention.wgsl names them."""
        return {
            "HEAD_DIM": self.head_dim,
            "QUERIES": self.queries,
            "SLICE_FOURS": self.slice_fours,
            "THREADS": self.threads,
        }


class Eyes(Tower):
    """A vision tower's weights on a device."""

    def __init__(self, vision: VisionConfig, device: Device) -> None:
        super().__init__(device, steps=vision.layers + 1)
        self.vision = vision
        self.bounds: dict[str, Bounds] = {}  # of clipped linears, by name
        self.head_norms: dict[int, Tensor] = {}  # of each layer: q_norm, then k_norm
        self.turns = self.tensor(_turns(vision), "turns", 1) if vision.layers else self.one
        self.ones = self.vector_of([1.0] * vision.width)

    @classmethod
    async def load(cls, gguf: Gguf, vision: VisionConfig, device: Device) -> Self:
        """Bring the tower of an mmproj, or of a file that holds text and towers, to a device."""
        tensors = canonical_tensors(gguf)
        check_tensors(gguf, vision_tensors(vision), tensors)
        _check_kernels_fit(gguf, vision)
        eyes = cls(vision, device)
        try:
            await eyes._derive(gguf, tensors)
            for name, stack in _stacks(vision, tensors, eyes.bounds).items():
                eyes.reserve_tensors(name, stack)
                await eyes.fill_tensors(gguf, name, stack)
            await eyes.settle()
        except BaseException:
            eyes.close()
            raise
        return eyes

    async def _derive(self, gguf: Gguf, tensors: dict[str, TensorInfo]) -> None:
        for index in range(self.vision.layers):
            name = f"v.blk.{index}."
            norms = await read_floats(gguf, tensors[name + "attn_q_norm.weight"])
            norms += await read_floats(gguf, tensors[name + "attn_k_norm.weight"])
            self.head_norms[index] = self.vector_of(norms)
        if self.vision.clipped:
            self.bounds = await _bounds(gguf, self.vision, tensors)


class VisionRecorder(ClippedSteps):
    """Records what becomes of one picture of so many patches."""

    def __init__(self, eyes: Eyes, bench: Bench, columns: int, rows: int) -> None:
        state = bench.state(columns * rows)
        super().__init__(eyes, eyes.bounds, bench.recorder, state, columns * rows)
        self.bench = bench
        self.eyes = eyes
        self.vision = eyes.vision
        self.columns, self.rows = columns, rows  # patches

    def embed(self, pixels: Tensor, x_ids: Tensor, y_ids: Tensor) -> Tensor:
        """W (2 p − 1) + X[x] + Y[y]: [patches, width]."""
        width, large = self.vision.width, not self.vision.layers
        p = self.patches(pixels, 1.0 if large else 2.0, 0.0 if large else -1.0)
        if large:  # norm₂(W norm₁(p) + b)
            p = self.layer_norm(p, 1)
        x = self.linear(p, self.eyes.matrices["v.patch_embd.weight"])
        if large:
            x = self.layer_norm(x, 2, "v.patch_embd.bias")
        table = self.eyes.matrices["v.position_embd.weight"]
        added = (self.rows_of(table, x_ids), self.rows_of(table, y_ids), x)
        self.call("sum_rows", self.fours(width), [width], self.state, *added, pieces=("state",))
        return self.layer_norm(x, 3) if large else x

    def patches(self, pixels: Tensor, scale: float, shift: float) -> Tensor:
        """The picture cut up, each patch colour by colour: [patches, 3 · side²]."""
        side = self.vision.patch
        p = self.recorder.scratch(self.batch, 3 * side * side)
        self.call(
            "patches",
            self.fours(side * side),
            [self.columns, scale, shift],
            *(self.state, pixels, p),
            pieces=("state",),
            SIDE=side,
        )
        return p

    async def body(self, x: Tensor) -> None:
        """All layers, in place."""
        for index in range(self.vision.layers):
            await self.bench.run(x)
            name = f"v.blk.{index}."
            a = self.attention(index, self.norm(x, name + "ln1.weight"))
            n = self.residual(x, a, name + "attn_post_norm.weight", name + "ln2.weight")
            f = self.feed_forward(name, n)
            scale = name + "out_scale.weight"
            self.residual(x, f, name + "ffn_post_norm.weight", scale=scale)

    def attention(self, index: int, h: Tensor) -> Tensor:
        """softmax(q kᵀ) v, every patch seeing every other."""
        vision, name = self.vision, f"v.blk.{index}."
        size = vision.width // vision.heads
        raw = self.recorder.scratch(self.batch, 3 * vision.width)
        first, limits = 0, list[float]()
        for part in CLIPPED[:3]:
            bounds = self.bounds_of(name + part)
            weight = self.eyes.matrices.get(f"{name}{part}.weight")
            if weight is not None:  # else it is on top of the first one
                self.linear(self.clip(h, bounds.input), weight, raw, first)
                first += weight.rows
            limits += bounds.output
        q, k, v = (self.recorder.scratch(self.batch, vision.width) for _ in range(3))
        self.call(
            "sight_heads",
            (3 * vision.heads, self.batch),
            [vision.heads, self.columns, EPS, *limits],
            *(self.state, raw, self.eyes.head_norms[index], self.eyes.turns, q, k, v),
            pieces=("sum", "state", "rope"),
            HEAD_DIM=size,
            THREADS=self.row_threads(32),
        )
        return self.clipped(self.look(q, k, v), name + "attn_out")

    def look(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """softmax(q kᵀ) v: [patches, width]."""
        heads, size = self.vision.heads, self.vision.width // self.vision.heads
        looks = None if self.software else Looks.within(size, self.eyes.device.limits)
        if looks is None:
            kind = Heads(heads, heads, size)
            return attend(self, q, (k, v), kind, self.batch, EVERYTHING, "kv_f32", "sees_all")
        out = self.recorder.scratch(*q.shape)
        grid = (heads, -(-self.batch // looks.queries))
        tensors = (self.state, q, k, v, out)
        pieces = ("state",)
        self.call("sight_attention", grid, [heads], *tensors, pieces=pieces, **looks.constants)
        return out

    def feed_forward(self, name: str, n: Tensor) -> Tensor:
        """W_down(gelu(W_gate n) · W_up n)."""
        gate, ffn = self.clipped(n, name + "ffn_gate"), self.vision.ffn
        if f"{name}ffn_up.weight" in self.eyes.matrices:
            hidden = self.geglu(gate, ffn, self.clipped(n, name + "ffn_up"), ffn, 0, ffn)
        else:  # it is on top of the gate
            hidden = self.geglu(gate, 2 * ffn, gate, 2 * ffn, ffn, ffn)
        return self.clipped(hidden, name + "ffn_down")

    def layer_norm(self, x: Tensor, number: int, shift: str = "") -> Tensor:
        """(y − mean) / √(variance + eps), times the weight, plus the bias; y = x + shift."""
        name = f"v.patch_norm.{number}."
        h = self.recorder.scratch(*x.shape)
        vectors = [self.eyes.vector(each) for each in (shift, name + "weight", name + "bias")]
        self.call(
            "layer_norm",
            (self.batch,),
            [x.shape[1], LAYER_NORM_EPS],
            *(self.state, x, *vectors, h),
            pieces=("sum", "state"),
            THREADS=self.row_threads(ROW_THREADS),
            SHIFTED=int(bool(shift)),
        )
        return h


class ProjectionRecorder(VisionRecorder):
    """Records the end of the way, where a soft token is what was a square of patches."""

    def pool(self, x: Tensor) -> Tensor:
        """√width · the mean of each square of pool × pool patches, standardised: [n, width]."""
        vision, vector = self.vision, self.eyes.vector
        if not vision.layers:
            return x
        h = self.recorder.scratch(self.batch, vision.width)
        self.call(
            "pool",
            self.fours(vision.width),
            [vision.width, self.columns, math.sqrt(vision.width)],
            *(self.state, x, vector("v.std_bias"), vector("v.std_scale"), h),
            pieces=("state",),
            POOL=vision.pool,
            STANDARDISED=int(vision.standardised),
        )
        return h

    def project(self, pooled: Tensor) -> Tensor:
        """W rms(pooled): [n, output]."""
        h = self.recorder.scratch(*pooled.shape)
        self.call(
            "norm",
            (self.batch,),
            [pooled.shape[1], EPS],
            *(self.state, pooled, self.eyes.ones, h),
            pieces=("sum", "state", "put_float"),
            THREADS=self.row_threads(ROW_THREADS),
        )
        return self.clipped(h, "mm.input_projection")


class Sight(Encoded):
    """What a picture has become on the device, until it is closed."""

    def __init__(self, device: Device, pooled: Tensor, tokens: Tensor) -> None:
        super().__init__(device, pooled, tokens)
        self.pooled = pooled  # [n, width], what the tower makes of it
        self.tokens = tokens  # [n, output], what the text model reads


async def see(
    eyes: Eyes, picture: RgbImage, width: int, height: int, progress: Progress = unwatched
) -> Sight:
    """Have the device look at a picture in a size that the tower takes."""
    vision, size = eyes.vision, (picture.width, picture.height)
    check_pixels(eyes.device, *size)

    async def record(bench: Bench, rgb: Tensor) -> None:
        columns, rows = width // vision.patch, height // vision.patch
        pixels = resized(bench, rgb, size, (width, height))
        first = VisionRecorder(eyes, bench, columns, rows)
        x = first.embed(pixels, *_places(bench, vision, columns, rows))
        await first.body(x)
        columns, rows = columns // vision.pool, rows // vision.pool
        last = ProjectionRecorder(eyes, bench, columns, rows)
        pooled = last.pool(x)
        await bench.finish(pooled, last.project(pooled))

    made = await eyes.work((*size, width, height), whole_words(picture.rgb), record, progress)
    return Sight(eyes.device, *made)


def _check_kernels_fit(gguf: Gguf, vision: VisionConfig) -> None:
    """Refuse shapes that no Gemma 4 has and that the kernels would compute wrongly."""
    size = vision.width // vision.heads if vision.layers else HEAD_DIMS[0]
    if size not in HEAD_DIMS:
        raise DeviceError(
            f"{gguf.name}: its eyes have heads of {size} dimensions, for which the GPU has no "
            "kernel; use device='cpu'."
        )
    for what, count in (("patches", vision.patch), ("feed-forward layers", vision.ffn)):
        if count % 4:
            raise DeviceError(
                f"{gguf.name}: its eyes have {what} of {count}, but the GPU reads four at a time; "
                "use device='cpu'."
            )


def _places(bench: Bench, vision: VisionConfig, columns: int, rows: int) -> tuple[Tensor, Tensor]:
    """For each patch its row of the table of columns, and of the table of rows behind it."""
    x = list(range(columns)) * rows
    y = [vision.positions + row for row in range(rows) for _ in range(columns)]
    tables = [bench.put(struct.pack(f"<{len(ids)}I", *ids), "places") for ids in (x, y)]
    return tables[0], tables[1]


def _stacks(
    vision: VisionConfig, tensors: dict[str, TensorInfo], bounds: dict[str, Bounds]
) -> dict[str, list[TensorInfo]]:
    """What is brought to the device, by its name there: alike matrices that read the same go on top
    of each other, under the name of the first, to be multiplied at once."""
    stacks = {
        name: [_as_rows(name, tensors[name])]
        for name, _, _ in vision_tensors(vision)
        if name in tensors
    }
    for index in range(vision.layers):
        for parts in (CLIPPED[:3], CLIPPED[4:6]):
            names = [f"v.blk.{index}.{part}" for part in parts]
            limits = [bounds.get(name, Bounds()) for name in names]
            # What comes out of q, k and v is held later, each by itself.
            held = {each.input if parts[0] == "attn_q" else each for each in limits}
            stack = [stacks[name + ".weight"][0] for name in names]
            if len(held) == 1 and len({each.format for each in stack}) == 1:
                stacks[names[0] + ".weight"] = stack
                for name in names[1:]:
                    del stacks[name + ".weight"]
    return stacks


def _as_rows(name: str, tensor: TensorInfo) -> TensorInfo:
    """A kernel of a convolution as a matrix, the two tables of positions as one."""
    if len(tensor.shape) < 3:
        return tensor
    width = math.prod(tensor.shape[:3]) if name == "v.patch_embd.weight" else tensor.shape[0]
    return replace(tensor, shape=(width, tensor.weights // width))


def _turns(vision: VisionConfig) -> bytes:
    """Turns per place of each pair of a half head, as 64-bit fractions."""
    half = vision.width // vision.heads // 2
    turns = [ROPE_BASE ** (-2 * j / half) / (2 * math.pi) for j in range(half // 2)]
    words = [part for turn in turns for part in divmod(round(turn * 2**64) % 2**64, 2**32)]
    return struct.pack(f"<{len(words)}I", *words)


async def _bounds(
    gguf: Gguf, vision: VisionConfig, tensors: dict[str, TensorInfo]
) -> dict[str, Bounds]:
    """Of each clipped linear; four zeros in Ollama's older table say that one is not."""
    names = [f"v.blk.{index}.{part}" for index in range(vision.layers) for part in CLIPPED]
    names.append("mm.input_projection")
    found = await read_bounds(gguf, names, tensors)
    if "v.clamp_data" in tensors:
        table = await read_floats(gguf, tensors["v.clamp_data"])
        if len(table) != 4 * len(names):
            raise GgufError(
                f"{gguf.name}: v.clamp_data holds {len(table)} numbers, "
                f"not four for each of {len(names)} linears."
            )
        for at, name in enumerate(names):
            four = table[4 * at : 4 * at + 4]
            if any(four):
                found[name] = Bounds.of(four)
    return found
