"""Rows of a step: masks of the tokens that may follow, and drafts that remain or do not."""

from collections.abc import Sequence

import numpy as np
import pytest
from helpers.gpu import device, get, put

from webgemma.gemma.gpu_sampler import MAX_SLOTS, NO_TOKEN, Conversations, GpuSampler, Row
from webgemma.graph import BufferPool, Recorder
from webgemma.reference.sampling import sample
from webgemma.sampler import SampledToken
from webgemma.settings import Settings, is_greedy, resolve
from webgemma.sync import run_sync

VOCAB = 2500  # more than one chunk of the sampler
SUPPRESSED = (3, 2100)
RNG = np.random.default_rng(3)
SETTINGS = {
    "greedy": resolve({"temperature": 0}),
    "all": resolve({"temperature": 1.5, "top_k": 0, "top_p": 1.0}),
    "filtered": resolve({"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01}),
    "typical": resolve({"temperature": 1.0, "top_k": 0, "typical_p": 0.7}),
    "penalised": resolve(
        {"temperature": 1.2, "repetition_penalty": 1.6, "recent": 6, "logit_bias": {7: 4.0}}
    ),
}


class Sampling:
    """Conversations, each with settings and a history, and the logits of the rows of a step."""

    def __init__(self, settings: Sequence[Settings], histories: Sequence[list[int]]) -> None:
        self.settings, self.histories = settings, histories
        self.memory = BufferPool(device())
        self.table = Conversations(device(), self.memory)
        slots = len(settings)
        self.sampler = GpuSampler(device(), VOCAB, 64, SUPPRESSED, 0.0, slots)
        for slot, (each, history) in enumerate(zip(settings, histories, strict=True)):
            self.sampler.set(each, slot + 11, slot)
            self.sampler.set_history(history, slot)
            self.table.set_next(slot, len(history) - 1, history[-1])

    def step(
        self, logits: np.ndarray, rows: Sequence[Row], *, drafts: bool = False, padding: int = 0
    ) -> list[SampledToken]:
        """Return the results of the rows; the plan has some more."""
        count = len(rows) + padding
        padded = np.concatenate([logits, np.full((padding, VOCAB), 9, np.float32)])
        self.table.set_rows(rows)
        recorder = Recorder(device())
        self.sampler.record(
            recorder,
            put(padded),
            self.table.tensor,
            greedy=all(map(is_greedy, self.settings)),
            masked=any(row.masked for row in rows),
            drafts=drafts,
        )
        reading = device().run(recorder.plan(), self.sampler.result(count))
        assert reading is not None
        return self.sampler.parse(run_sync(reading.bytes()), count, [0] * len(rows))

    def state(self, slot: int) -> tuple[int, int]:
        """Return the position and the token that a conversation reads next."""
        table = get(self.table.tensor, np.uint32)[4 + MAX_SLOTS :]
        return int(table[2 * slot]), int(table[2 * slot + 1])

    def history(self, slot: int) -> list[int]:
        ring = self.sampler.tokens.shape[1]
        position = self.state(slot)[0]
        return get(self.sampler.tokens, np.uint32)[slot, : position % ring + 1].tolist()

    def close(self) -> None:
        self.sampler.close()
        self.memory.close()


def mask_of(tokens: Sequence[int]) -> bytes:
    bits = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def own(logits: np.ndarray) -> np.ndarray:
    changed = logits.copy()
    changed[list(SUPPRESSED)] = -np.inf
    return changed


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("allowed", [[2499], [5, 7, 2048, 2100], range(0, 2500, 3)], ids=len)
def test_masked_rows_beside_a_free_one(name: str, allowed: Sequence[int]) -> None:
    """The reference's tokens and log-probabilities, which know nothing of the mask."""
    settings, histories = [SETTINGS[name]] * 3, [[2, 7, 7], [2, 9], [2, 5, 2499, 7]]
    sampling = Sampling(settings, histories)
    logits = RNG.standard_normal((3, VOCAB)).astype(np.float32) * 4
    masks = [mask_of(allowed), None, mask_of([*allowed, 9])]
    for row, mask in enumerate(masks):
        if mask:
            sampling.sampler.set_mask(row, mask)
    rows = [Row(slot, masked=mask is not None) for slot, mask in enumerate(masks)]
    found = sampling.step(logits, rows, padding=1)
    for slot, (result, mask) in enumerate(zip(found, masks, strict=True)):
        history = histories[slot]
        expected = sample(own(logits[slot]), settings[slot], history, slot + 11, mask)
        assert result.token == expected.token
        assert result.logprob == pytest.approx(expected.logprob, abs=1e-4)
        assert sampling.state(slot) == (len(history), result.token)
    sampling.close()


DRAFTS = {0: [40, 41, 42], 1: [], 2: [50, 51]}


@pytest.mark.parametrize(
    ("chosen", "remaining"),
    [
        ([40, 41, 42, 90, 91, 50, 51, 92], [4, 1, 3]),
        ([40, 41, 99, 90, 91, 50, 98, 92], [3, 1, 2]),
        ([97, 41, 42, 90, 91, 96, 51, 92], [1, 1, 1]),
    ],
    ids=["all", "some", "none"],
)
def test_drafts_remain_as_far_as_they_are_chosen(chosen: list[int], remaining: list[int]) -> None:
    histories = [[2, 7], [2, 8, 9], [2]]
    sampling = Sampling([SETTINGS["greedy"]] * 3, histories)
    rows = [Row(slot, ahead) for slot, drafts in DRAFTS.items() for ahead in range(1 + len(drafts))]
    for slot, drafts in DRAFTS.items():
        if drafts:
            sampling.table.set_drafts(slot, drafts)
    logits = np.zeros((len(rows), VOCAB), np.float32)
    logits[np.arange(len(rows)), chosen] = 10
    found = sampling.step(logits, rows, drafts=True)
    for slot, count in enumerate(remaining):
        own_rows = [at for at, row in enumerate(rows) if row.slot == slot]
        tokens = [chosen[at] for at in own_rows]
        results = [found[at].token for at in own_rows]
        assert results == tokens[:count] + [NO_TOKEN] * (len(tokens) - count)
        history = histories[slot] + tokens[:count]
        assert sampling.state(slot) == (len(history) - 1, history[-1])
        assert sampling.history(slot) == history
    sampling.close()


def test_drafts_count_as_recent_tokens_and_have_draws_of_their_own() -> None:
    settings = resolve({"temperature": 1.3, "repetition_penalty": 1.9, "frequency_penalty": 1.0})
    history, drafts = [2, 7, 7, 9], [9, 12, 7]
    sampling = Sampling([settings], [history])
    logits = RNG.standard_normal((4, VOCAB)).astype(np.float32) * 3
    logits[:, [7, 9, 12]] += 9
    sampling.table.set_drafts(0, drafts)
    sampling.step(logits, [Row(0, ahead) for ahead in range(4)], drafts=True)
    found = get(sampling.sampler.results, np.uint32)[0, :4, 0]
    expected = [
        sample(own(logits[ahead]), settings, history + drafts[:ahead], 11).token
        for ahead in range(4)
    ]
    count = 1 + next((at for at, draft in enumerate(drafts) if expected[at] != draft), 3)
    assert found[:count].tolist() == expected[:count]
    assert sampling.history(0) == history + expected[:count]
    sampling.close()


@pytest.mark.parametrize("drafts", [False, True])
def test_an_ended_conversation_stays_as_it_is(drafts: bool) -> None:
    """Its slot may have another one by now."""
    sampling = Sampling([SETTINGS["greedy"]] * 2, [[2, 7], [2, 8]])
    logits = RNG.standard_normal((2, VOCAB)).astype(np.float32)
    before = sampling.state(0), sampling.history(0)
    sampling.step(logits, [Row(0, ended=True), Row(1)], drafts=drafts)
    assert (sampling.state(0), sampling.history(0)) == before
    assert sampling.state(1)[0] == 2
    sampling.close()
