"""Sampling the next tokens on the device, so that decoding does not wait for the host."""

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

from webgemma.device import Buffer, Device
from webgemma.errors import InputError
from webgemma.graph import Argument, BufferPool, Recorder, Tensor
from webgemma.kernels import Value, host_struct
from webgemma.sampler import MASK, SampledToken
from webgemma.settings import MAX_TOP_LOGPROBS, Settings, is_greedy

THREADS = 256
CHUNK = 2048  # tokens of the vocabulary that one workgroup covers
MAX_SLOTS = 64  # conversations and rows that decode together: see conversations/table.wgsl
MAX_DRAFTS = 8  # tokens of a conversation that are checked beside the one that it reads next
NO_TOKEN = 2**32 - 1  # the result of a row whose draft was not what the row before led to
LOOKUP = {"LONGEST": 6, "SHORTEST": 2}  # last tokens that are looked for, at most and at least
MAX_BIASES = 1024
LOWEST = -3.0e38  # -inf of workgroup_best
COLDEST = 1e-6  # a temperature below it leaves only the likeliest token, in float32
PARTIAL_WORDS, BIN_PARTS = 6, 6  # of a Partial; parts of a row's bins: see token_order


def plan_rows(count: int) -> int:
    """Return the rows of the plan on which so many rows decode: a power of two.

    Steps whose drafts the device makes have plans of their own, with as many rows as they need."""
    return 1 << (count - 1).bit_length()


class Row(NamedTuple):
    """A row of a step: the next token of a slot's conversation, or a draft so many tokens ahead."""

    slot: int
    ahead: int = 0
    masked: bool = False  # whether a mask says which tokens may follow
    ended: bool = False  # whether its conversation has ended: nothing follows

    @property
    def packed(self) -> int:
        """The row as the table has it."""
        return self.slot | self.ahead << 8 | self.masked << 16 | self.ended << 17


