"""Every program that the engine links, recorded without a GPU, for a browser to compile."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import product

from helpers.blank import BlankGguf, a4b, diffusion, e2b, q4_k_m
from helpers.tiny import DIFFUSION, KINDS, MIXED, MOE, Tiny, tiny_gguf
from helpers.tiny_adapter import tiny_adapter, tiny_pairs
from helpers.tiny_audio import RAW_AUDIO, TINY_AUDIO, audio_config, audio_gguf, audio_weights
from helpers.tiny_vision import EMBEDDER, LARGE_VISION, SMALL_VISION, vision_gguf

from webgemma.device import Kernel
from webgemma.device.null import NullDevice
from webgemma.device.subgroups import probe
from webgemma.engine.diffusion_session import DiffusionSession
from webgemma.engine.plans import PlanKey
from webgemma.engine.selftest import selftest
from webgemma.engine.session import PLAN_ROWS, Session
from webgemma.errors import DeviceError
from webgemma.gemma import audio, vision
from webgemma.gemma.config import Config, Experts
from webgemma.gemma.encoder_config import EncoderConfigs
from webgemma.gemma.weights import Model
from webgemma.gguf.formats import FORMATS
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.images import RgbImage
from webgemma.lora.adapter import TARGETS, Adapter, new_adapter
from webgemma.lora.trainer import Trainer, TrainingOptions
from webgemma.sync import run_sync

SUBGROUPS = frozenset({"subgroups", "enable-subgroups"})
FEATURES = {
    "plain": frozenset[str](),
    "subgroups": SUBGROUPS,
    "shuffle4": SUBGROUPS | {"shuffle4"},
    "shuffle32": SUBGROUPS | {f"shuffle{size}" for size in (4, 8, 16, 32)},
}
USABLE = [name for name, fmt in FORMATS.items() if fmt.usable]


class Collector(NullDevice):
    """A null device that keeps every kernel it compiles."""

    def __init__(self, features: frozenset[str], software: bool) -> None:
        super().__init__(features | {"packed-dots"})
        self.software = software
        self.kernels: set[Kernel] = set()

    def pipeline(self, kernel: Kernel) -> Kernel:
        """Return the kernel itself, and keep it."""
        self.kernels.add(kernel)
        return super().pipeline(kernel)


@cache
def programs(features: frozenset[str]) -> frozenset[Kernel]:
    """Return all kernels for a device with these features, hardware or software."""
    found: set[Kernel] = {probe(features)} if "subgroups" in features else set()
    for software in (False, True):
        device = Collector(features, software)
        with suppress(DeviceError):  # that zeros are wrong
            run_sync(selftest(device))
        for model in models(device):
            for kv, precision in (("f32", "exact"), ("f16", "int16"), ("f16", "int8")):
                record_all(Session(model, 512, kv=kv, precision=precision))
            if not model.lora.weights:
                train(model)
        for model in canvases(device):
            for kv, precision in (("f32", "exact"), ("f16", "int16")):
                session = DiffusionSession(model, 512, kv=kv, precision=precision)
                session.plans.get(PlanKey("denoise", session.canvas))
        encode_images(device)
        encode_audio(device)
        found |= device.kernels
    return frozenset(found)


def models(device: NullDevice) -> Iterator[Model]:
    """Yield tiny models, and layers of each kind of the real shapes in every format."""
    for tiny in KINDS.values():
        gguf = run_sync(Gguf.aopen(BytesSource(tiny_gguf(tiny), "tiny.gguf")))
        yield run_sync(Model.load(gguf, Config.from_gguf(gguf), device))
    for tiny in (replace(MIXED, pattern="sf", formats=("Q8_0", "F16")), MOE):
        yield adapted_model(device, tiny)
    dense, experts = few_layers(e2b(), (0, 4, 15, 19)), few_layers(a4b(), (0, 5))
    few_experts = replace(experts, experts=Experts(count=16, used=8, ffn=768, fused=True))
    yield blank_model(experts, q4_k_m, device)
    for config, format in product((dense, few_experts), USABLE):
        yield blank_model(config, only(format), device)


def canvases(device: NullDevice) -> Iterator[Model]:
    """Yield a tiny DiffusionGemma, and two layers of the real shapes in every format."""
    tiny = replace(DIFFUSION, suppressed=(7,))
    gguf = run_sync(Gguf.aopen(BytesSource(tiny_gguf(tiny), "tiny.gguf")))
    yield run_sync(Model.load(gguf, Config.from_gguf(gguf), device))
    real = few_layers(diffusion(), (0, 5))
    assert real.diffusion is not None
    few_experts = Experts(count=16, used=8, ffn=768, fused=True)
    wide = replace(real.diffusion, ffn=2304)  # rows of whole blocks, whatever the format
    for format in USABLE:
        config = replace(real, experts=few_experts, diffusion=wide)
        yield blank_model(config, only(format), device)


def adapted_model(device: NullDevice, tiny: Tiny) -> Model:
    """Return a tiny model with an adapter for every matrix that can have one."""
    gguf = run_sync(Gguf.aopen(BytesSource(tiny_gguf(tiny), "tiny.gguf")))
    model = run_sync(Model.load(gguf, Config.from_gguf(gguf), device))
    model.set_adapters([(tiny_adapter(tiny_pairs(gguf)).pairs, 1.0)])
    return model


def blank_model(config: Config, format_of: Callable[[str], str], device: NullDevice) -> Model:
    """Return a model whose memory is allocated and whose weights are not loaded."""
    blank = BlankGguf(config, format_of)
    model = Model.allocate_all(blank, config, device)
    run_sync(model._derive(blank, blank.tensors))
    return model


def encode_images(device: NullDevice) -> None:
    """Record every kind of vision encoder, for images that are resized along both axes."""
    for shape in (SMALL_VISION, LARGE_VISION, EMBEDDER):
        gguf = run_sync(Gguf.aopen(BytesSource(vision_gguf(shape))))
        config = EncoderConfigs.from_gguf(gguf).vision
        assert config is not None
        side, image = config.patch * config.pool, RgbImage(1, 2, bytes(6))
        with run_sync(vision.VisionEncoder.load(gguf, config, device)) as encoder:
            run_sync(vision.encode_image(encoder, image, 2 * side, side)).close()


def encode_audio(device: NullDevice) -> None:
    """Record both kinds of audio encoders, and one of the real width."""
    wide = replace(TINY_AUDIO, width=1024, layers=1, heads=8, features=1536)
    for shape in (TINY_AUDIO, wide, RAW_AUDIO):
        gguf = audio_gguf(shape, audio_weights(shape))
        with run_sync(audio.AudioEncoder.load(gguf, audio_config(gguf), device)) as encoder:
            run_sync(audio.encode_audio(encoder, bytes(4 * 8000))).close()


def train(model: Model) -> None:
    """Record steps of training, of narrow adapters and of wide ones, with dropout and without."""
    for rank, dropout in ((4, 0.0), (40, 0.1)):
        options = TrainingOptions(batch_size=2, dropout=dropout)
        trainer = Trainer(model, untrained(model.config, rank), options)
        trainer.allocate(2, 32)
        trainer.close()


@cache
def untrained(config: Config, rank: int) -> Adapter:
    """Return an adapter of all targets in two layers; drawing it takes longer than linking."""
    return new_adapter(config, TARGETS, rank=rank, layers=range(2))


def only(format: str) -> Callable[[str], str]:
    """Return a function that gives every matrix but the router's the same format."""
    return lambda name: "F32" if name.endswith("_gate_inp.weight") else format


def few_layers(config: Config, kept: tuple[int, ...]) -> Config:
    """Return the same model with these layers only and few tokens; the first two share caches."""
    layers = [config.layers[i] for i in kept]
    return replace(
        config,
        vocab=4096,
        layers=tuple(
            replace(layer, index=i, kv_donor=i % 2 if layer.shares_kv else i)
            for i, layer in enumerate(layers)
        ),
    )


def record_all(session: Session) -> None:
    """Record every plan of a session."""
    plans, lora = session.plans, bool(session.model.lora.weights)
    for rows in PLAN_ROWS:
        plans.get(PlanKey("read", rows, adapted=lora))
        plans.get(PlanKey("logits", rows, adapted=lora))
    session.slots.allocate_soft_tokens()
    for rows in PLAN_ROWS[1:]:
        plans.get(PlanKey("read", rows, soft=True, adapted=lora))
    for greedy, top in product((False, True), (False, True)):
        plans.get(PlanKey("sample", greedy=greedy, top_logprobs=top, adapted=lora))
        plans.get(PlanKey("decode", greedy=greedy, top_logprobs=top, adapted=lora))
    for rows in (2, 8, 16):  # several conversations
        plans.get(PlanKey("decode", rows, greedy=True, adapted=lora))
