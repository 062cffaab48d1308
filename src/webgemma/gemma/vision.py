"""The vision encoder on the device: pixels in, soft tokens out."""

import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from webgemma.device import Device
from webgemma.errors import DeviceError, GgufError
from webgemma.gemma.clipped import EPS, Bounds, ClippedInput, EncoderOps, read_bounds
from webgemma.gemma.encoder_config import VisionConfig, vision_tensors
from webgemma.gemma.image_resize import check_pixels, resized
from webgemma.gemma.matrices import whole_words
from webgemma.gemma.patch_attention import PatchAttention
from webgemma.gemma.record.columns import Columns
from webgemma.gemma.record.ops import ROW_THREADS
from webgemma.gemma.record.staged_plan import Encoded, EncoderWeights, StagedPlan
from webgemma.gemma.tensors import canonical_tensors, check_tensors, read_floats
from webgemma.gemma.weights import packed_rotations
from webgemma.gguf.reader import Gguf, TensorInfo
from webgemma.graph import Argument, Tensor
from webgemma.images import RgbImage
from webgemma.progress import Progress, ignore_progress

LAYER_NORM_EPS = 1e-5  # of the 12B's patch embedder
ROPE_BASE = 100.0
# The order in which `v.clamp_data` keeps the bounds of a layer's linears.
CLIPPED = ("attn_q", "attn_k", "attn_v", "attn_out", "ffn_gate", "ffn_up", "ffn_down")
QKV, GATE_UP = CLIPPED[:3], CLIPPED[4:6]  # that read the same
HEAD_DIMS = (16, 24, 32, 64, 72, 128)  # that attention_prefill.wgsl supports
LARGEST_HALF = 65504.0


