"""Choosing the next token on the device, so that decoding needs no answer from the host."""

import math
import struct
from collections.abc import Sequence

from webgemma.device import Buffer, Device
from webgemma.errors import InputError
from webgemma.graph import Recorder, Tensor
from webgemma.kernels import link
from webgemma.sampler import MASK, TOP_LOGPROBS, Chosen, Sampling

THREADS = 256
CHUNK = 2048  # tokens of the vocabulary that one workgroup looks at
RESULTS = 64  # steps whose results are kept for the host to read
BIASES = 1024  # the most that logit_bias may name
LOWEST = -3.0e38  # -inf of best.wgsl
COLDEST = 1e-6  # a temperature below it leaves the best token only, in float32

# The kernels in the order they run, and the pieces of lib/ that each is linked with.
PIECES = {
    "penalise": ("best", "finite", "partial", "settings", "state", "sum"),
    "top": ("best", "partial", "settings", "state", "sum"),
    "greedy": ("best", "partial", "state", "sum", "take"),
    "weigh": ("best", "order", "partial", "settings", "sum", "tally"),
    "scatter": ("best", "order", "partial", "settings", "sum"),
    "choose": ("best", "draw", "order", "partial", "settings", "state", "sum", "take", "tally"),
}


class GpuSampler:
    """Settings, history and results of one conversation, and the kernels that use them.

    They choose what `webgemma.reference.sampling` does, whatever the settings and however many
    tokens stay to choose from; only where float32 rounding decides may they differ.
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
                f"The vocabulary has {vocab} tokens; sampling works for at most {CHUNK * THREADS}."
            )
        self.device = device
        self._buffers: list[Buffer] = []
        self.vocab = vocab
        self.softcap = softcap
        self.top = 0  # likeliest tokens that are reported with each chosen one
        self.tokens = self._keep("tokens", context + 1)  # a ring: token p at p % (context + 1)
        self.results = self._keep("results", RESULTS, 1 + TOP_LOGPROBS, 2)  # see `result`
        self._settings = self._keep("settings", 12)
        self._biases = self._keep("biases", BIASES, 2)
        self._suppressed = self._keep("suppressed", len(suppressed) or 1)
        self._suppressed_count = len(suppressed)
        self._write(self._suppressed, struct.pack(f"<{len(suppressed)}I", *suppressed))

    def set(self, sampling: Sampling, seed: int) -> None:
        """How to choose from now on, and how many of the likeliest tokens to report."""
        biases = sampling.logit_bias
        if len(biases) > BIASES:
            raise InputError(
                f"logit_bias names {len(biases)} tokens; at most {BIASES} are possible."
            )
        if biases and max(biases) >= self.vocab:
            raise InputError(
                f"logit_bias names token {max(biases)}; the last of this model is {self.vocab - 1}."
            )
        self.top = sampling.top_logprobs
        neutral = sampling.repetition_penalty == 1 and sampling.presence_penalty == 0
        packed = struct.pack(
            "<5f7I",
            1 if sampling.greedy else max(sampling.temperature, COLDEST),
            sampling.top_p,
            math.log(sampling.min_p) if sampling.min_p else LOWEST,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            1 if sampling.greedy else sampling.top_k,
            0 if neutral else sampling.recent & MASK,
            len(biases),
            seed & MASK,
            seed >> 32 & MASK,
            self.top,
            0,
        )
        self._write(self._settings, packed)
        pairs = b"".join(struct.pack("<If", token, bias) for token, bias in biases.items())
        self._write(self._biases, pairs)

    def tell(self, ids: Sequence[int]) -> None:
        """The conversation so far, from its first token on: what the penalties look back on."""
        if len(ids) > self.tokens.shape[0]:
            raise InputError(
                f"The conversation has {len(ids)} tokens; there is room for {self.tokens.shape[0]}."
            )
        self._write(self.tokens, struct.pack(f"<{len(ids)}I", *ids))

    def result(self, length: int) -> tuple[Buffer, int, int]:
        """Where the token that follows `length` others is: buffer, offset and size in bytes.

        What is read there is for `chosen`.
        """
        nbytes = self.results.nbytes // RESULTS
        return self.results.buffer, length % RESULTS * nbytes, 8 * (1 + self.top)

    @staticmethod
    def chosen(result: bytes) -> Chosen:
        """A step's result: pairs of id and log-probability, the chosen one's and the likeliest."""
        (token, logprob), *top = struct.iter_unpack("<If", result)
        possible = tuple(pair for pair in top if pair[1] > LOWEST / 2)  # the rest is suppressed
        return Chosen(token, logprob, possible)

    def record(
        self,
        recorder: Recorder,
        logits: Tensor,
        state: Tensor,
        ids: Tensor,
        *,
        greedy: bool = False,
        top: bool = False,
    ) -> None:
        """Choose the token that follows state.first + state.count others by raw logits [1, vocab].

        It goes to `tokens`, `results` and ids[0], and state moves on to it. `greedy` takes the best
        one whatever the temperature: two dispatches instead of four. `top` reports the likeliest,
        with one dispatch more.
        """
        vocab, parts, ring = self.vocab, -(-self.vocab // CHUNK), self.tokens.shape[0]
        settings = self._settings
        values = recorder.scratch(vocab, 2)  # logits after penalties and bias, and before
        partials = recorder.scratch(parts, 5)
        bins = recorder.scratch(6, THREADS)
        self._call(
            recorder,
            "penalise",
            parts,
            [vocab, float(self.softcap), self._suppressed_count, ring, math.prod(bins.shape)],
            *(settings, state, logits, self.tokens, self._suppressed, self._biases),
            *(values, partials, bins),
        )
        sizes: list[int | float] = [vocab, parts]
        if top:
            read = (settings, state, partials, values)
            self._call(recorder, "top", 1, sizes, *read, self.results)
        taking = (partials, state, ids, self.tokens, self.results, values)
        if greedy:
            self._call(recorder, "greedy", 1, [parts, ring], *taking)
            return
        items = recorder.scratch(vocab, 2)
        binning = (settings, partials, values, bins)
        self._call(recorder, "weigh", parts, sizes, *binning)
        self._call(recorder, "scatter", parts, sizes, *binning, items)
        self._call(recorder, "choose", 1, [parts, ring], *taking, bins, items, settings)

    def close(self) -> None:
        """Give the memory back."""
        while self._buffers:
            self.device.free(self._buffers.pop())

    def _keep(self, label: str, *shape: int) -> Tensor:
        """Memory that lives as long as the sampler."""
        nbytes = 4 * math.prod(shape)
        try:
            self._buffers.append(self.device.buffer(nbytes, label))
        except BaseException:
            self.close()
            raise
        return Tensor(shape, nbytes, self._buffers[-1])

    def _write(self, tensor: Tensor, data: bytes) -> None:
        if data:
            self.device.write(tensor.buffer, data)

    def _call(
        self,
        recorder: Recorder,
        op: str,
        groups: int,
        params: list[int | float],
        *tensors: Tensor,
    ) -> None:
        sizes = {"THREADS": THREADS, "CHUNK": CHUNK, "RESULTS": RESULTS, "TOP": TOP_LOGPROBS}
        kernel = link(op, self.device.features, constants=sizes, pieces=PIECES[op])
        recorder.call(kernel, (groups,), params, *tensors)