class Conversations:
    """The table of conversations that decode together: see lib/conversations/table.wgsl.

    The host writes who takes part; tokens and positions are the sampler's."""

    NBYTES = 4 * (4 + MAX_SLOTS + 2 * MAX_SLOTS + MAX_SLOTS * MAX_DRAFTS)

    def __init__(self, device: Device, memory: BufferPool) -> None:
        self.device = device
        self.tensor = memory.tensor(self.NBYTES // 4, label="conversations")
        self._rows: list[Row] | None = None  # as they were written last

    def set_rows(self, rows: Sequence[Row]) -> None:
        """Let these rows take part, in this order; those of a conversation follow each other."""
        if self._rows != list(rows):
            self._rows = list(rows)
            header = struct.pack("<4I", 0, len(rows), 0, 0)
            packed = struct.pack(f"<{len(rows)}I", *(row.packed for row in rows))
            self.device.write(self.tensor.buffer, header + packed)

    def set_next(self, slot: int, position: int, token: int = 0) -> None:
        """Set the token that a slot reads next, and its position."""
        offset = 4 * (4 + MAX_SLOTS) + 8 * slot
        self.device.write(self.tensor.buffer, struct.pack("<2I", position, token), offset)

    def set_drafts(self, slot: int, drafts: Sequence[int]) -> None:
        """Set the tokens of a slot that may follow the one that it reads next."""
        offset = 4 * (4 + 3 * MAX_SLOTS) + 4 * MAX_DRAFTS * slot
        self.device.write(self.tensor.buffer, struct.pack(f"<{len(drafts)}I", *drafts), offset)


class GpuSampler:
    """Settings and history of each slot's conversation, and the kernels that use them.

    They sample what `webgemma.reference.sampling` does, whatever the settings and however many
    tokens remain; only where float32 rounding decides may they differ.
    """

    def __init__(
        self,
        device: Device,
        vocab: int,
        context: int,
        suppressed: Sequence[int],
        softcap: float,
        slots: int = 1,
    ) -> None:
        if vocab > CHUNK * THREADS:
            raise InputError(
                f"The vocabulary has {vocab} tokens; sampling supports at most {CHUNK * THREADS}."
            )
        self.device = device
        self.vocab = vocab
        self.softcap = softcap
        self._table = host_struct("lib/sampling_settings/table", "Settings")
        self._memory = BufferPool(device)
        tensor = self._memory.tensor
        try:
            self.tokens = tensor(slots, context + 1, label="tokens")  # p is at p % (context + 1)
            self.results = tensor(1 + MAX_TOP_LOGPROBS, MAX_SLOTS, 2, label="results")
            self._settings = tensor(MAX_SLOTS, self._table.nbytes // 4, label="settings")
            # The suppressed tokens, then the biases of each slot.
            self._biases = tensor(len(suppressed) + slots * MAX_BIASES, 2, label="biases")
        except BaseException:
            self.close()
            raise
        self._suppressed_count = len(suppressed)
        self._masks: Tensor | None = None
        self._write(self._biases, b"".join(struct.pack("<If", token, 0) for token in suppressed))

    def check(self, settings: Settings) -> None:
        """Raise InputError for settings that the device cannot sample with."""
        biases = settings["logit_bias"]
        if len(biases) > MAX_BIASES:
            raise InputError(
                f"logit_bias has {len(biases)} tokens; at most {MAX_BIASES} are supported."
            )
        if biases and max(biases) >= self.vocab:
            raise InputError(
                f"logit_bias has the token {max(biases)}; the last of this model is "
                f"{self.vocab - 1}."
            )

    def set(self, settings: Settings, seed: int, slot: int = 0) -> None:
        """Sample a slot's tokens with these settings from now on."""
        self.check(settings)
        packed = self._table.pack(**self._table_values(settings, seed))
        self._write(self._settings, packed, slot * self._table.nbytes)
        biases = settings["logit_bias"].items()
        pairs = b"".join(struct.pack("<If", token, bias) for token, bias in biases)
        self._write(self._biases, pairs, 8 * (self._suppressed_count + slot * MAX_BIASES))

    def _table_values(self, settings: Settings, seed: int) -> dict[str, Value]:
        """Return the GPU's table: settings by their names, and some in another form."""
        greedy = is_greedy(settings)
        differences = (settings["presence_penalty"], settings["frequency_penalty"])
        penalties = settings["repetition_penalty"] != 1 or any(differences)
        special: dict[str, Value] = {
            "temperature": 1.0 if greedy else max(float(settings["temperature"]), COLDEST),
            "min_p_log": math.log(settings["min_p"]) if settings["min_p"] else LOWEST,
            "top_k": 1 if greedy else settings["top_k"],
            "recent": settings["recent"] & MASK if penalties else 0,
            "bias_count": len(settings["logit_bias"]),
            "seed": (seed & MASK, seed >> 32 & MASK),
        }
        plain = {name: settings[name] for name, _ in self._table.fields if name not in special}  # type: ignore[literal-required]
        floats = {name for name, type_ in self._table.fields if type_ == "f32"}
        return special | {n: float(v) if n in floats else v for n, v in plain.items()}

    def set_history(self, ids: Sequence[int], slot: int = 0) -> None:
        """Set a slot's conversation from its first token on, which the penalties read."""
        ring = self.tokens.shape[1]
        if len(ids) > ring:
            raise InputError(f"The conversation has {len(ids)} tokens; the context holds {ring}.")
        self._write(self.tokens, struct.pack(f"<{len(ids)}I", *ids), 4 * slot * ring)

    @property
    def masks(self) -> Tensor:
        """Which tokens may follow each row: a bit for each; allocated when first used."""
        if self._masks is None:
            self._masks = self._memory.tensor(MAX_SLOTS, -(-self.vocab // 32), label="masks")
        return self._masks

    def set_mask(self, row: int, mask: bytes) -> None:
        """Set which tokens may follow a row: bit i % 32 of its word i // 32."""
        nbytes = 4 * self.masks.shape[1]
        if len(mask) != nbytes:
            raise InputError(f"A mask has {len(mask)} bytes; this vocabulary needs {nbytes}.")
        self._write(self.masks, mask, row * nbytes)

    def result(self, rows: int, top_logprobs: int = 0) -> tuple[Buffer, int, int]:
        """Return where the tokens of a plan of so many rows are: buffer, offset and nbytes.

        What is read there is for `parse`."""
        return self.results.buffer, 0, 8 * rows * (1 + top_logprobs)

    @staticmethod
    def parse(
        result: bytes, rows: int = 1, top_logprobs: Sequence[int] = (0,)
    ) -> list[SampledToken]:
        """Parse the tokens of a step, for as many rows as `top_logprobs` has entries.

        These say how many of the likeliest each of them reports."""
        pairs = list(struct.iter_unpack("<If", result))
        sampled = []
        for row, count in enumerate(top_logprobs):
            (token, logprob), *top = pairs[row::rows][: 1 + count]
            possible = tuple(pair for pair in top if pair[1] > LOWEST / 2)  # not the suppressed
            sampled.append(SampledToken(token, logprob, possible))
        return sampled

    def record(
        self,
        recorder: Recorder,
        logits: Tensor,
        batch: Tensor,
        *,
        greedy: bool = False,
        top_logprobs: bool = False,
        masked: bool = False,
        drafts: bool = False,
    ) -> None:
        """Record sampling of the token after each row, by raw logits [rows, vocab].

        `batch` is the table of conversations. `greedy` takes the best tokens whatever the
        temperatures: two dispatches instead of four. `top_logprobs` reports the likeliest, with one
        dispatch more. `masked`: rows may have masks. `drafts`: rows may be drafts, of which those
        remain that the row before has led to; one dispatch more."""
        rows, vocab = logits.shape
        parts = -(-vocab // CHUNK)
        partials = recorder.scratch(rows, parts, PARTIAL_WORDS)
        bins = recorder.scratch(rows, BIN_PARTS, THREADS)
        ring = self.tokens.shape[1]
        shared: dict[str, Argument] = {"batch": batch, "partials": partials, "THREADS": THREADS}
        chunked: dict[str, Argument] = {"vocab": vocab, "CHUNK": CHUNK, **shared}
        chunked["settings_table"] = self._settings
        stored: dict[str, Argument] = {"token_values": "none"}
        if top_logprobs or not greedy:  # else the best of each chunk are enough
            values = recorder.scratch(rows, vocab, 2)  # logits after penalties and bias, and before
            chunked["values"] = values
            stored = {"token_values": "stored"}
        if masked:
            words = self.masks.shape[1]
            stored |= {"allowed": "masked", "masks": self.masks, "mask_words": words}
        else:
            stored["allowed"] = "all"
        recorder.call(
            "penalise",
            (parts, rows),
            **chunked,
            **stored,
            logits=logits,
            tokens=self.tokens,
            bins=bins,
            biases=self._biases,
            cap=float(self.softcap),
            suppressed_count=self._suppressed_count,
            ring=ring,
            most_biases=MAX_BIASES,
        )
        outputs: dict[str, Argument] = {"results": self.results, "parts": parts}
        if top_logprobs:
            top = {"rows": rows, "TOP": MAX_TOP_LOGPROBS}
            recorder.call("top_logprobs", (rows,), **chunked, **outputs, **top)
        last: dict[str, Argument] = {"tokens": self.tokens, "ring": ring}
        outputs |= {"token_output": "row"} if drafts else {"token_output": "ring", **last}
        if greedy:
            recorder.call("greedy", (rows,), **shared, **outputs, CHUNK=CHUNK)
        else:
            items = recorder.scratch(rows, vocab, 2)
            grid = (parts, rows)
            recorder.call("fill_bins", grid, **chunked, bins=bins, parts=parts)
            recorder.call("sort_into_bins", grid, **chunked, bins=bins, items=items, parts=parts)
            del chunked["CHUNK"]
            recorder.call("sample", (rows,), **chunked, **outputs, bins=bins, items=items)
        if drafts:
            recorder.call("accept_drafts", (1,), batch=batch, results=self.results, **last)

    def lookup_drafts(self, recorder: Recorder, batch: Tensor, rows: int, line: int) -> None:
        """Record drafts for conversations of `line` rows each, from what they have said before."""
        recorder.call(
            "lookup_drafts",
            (rows // line,),
            batch=batch,
            tokens=self.tokens,
            ring=self.tokens.shape[1],
            LINE=line,
            DRAFTS=line - 1,
            THREADS=THREADS,
            **LOOKUP,
        )

    def close(self) -> None:
        """Free the memory."""
        self._memory.close()

    def _write(self, tensor: Tensor, data: bytes, offset: int = 0) -> None:
        if data:
            self.device.write(tensor.buffer, data, offset)
