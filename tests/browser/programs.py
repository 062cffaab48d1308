"""Every program that the engine links: recorded without a GPU, for a browser to compile."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import product

from helpers.blank import BlankGguf, a4b, diffusion, e2b, q4_k_m
from helpers.tiny import DIFFUSION, KINDS, MIXED, MOE, Tiny, tiny_gguf
from helpers.tiny_adapter import tiny_adapter, tiny_pairs
from helpers.tiny_ears import EARS, RAW_EARS, audio_of, ears_gguf, ears_tensors
from helpers.tiny_eyes import EMBEDDER, LARGE_EYES, SMALL_EYES, eyes_gguf

from webgemma.device import Kernel
from webgemma.device.neighbours import probe
from webgemma.device.null import NullDevice
from webgemma.engine.diffusion_session import DiffusionSession
from webgemma.engine.selftest import selftest
from webgemma.engine.session import BATCHES, Session
from webgemma.errors import DeviceError
from webgemma.gemma.audio import Ears, hear
from webgemma.gemma.config import Config, Experts
from webgemma.gemma.encoder_config import EncoderConfigs
from webgemma.gemma.vision import Eyes, see
from webgemma.gemma.weights import Model
from webgemma.gguf.formats import FORMATS
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.images import RgbImage
from webgemma.lora.adapter import Adapter
from webgemma.lora.fresh import PARTS, new_adapter
from webgemma.lora.trainer import Options, Trainer
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
    """Keeps every kernel it is asked to compile."""

    def __init__(self, features: frozenset[str], software: bool) -> None:
        super().__init__(features | {"packed-dots"})
        self.software = software
        self.kernels: set[Kernel] = set()

    def pipeline(self, kernel: Kernel) -> Kernel:
        """As it is, if WebGPU takes it."""
        self.kernels.add(kernel)
        return super().pipeline(kernel)


@cache
def programs(features: frozenset[str]) -> frozenset[Kernel]:
    """All that is linked for a device with these features, hardware or software."""
    found: set[Kernel] = {probe(features)} if "subgroups" in features else set()
    for software in (False, True):
        device = Collector(features, software)
        with suppress(DeviceError):  # that zeros are wrong
            run_sync(selftest(device))
        for model in models(device):
            for kv, precision in (("f32", "exact"), ("f16", "int16"), ("f16", "int8")):
                record_all(Session(model, 512, kv=kv, precision=precision))
            if not model.low:
                learn(model)
        for model in canvases(device):
            for kv, precision in (("f32", "exact"), ("f16", "int16")):
                session = DiffusionSession(model, 512, kv=kv, precision=precision)
                session._plan("denoise", session.canvas)
        look_at_pictures(device)
        hear_sounds(device)
        found |= device.kernels
    return frozenset(found)


def models(device: NullDevice) -> Iterator[Model]:
    """Tiny models, and a layer of each kind of the true shapes in every format."""
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
    """A tiny DiffusionGemma, and two layers of the true shapes in every format."""
    tiny = replace(DIFFUSION, suppressed=(7,))
    gguf = run_sync(Gguf.aopen(BytesSource(tiny_gguf(tiny), "tiny.gguf")))
    yield run_sync(Model.load(gguf, Config.from_gguf(gguf), device))
    true = few_layers(diffusion(), (0, 5))
    assert true.diffusion is not None
    few_experts = Experts(count=16, used=8, ffn=768, fused=True)
    wide = replace(true.diffusion, ffn=2304)  # rows of whole blocks, whatever the format
    for format in USABLE:
        config = replace(true, experts=few_experts, diffusion=wide)
        yield blank_model(config, only(format), device)


def adapted_model(device: NullDevice, tiny: Tiny) -> Model:
    """A tiny model with an adapter on all that can have one."""
    gguf = run_sync(Gguf.aopen(BytesSource(tiny_gguf(tiny), "tiny.gguf")))
    model = run_sync(Model.load(gguf, Config.from_gguf(gguf), device))
    model.set_adapters([(tiny_adapter(tiny_pairs(gguf)).pairs, 1.0)])
    return model


def blank_model(config: Config, format_of: Callable[[str], str], device: NullDevice) -> Model:
    """A model of which only the memory is there."""
    blank = BlankGguf(config, format_of)
    model = Model.reserve(blank, config, device)
    run_sync(model._derive(blank, blank.tensors))
    return model


def look_at_pictures(device: NullDevice) -> None:
    """Every kind of eyes, on pictures that are resized along both axes."""
    for shape in (SMALL_EYES, LARGE_EYES, EMBEDDER):
        gguf = run_sync(Gguf.aopen(BytesSource(eyes_gguf(shape))))
        vision = EncoderConfigs.from_gguf(gguf).vision
        assert vision is not None
        side = vision.patch * vision.pool
        with run_sync(Eyes.load(gguf, vision, device)) as eyes:
            run_sync(see(eyes, RgbImage(1, 2, bytes(6)), 2 * side, side)).close()


def hear_sounds(device: NullDevice) -> None:
    """Both kinds of ears, and those of the true width."""
    wide = replace(EARS, width=1024, layers=1, heads=8, features=1536)
    for shape in (EARS, wide, RAW_EARS):
        gguf = ears_gguf(shape, ears_tensors(shape))
        with run_sync(Ears.load(gguf, audio_of(gguf), device)) as ears:
            run_sync(hear(ears, bytes(4 * 8000))).close()


def learn(model: Model) -> None:
    """Steps of training, of narrow adapters and of wide ones, with dropout and without."""
    for rank, dropout in ((4, 0.0), (40, 0.1)):
        trainer = Trainer(
            model, untrained(model.config, rank), Options(sequences=2, dropout=dropout)
        )
        trainer.reserve(2, 32)
        trainer.close()


@cache
def untrained(config: Config, rank: int) -> Adapter:
    """An adapter of all parts of two layers; its random numbers take longer than the linking."""
    return new_adapter(config, PARTS, rank=rank, layers=range(2))


def only(format: str) -> Callable[[str], str]:
    """Every matrix in one format, but the router's."""
    return lambda name: "F32" if name.endswith("_gate_inp.weight") else format


def few_layers(config: Config, kept: tuple[int, ...]) -> Config:
    """The same model with only these layers and few words; shared caches are the first two's."""
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
    """Every plan of a session."""
    for kind in ("read", "logits", "see"):
        for batch in BATCHES[kind == "see" :]:
            session._plan(kind, batch)
    for kind, top in product(("greedy", "sample"), ("", " top")):
        session._plan(kind + top, 1)
        session._plan(f"decode {kind}{top}", 1)