class VisionEncoder(EncoderWeights):
    """A vision encoder's weights on a device."""

    def __init__(self, vision: VisionConfig, device: Device, precision: str = "exact") -> None:
        super().__init__(device, vision.layers + 1, precision)
        self.vision = vision
        self.bounds: dict[str, Bounds] = {}  # of clipped linears, by name
        self.head_norms: dict[int, Tensor] = {}  # of each layer: q_norm, then k_norm
        self.largest_head = 0.0  # that a value of a normed query or key may be
        self.rotations = self.one
        if vision.layers:
            self.rotations = self.memory.upload(_rotations(vision), 1, label="rotations")
        self.ones = self.vector_of([1.0] * vision.width)

    @classmethod
    async def load(
        cls, gguf: Gguf, vision: VisionConfig, device: Device, precision: str = "exact"
    ) -> Self:
        """Load the encoder of an mmproj, or of a file that holds text model and encoders."""
        tensors = canonical_tensors(gguf)
        check_tensors(gguf, vision_tensors(vision), tensors)
        _check_kernels_fit(gguf, vision)
        encoder = cls(vision, device, precision)
        try:
            await encoder._derive(gguf, tensors)
            for name, stack in _stacks(vision, tensors, encoder.bounds).items():
                encoder.allocate(name, stack)
                await encoder.load_tensors(gguf, name, stack)
            await encoder.wait_until_loaded()
        except BaseException:
            encoder.close()
            raise
        return encoder

    async def _derive(self, gguf: Gguf, tensors: dict[str, TensorInfo]) -> None:
        for index in range(self.vision.layers):
            name = f"v.blk.{index}."
            norms = await read_floats(gguf, tensors[name + "attn_q_norm.weight"])
            norms += await read_floats(gguf, tensors[name + "attn_k_norm.weight"])
            self.head_norms[index] = self.vector_of(norms)
            root = math.sqrt(self.vision.width // self.vision.heads)  # the largest after a norm
            self.largest_head = max(self.largest_head, root * max(map(abs, norms)))
        if self.vision.clipped:
            self.bounds = await _read_all_bounds(gguf, self.vision, tensors)


class VisionRecorder(EncoderOps):
    """Records the encoding of one image of so many patches."""

    def __init__(self, encoder: VisionEncoder, plan: StagedPlan, columns: int, rows: int) -> None:
        patches = columns * rows
        super().__init__(encoder, encoder.bounds, plan.recorder, plan.batch(patches), patches)
        self.plan = plan
        self.encoder = encoder
        self.vision = encoder.vision
        self.columns = columns  # patches in a row of the image

    def embed(self, pixels: Tensor, x_ids: Tensor, y_ids: Tensor) -> Tensor:
        """Record W (2 p − 1) + X[x] + Y[y]: [patches, width]."""
        width, large = self.vision.width, not self.vision.layers
        p = self.patches(pixels, 1.0 if large else 2.0, 0.0 if large else -1.0)
        if large:  # norm₂(W norm₁(p) + b)
            p = self.layer_norm(p, 1)
        x = self.linear(p, self.encoder.matrices["v.patch_embd.weight"])
        if large:
            x = self.layer_norm(x, 2, "v.patch_embd.bias")
        table = self.encoder.matrices["v.position_embd.weight"]
        a, b = self.lookup(table, x_ids), self.lookup(table, y_ids)
        grid = self.vec4_grid(width)
        self.recorder.call("add_rows", grid, batch=self.batch, a=a, b=b, x=x, width=width)
        return self.layer_norm(x, 3) if large else x

    def patches(self, pixels: Tensor, scale: float, shift: float) -> Tensor:
        """Record the image cut into patches, each colour by colour: [patches, 3 · side²]."""
        side = self.vision.patch
        p = self.scratch(self.rows, 3 * side * side)
        self.recorder.call(
            "patches",
            self.vec4_grid(side * side),
            batch=self.batch,
            pixels=pixels,
            p=p,
            columns=self.columns,
            scale=scale,
            shift=shift,
            SIDE=side,
        )
        return p

    async def layers(self, x: Tensor) -> None:
        """Record all layers, in place, each as a stage."""
        if not self.vision.layers:
            return
        h = self.norm(x, self.encoder.vector("v.blk.0.ln1.weight"))
        for index in range(self.vision.layers):
            await self.plan.run(x, h)
            h = self.layer(index, x, h)

    def layer(self, index: int, x: Tensor, h: Tensor) -> Tensor:
        """Record a layer, whose attention reads h; return what the following one's does."""
        name, following = f"v.blk.{index}.", f"v.blk.{index + 1}."
        attended = self.attention(index, h)
        n, bounds = self.input_of(x.shape[1], self.readers(name, GATE_UP))
        post, norm = name + "attn_post_norm.weight", name + "ln2.weight"
        self.residual(x, attended, post, norm, out=n, clamp=bounds)
        forwarded = self.feed_forward(name, n)
        post, scale = name + "ffn_post_norm.weight", name + "out_scale.weight"
        if index + 1 == self.vision.layers:
            self.residual(x, forwarded, post, scale=scale)
            return h
        out, bounds = self.input_of(x.shape[1], self.readers(following, QKV))
        if type(out) is type(h):
            out = h  # it stays until the next stage: once for all is enough
        norm = following + "ln1.weight"
        self.residual(x, forwarded, post, norm, scale, out, bounds)
        return out

    def readers(self, name: str, parts: Sequence[str]) -> list[str]:
        """Return the linears of a layer that have a matrix, and are not stacked under another."""
        linears = [name + part for part in parts]
        return [name for name in linears if name + ".weight" in self.encoder.matrices]

    def attention(self, index: int, h: Tensor) -> Tensor:
        """Record softmax(q kᵀ) v, every patch attending to every other."""
        vision, name = self.vision, f"v.blk.{index}."
        raw = self.scratch(self.rows, 3 * vision.width)
        inputs, first = ClippedInput(self, h), 0
        for reader in self.readers(name, QKV):
            self.linear(inputs.of(reader), self.weight(reader), raw, first)
            first += self.weight(reader).rows
        bounds: dict[str, Argument] = {}
        for part in QKV:
            low, high = self.bounds_of(name + part).output
            bounds |= {f"{part[-1]}_low": low, f"{part[-1]}_high": high}
        size, out = vision.width // vision.heads, name + "attn_out"
        halves = self.encoder.largest_head <= LARGEST_HALF
        attention = PatchAttention(self, vision.heads, size, halves=halves)
        heads = attention.scratch()
        self.recorder.call(
            "vision_heads",
            (3 * vision.heads, self.rows),
            **bounds,
            **heads._asdict(),
            batch=self.batch,
            raw=raw,
            eps=EPS,
            norms=self.encoder.head_norms[index],
            rotations=self.encoder.rotations,
            heads=vision.heads,
            columns=self.columns,
            pair=attention.pair,
            HEAD_DIM=size,
            THREADS=self.row_threads(32),
        )
        rounded = self.bounds_of(out).input if self.reads_halves(out) else None
        return self.clipped_linear(attention.record(heads, rounded), out)

    def feed_forward(self, name: str, n: Tensor) -> Tensor:
        """Record W_down(gelu(W_gate n) · W_up n)."""
        inputs, ffn, down = ClippedInput(self, n), self.vision.ffn, name + "ffn_down"
        readers = self.readers(name, GATE_UP)
        products = [self.product(inputs.of(reader), reader) for reader in readers]
        gate, up = Columns(products[0], ffn, 0), Columns(products[-1], ffn, 0)
        if len(products) == 1:  # up is stacked under the gate
            gate = Columns(products[0], 2 * ffn, 0)
            up = gate._replace(first=ffn)
        if not self.reads_halves(down):
            return self.clipped_linear(self.geglu(gate, up, ffn), down)
        hidden = self.rounded(
            ffn,
            row_source="geglu",
            gate=gate.tensor,
            up=up.tensor,
            gate_stride=gate.stride,
            up_stride=up.stride,
            up_first=up.first,
            **self.bounds_of(down).input._asdict(),
        )
        return self.product(hidden, down)

    def layer_norm(self, x: Tensor, number: int, shift: str = "") -> Tensor:
        """Record (y − mean) / √(variance + eps) times the weight plus the bias; y = x + shift."""
        name, vector = f"v.patch_norm.{number}.", self.encoder.vector
        h = self.scratch(*x.shape)
        self.recorder.call(
            "layer_norm",
            (self.rows,),
            batch=self.batch,
            x=x,
            h=h,
            shift=vector(shift),
            w=vector(name + "weight"),
            b=vector(name + "bias"),
            width=x.shape[1],
            eps=LAYER_NORM_EPS,
            THREADS=self.row_threads(ROW_THREADS),
            SHIFTED=bool(shift),
        )
        return h


class ProjectionRecorder(VisionRecorder):
    """Records the end of the encoder, where a row is a soft token: a square of patches."""

    def pool(self, x: Tensor) -> Tensor:
        """Record √width · the mean of each pool × pool patches, standardised: [n, width]."""
        vision, vector = self.vision, self.encoder.vector
        if not vision.layers:
            return x
        h = self.scratch(self.rows, vision.width)
        self.recorder.call(
            "pool",
            self.vec4_grid(vision.width),
            batch=self.batch,
            x=x,
            h=h,
            columns=self.columns,
            bias=vector("v.std_bias"),
            scale=vector("v.std_scale"),
            width=vision.width,
            root=math.sqrt(vision.width),
            POOL=vision.pool,
            STANDARDISED=vision.standardised,
        )
        return h

    def project(self, pooled: Tensor) -> Tensor:
        """Record W rms(pooled): [n, output]."""
        return self.clipped_linear(self.norm(pooled, self.encoder.ones), "mm.input_projection")


class EncodedImage(Encoded):
    """An encoded image on the device, until it is closed."""

    def __init__(self, device: Device, pooled: Tensor, tokens: Tensor) -> None:
        super().__init__(device, pooled, tokens)
        self.pooled = pooled  # [n, width], before the projection
        self.tokens = tokens  # [n, output], what the text model reads


async def encode_image(
    encoder: VisionEncoder,
    image: RgbImage,
    width: int,
    height: int,
    progress: Progress = ignore_progress,
) -> EncodedImage:
    """Encode an image, resized to a size that the encoder takes."""
    vision, size = encoder.vision, (image.width, image.height)
    check_pixels(encoder.device, *size)

    async def record(plan: StagedPlan, rgb: Tensor) -> None:
        columns, rows = width // vision.patch, height // vision.patch
        pixels = resized(plan, rgb, size, (width, height))
        recorder = VisionRecorder(encoder, plan, columns, rows)
        x = recorder.embed(pixels, *_position_ids(plan, vision, columns, rows))
        await recorder.layers(x)
        columns, rows = columns // vision.pool, rows // vision.pool
        projection = ProjectionRecorder(encoder, plan, columns, rows)
        pooled = projection.pool(x)
        await plan.finish(pooled, projection.project(pooled))

    data = whole_words(image.rgb)
    results = await encoder.encode((*size, width, height), data, record, progress)
    return EncodedImage(encoder.device, *results)


def _check_kernels_fit(gguf: Gguf, vision: VisionConfig) -> None:
    """Raise DeviceError for shapes that no Gemma 4 has and that the kernels do not support."""
    size = vision.width // vision.heads if vision.layers else HEAD_DIMS[0]
    if size not in HEAD_DIMS:
        raise DeviceError(
            f"{gguf.name}: its vision encoder has heads of {size} dimensions, for which there is "
            "no GPU kernel",
            "use device='cpu'",
        )
    for what, count in (("patches", vision.patch), ("feed-forward layers", vision.ffn)):
        if count % 4:
            raise DeviceError(
                f"{gguf.name}: its vision encoder has {what} of {count}, but the GPU kernels read "
                "four at a time",
                "use device='cpu'",
            )


def _position_ids(
    plan: StagedPlan, vision: VisionConfig, columns: int, rows: int
) -> tuple[Tensor, Tensor]:
    """Upload for each patch its row in the table of columns, and in the table of rows after it."""
    x = list(range(columns)) * rows
    y = [vision.positions + row for row in range(rows) for _ in range(columns)]
    tables = [plan.upload(struct.pack(f"<{len(ids)}I", *ids), "position ids") for ids in (x, y)]
    return tables[0], tables[1]


def _stacks(
    vision: VisionConfig, tensors: dict[str, TensorInfo], bounds: dict[str, Bounds]
) -> dict[str, list[TensorInfo]]:
    """Return what is loaded, by its name on the device.

    Matrices of one format that read the same input are stacked under the name of the first, to be
    multiplied at once."""
    stacks = {
        name: [_as_matrix(name, tensors[name])]
        for name, _, _ in vision_tensors(vision)
        if name in tensors
    }
    for index in range(vision.layers):
        for parts in (QKV, GATE_UP):
            names = [f"v.blk.{index}.{part}" for part in parts]
            own = [bounds.get(name, Bounds()) for name in names]
            # The outputs of q, k and v are clamped later, each by itself.
            shared = {each.input if parts[0] == "attn_q" else each for each in own}
            stack = [stacks[name + ".weight"][0] for name in names]
            if len(shared) == 1 and len({each.format for each in stack}) == 1:
                stacks[names[0] + ".weight"] = stack
                for name in names[1:]:
                    del stacks[name + ".weight"]
    return stacks


def _as_matrix(name: str, tensor: TensorInfo) -> TensorInfo:
    """Return a convolution's kernel as a matrix, the two tables of positions as one."""
    if len(tensor.shape) < 3:
        return tensor
    width = math.prod(tensor.shape[:3]) if name == "v.patch_embd.weight" else tensor.shape[0]
    return replace(tensor, shape=(width, tensor.weights // width))


def _rotations(vision: VisionConfig) -> bytes:
    half = vision.width // vision.heads // 2
    return packed_rotations([ROPE_BASE ** (-2 * j / half) for j in range(half // 2)])


async def _read_all_bounds(
    gguf: Gguf, vision: VisionConfig, tensors: dict[str, TensorInfo]
) -> dict[str, Bounds]:
    """Read the bounds of every linear; four zeros in Ollama's older table mean that it has none."""
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
            values = table[4 * at : 4 * at + 4]
            if any(values):
                found[name] = Bounds.of(gguf, name, values)
    return found
