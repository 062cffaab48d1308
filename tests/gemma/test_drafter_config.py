"""The configuration of a drafter: what it reads of its target, and an error for each misfit."""

from dataclasses import replace

import pytest
from helpers.sessions import open_tiny
from helpers.tiny import DIFFUSION, LARGE, SMALL, Tiny
from helpers.tiny_drafter import TinyDrafter, drafter_gguf, drafter_metadata, drafter_tensors

from webgemma import GgufError
from webgemma.gemma.config import Config
from webgemma.gemma.drafter_config import drafter_config, read_ordering
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import NewTensor, gguf_bytes
from webgemma.sync import run_sync

DRAFTER = TinyDrafter(SMALL, centroids=32)


def opened(data: bytes) -> Gguf:
    return run_sync(Gguf.aopen(BytesSource(data, "drafter.gguf")))


def config_of(data: bytes, target: Tiny = SMALL) -> Config:
    return drafter_config(opened(data), open_tiny(target)[1])


def changed(drafter: TinyDrafter = DRAFTER, **tensors: NewTensor | None) -> bytes:
    """Return the file with other tensors, by their names without dots; None leaves one out."""
    kept = []
    for tensor in drafter_tensors(drafter):
        other = tensors.get(tensor.name.replace(".", "_"), tensor)
        kept += [] if other is None else [other]
    return gguf_bytes(drafter_metadata(drafter), kept)


def test_layers_read_the_targets_last_caches_of_their_kinds() -> None:
    config = config_of(drafter_gguf(DRAFTER))
    assert config.drafter is not None
    assert config.drafter.target_width == SMALL.width
    assert config.drafter.donors == (1, 2)  # of a model whose last three layers share these
    assert [layer.kv_donor for layer in config.layers] == [3, 3, 4]
    assert all(layer.shares_kv for layer in config.layers)
    assert (config.drafter.centroids, config.drafter.nearest) == (32, 4)
    plain = config_of(drafter_gguf(TinyDrafter(LARGE)), LARGE)
    assert plain.drafter is not None
    assert (plain.drafter.donors, plain.drafter.centroids) == ((4, 5), 0)
    assert [layer.kv_heads for layer in plain.layers] == [2, 2, 1]


def test_without_a_number_of_clusters_there_are_32() -> None:
    drafter = TinyDrafter(SMALL, centroids=64)
    config = config_of(drafter_gguf(drafter, masked_embd_top_k=None))
    assert config.drafter is not None
    assert config.drafter.nearest == 32
    few = config_of(drafter_gguf(TinyDrafter(SMALL, centroids=8), masked_embd_top_k=100))
    assert few.drafter is not None
    assert few.drafter.nearest == 8


@pytest.mark.parametrize(
    ("data", "target", "problem"),
    [
        (
            drafter_gguf(DRAFTER),
            LARGE,
            "reads 1 key-value heads of 16 .* and the model has 2 of 16",
        ),
        (drafter_gguf(DRAFTER), replace(SMALL, width=128), "states of width 64, the model's: 128"),
        (drafter_gguf(DRAFTER), replace(SMALL, vocab=321), "320 tokens, and the model 321"),
        (drafter_gguf(DRAFTER), replace(SMALL, window=4), "window is 8, and the model's 4"),
        (drafter_gguf(DRAFTER), DIFFUSION, "DiffusionGemma denoises"),
        (drafter_gguf(DRAFTER), replace(SMALL, pattern="fff", shared=0), "a kind of layer"),
        (drafter_gguf(DRAFTER, attention__shared_kv_layers=2), SMALL, "keys and values of its own"),
        (drafter_gguf(DRAFTER, embedding_length_out=None), SMALL, "no gemma4-assistant.embedding"),
        (changed(token_embd_weight=None), SMALL, "no tensor token_embd.weight"),
        (
            changed(nextn_pre_projection_weight=None),
            SMALL,
            "nextn.pre_projection.weight is missing",
        ),
        (changed(masked_embd_ordering=None), SMALL, "must hold 320 token ids as I32"),
        (
            changed(
                masked_embd_ordering=NewTensor("masked_embd_ordering", (320,), "F32", bytes(1280))
            ),
            SMALL,
            "must hold 320 token ids as I32",
        ),
        (drafter_gguf(TinyDrafter(SMALL, centroids=33)), SMALL, "cannot be divided among 33"),
    ],
)
def test_what_does_not_fit_is_refused(data: bytes, target: Tiny, problem: str) -> None:
    with pytest.raises(GgufError, match=problem):
        config_of(data, target)


def test_a_model_is_no_drafter_and_a_drafter_no_model() -> None:
    gguf, config = open_tiny(SMALL)
    with pytest.raises(GgufError, match="the architecture is 'gemma4', not gemma4-assistant"):
        drafter_config(gguf, config)
    with pytest.raises(GgufError, match="load the model it drafts for, with draft="):
        Config.from_gguf(opened(drafter_gguf(DRAFTER)))


def test_clusters_hold_every_token_once() -> None:
    gguf, target = opened(drafter_gguf(DRAFTER)), open_tiny(SMALL)[1]
    ids = run_sync(read_ordering(gguf, drafter_config(gguf, target)))
    assert sorted(ids) == list(range(320))
    twice = NewTensor("masked_embd_ordering", (320,), "I32", bytes(4 * 320))
    gguf = opened(changed(masked_embd_ordering=twice))
    with pytest.raises(GgufError, match="does not hold every token once"):
        run_sync(read_ordering(gguf, drafter_config(gguf, target)))
