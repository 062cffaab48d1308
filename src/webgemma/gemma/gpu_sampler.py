"""Sampling the next token on the device, so that decoding does not wait for the host."""

import math
import struct
from collections.abc import Sequence

from webgemma.device import Buffer, Device
from webgemma.errors import InputError
from webgemma.graph import Argument, BufferPool, Recorder, Tensor
from webgemma.kernels import Value, host_struct
from webgemma.sampler import MASK, SampledToken
from webgemma.settings import MAX_TOP_LOGPROBS, Settings, is_greedy

THREADS = 256
CHUNK = 2048  # tokens of the vocabulary that one workgroup covers
RESULTS = 64  # steps whose results are kept for the host to read
MAX_BIASES = 1024
LOWEST = -3.0e38  # -inf of workgroup_best
COLDEST = 1e-6  # a temperature below it leaves only the likeliest token, in float32
PARTIAL_WORDS, BIN_PARTS = 5, 6  # of a Partial; parts of the bins: see token_order


class GpuSampler:
    """Settings, history and results of one conversation, and the kernels that use them.

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
    ) -> None:
        if vocab > CHUNK * THREADS:
            raise InputError(
                f"The vocabulary has {vocab} tokens; sampling supports at most {CHUNK * THREADS}."
            )
        self.device = device
        self.vocab = vocab
        self.softcap = softcap
        self.top_logprobs = 0  # likeliest tokens that are reported with each sampled one
        self._table = host_struct("lib/sampling_settings/table", "Settings")
        self._memory = BufferPool(device)
        tensor = self._memory.tensor
        try:
            self.tokens = tensor(context + 1, label="tokens")  # token p is at p % (context + 1)
            self.results = tensor(RESULTS, 1 + MAX_TOP_LOGPROBS, 2, label="results")
            self._settings = tensor(self._table.nbytes // 4, label="settings")
            self._biases = tensor(MAX_BIASES, 2, label="biases")
            self._suppressed = tensor(len(suppressed) or 1, label="suppressed")
        except BaseException:
            self.close()
            raise
        self._suppressed_count = len(suppressed)
        self._write(self._suppressed, struct.pack(f"<{len(suppressed)}I", *suppressed))

    def set(self, settings: Settings, seed: int) -> None:
        """Sample with these settings from now on."""
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
        self.top_logprobs = settings["top_logprobs"]
        self._write(self._settings, self._table.pack(**self._table_values(settings, seed)))
        pairs = b"".join(struct.pack("<If", token, bias) for token, bias in biases.items())
        self._write(self._biases, pairs)

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

    def set_history(self, ids: Sequence[int]) -> None:
        """Set the conversation so far, from its first token on, which the penalties read."""
        if len(ids) > self.tokens.shape[0]:
            raise InputError(
                f"The conversation has {len(ids)} tokens; the context holds {self.tokens.shape[0]}."
            )
        self._write(self.tokens, struct.pack(f"<{len(ids)}I", *ids))

    def result(self, length: int) -> tuple[Buffer, int, int]:
        """Return where the token that follows `length` others is: buffer, offset and nbytes.

        What is read there is for `parse`."""
        nbytes = self.results.nbytes // RESULTS
        return self.results.buffer, length % RESULTS * nbytes, 8 * (1 + self.top_logprobs)

    @staticmethod
    def parse(result: bytes) -> SampledToken:
        """Parse a step's result: pairs of id and log-probability, the sampled and the likeliest."""
        (token, logprob), *top = struct.iter_unpack("<If", result)
        possible = tuple(pair for pair in top if pair[1] > LOWEST / 2)  # not the suppressed ones
        return SampledToken(token, logprob, possible)

    def record(
        self,
        recorder: Recorder,
        logits: Tensor,
        batch: Tensor,
        ids: Tensor,
        *,
        greedy: bool = False,
        top_logprobs: bool = False,
    ) -> None:
        """Record sampling of the token that follows the batch, by raw logits [1, vocab].

        It goes to `tokens`, `results` and ids[0], and becomes the batch. `greedy` takes the best
        one whatever the temperature: two dispatches instead of four. `top_logprobs` reports the
        likeliest, with one dispatch more."""
        parts = -(-self.vocab // CHUNK)
        values = recorder.scratch(self.vocab, 2)  # logits after penalties and bias, and before
        partials = recorder.scratch(parts, PARTIAL_WORDS)
        bins = recorder.scratch(BIN_PARTS, THREADS)
        settings, vocab, ring = self._settings, self.vocab, self.tokens.shape[0]
        both: dict[str, Argument] = {"partials": partials, "values": values, "THREADS": THREADS}
        chunked: dict[str, Argument] = {
            **both,
            "settings": settings,
            "vocab": vocab,
            "CHUNK": CHUNK,
        }
        recorder.call(
            "penalise",
            (parts,),
            **chunked,
            batch=batch,
            logits=logits,
            tokens=self.tokens,
            bins=bins,
            suppressed=self._suppressed,
            biases=self._biases,
            cap=float(self.softcap),
            suppressed_count=self._suppressed_count,
            ring=ring,
            words=math.prod(bins.shape),
        )
        outputs: dict[str, Argument] = {"results": self.results, "parts": parts, "batch": batch}
        outputs |= {"RESULTS": RESULTS, "TOP": MAX_TOP_LOGPROBS}
        if top_logprobs:
            recorder.call("top_logprobs", (1,), **chunked, **outputs)
        outputs |= {**both, "ids": ids, "tokens": self.tokens, "ring": ring}
        if greedy:
            recorder.call("greedy", (1,), **outputs)
            return
        items = recorder.scratch(vocab, 2)
        recorder.call("fill_bins", (parts,), **chunked, bins=bins, parts=parts)
        recorder.call("sort_into_bins", (parts,), **chunked, bins=bins, items=items, parts=parts)
        recorder.call("sample", (1,), **outputs, bins=bins, items=items, settings=settings)

    def close(self) -> None:
        """Free the memory."""
        self._memory.close()

    def _write(self, tensor: Tensor, data: bytes) -> None:
        if data:
            self.device.write(tensor.buffer, data)
