"""Configuration of a drafter, gemma4-assistant, which fits one target."""

import sys
from array import array
from functools import cached_property

from webgemma.errors import GgufError
from webgemma.gemma.config import CENTROIDS, DRAFTER, ORDERING, Config, ConfigReader, Drafter
from webgemma.gemma.metadata import Metadata
from webgemma.gguf.reader import Gguf

NEAREST = 32  # clusters whose tokens are candidates, where the file does not say


async def read_ordering(gguf: Gguf, config: Config) -> "array[int]":
    """Return the token ids of all clusters, cluster by cluster; GgufError unless each is there."""
    ids = array("I", bytes(await gguf.read(gguf.tensors[ORDERING])))
    if sys.byteorder == "big":
        ids.byteswap()
    if sorted(ids) != list(range(config.vocab)):
        raise GgufError(
            f"{gguf.name}: {ORDERING} does not hold every token once; the file is damaged: "
            "download it again."
        )
    return ids


def drafter_config(gguf: Gguf, target: Config) -> Config:
    """Return the configuration of a drafter for a target; GgufError if it is none for that."""
    return _DrafterReader(gguf, target).config()


class _DrafterReader(ConfigReader):
    """Reads the file of a drafter, and checks that it fits its target."""

    def __init__(self, gguf: Gguf, target: Config) -> None:
        name = Metadata(gguf, "general.").text("architecture")
        if name != DRAFTER:
            raise GgufError(f"{gguf.name}: the architecture is {name[:40]!r}, not {DRAFTER}.")
        if target.diffusion:
            raise GgufError(f"{gguf.name}: DiffusionGemma denoises, and has no use for a drafter.")
        super().__init__(gguf, DRAFTER)
        self.target = target

    def config(self) -> Config:
        config, target = super().config(), self.target
        kinds = {donor.sliding: donor for donor in map(target.layers.__getitem__, self.donors)}
        for layer in config.layers:
            donor = kinds[layer.sliding]
            if (layer.head_dim, layer.kv_heads) != (donor.head_dim, donor.kv_heads):
                raise self.unfit(
                    f"layer {layer.index} reads {layer.kv_heads} key-value heads of "
                    f"{layer.head_dim} dimensions, and the model has {donor.kv_heads} of "
                    f"{donor.head_dim}"
                )
        if config.vocab != target.vocab:
            raise self.unfit(f"it has {config.vocab} tokens, and the model {target.vocab}")
        if config.window > target.window:
            raise self.unfit(f"its window is {config.window}, and the model's {target.window}")
        if config.experts or config.ple:
            raise self.unfit("it has experts or per-layer embeddings, which no drafter has")
        if config.drafter and config.drafter.centroids:
            self.check_ordering(config.vocab, config.drafter.centroids)
        return config

    @cached_property
    def donors(self) -> tuple[int, ...]:
        """The target's last layers of both kinds that have keys and values of their own."""
        own = [layer for layer in self.target.layers if not layer.shares_kv]
        return tuple({layer.sliding: layer.index for layer in own}.values())

    def donor(self, sliding: list[bool], index: int) -> int:
        for at, donor in enumerate(self.donors):
            if self.target.layers[donor].sliding == sliding[index]:
                return len(sliding) + at
        raise self.unfit(f"layer {index} reads a kind of layer that the model does not have")

    def drafter(self) -> Drafter:
        width = self.keys.count("embedding_length_out")
        if width != self.target.width:
            raise self.unfit(f"it reads states of width {width}, the model's: {self.target.width}")
        if self.shared < self.keys.count("block_count"):
            raise self.unfit("it has keys and values of its own, which no drafter has")
        centroids = self.tensors.get(CENTROIDS)
        count = centroids.rows if centroids else 0
        nearest = self.keys.count("masked_embd_top_k", NEAREST) if count else 0
        return Drafter(width, self.donors, count, min(nearest, count))

    def check_ordering(self, vocab: int, centroids: int) -> None:
        """Raise GgufError unless every token has its place in one of the clusters."""
        ordering = self.tensors.get(ORDERING)
        if ordering is None or ordering.format.name != "I32" or ordering.shape != (vocab,):
            raise GgufError(
                f"{self.gguf.name}: {ORDERING} must hold {vocab} token ids as I32; the file is "
                "incomplete."
            )
        if vocab % centroids:
            raise GgufError(
                f"{self.gguf.name}: {vocab} tokens cannot be divided among {centroids} centroids."
            )

    def unfit(self, problem: str) -> GgufError:
        """Return the error for a drafter of another model."""
        named = f" {self.target.name}" if self.target.name else ""
        return GgufError(
            f"{self.gguf.name}: {problem}; it is not the drafter of this model{named}: use its own."
        )
