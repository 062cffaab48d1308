"""The hearing of Gemma 4, formula by formula: samples in, soft tokens out."""

import math

import numpy as np

from webgemma.errors import GgufError
from webgemma.gemma.encoder_config import RAW_SAMPLES, SAMPLE_RATE, AudioConfig, audio_tensors
from webgemma.gemma.tensors import check_tensors
from webgemma.reference.text import rms, softmax
from webgemma.reference.weights import Floats, Weights

FRAME, HOP, FFT = 320, 160, 512  # samples: a frame of 20 ms every 10 ms, in a transform of 512
MEL_BINS = 128
MEL_FLOOR = 1e-3

EPS = 1e-6
REACH = 12  # positions that a position attends to: itself and the 11 before it
LOGIT_CAP = np.float32(50)
HALF = np.float32(0.5)


def log_mel(samples: Floats) -> Floats:
    """ln(mel + 0.001), where mel = |FFT(window · frame)| · filters: [frames, bins]."""
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FRAME) / FRAME)  # Hann's, periodic
    magnitudes = np.abs(np.fft.rfft(frames(samples) * window, FFT))  # [frames, 257]
    return np.log(magnitudes @ mel_filters() + MEL_FLOOR).astype(np.float32)


def frames(samples: Floats) -> Floats:
    """Every 160 samples a frame of 320, the first one half before the sound: [frames, 320].

    The sample after a frame must be there too; less than one frame is filled up with silence."""
    padded = np.pad(samples, (FRAME // 2, max(0, FRAME // 2 + 1 - len(samples))))
    return np.lib.stride_tricks.sliding_window_view(padded, FRAME + 1)[::HOP, :FRAME]


def mel_filters() -> np.ndarray:
    """Triangles of height 1, as wide as their neighbours' peaks are apart: [257, bins].

    Peaks are evenly spaced in mel = 2595 · log10(1 + hertz / 700) up to half the sample rate."""
    top = 2595 * math.log10(1 + SAMPLE_RATE / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, MEL_BINS + 2) / 2595) - 1)  # in hertz
    low, peak, high = edges[:-2], edges[1:-1], edges[2:]
    hertz = np.linspace(0, SAMPLE_RATE / 2, FFT // 2 + 1)[:, None]
    rising, falling = (hertz - low) / (peak - low), (high - hertz) / (high - peak)
    return np.maximum(0, np.minimum(rising, falling))


def raw_frames(samples: Floats) -> Floats:
    """The samples in rows of 640, the last one filled up with silence: [n, 640]."""
    return np.pad(samples, (0, -len(samples) % RAW_SAMPLES)).reshape(-1, RAW_SAMPLES)


class AudioModel:
    """A sound encoder: a blueprint and its weights."""

    def __init__(self, audio: AudioConfig, weights: Weights) -> None:
        self.audio = audio
        self.weights = weights
        check_tensors(weights.gguf, audio_tensors(audio), weights.tensors)

    def hear(self, samples: Floats) -> Floats:
        """The soft tokens of a sound at 16 kHz, each 30 s heard on their own: [n, output]."""
        features = log_mel if self.audio.layers else raw_frames
        parts = [samples[part] for part in self.audio.parts(len(samples))]
        return np.concatenate([self.encode(features(part)) for part in parts])

    @np.errstate(over="ignore", invalid="ignore")  # `project` notices what came of it
    def encode(self, mel: Floats) -> Floats:
        """Soft tokens [n, output] of log_mel's rows; without layers, of raw_frames'."""
        if not self.audio.layers:
            return self.project(mel)
        x = self.subsample(mel)  # [n, width], n about frames / 4
        for index in range(self.audio.layers):
            x = self.block(f"a.blk.{index}.", x)
        x = self.linear(x, "a.pre_encode.out") + self.weights["a.pre_encode.out.bias"]
        return self.project(x)

    def project(self, x: Floats) -> Floats:
        """W rms(x): into the width of the text model."""
        normed = rms(x, None, EPS)
        if "mm.a.soft_emb_norm.weight" in self.weights:
            normed = normed * self.weights["mm.a.soft_emb_norm.weight"]
        soft = self.linear(normed, "mm.a.input_projection")
        if not np.isfinite(soft).all():
            raise GgufError(
                f"{self.weights.gguf.name} hears NaN or infinity: its audio weights are "
                "damaged; check the file with `webgemma verify`."
            )
        return soft

    def subsample(self, mel: Floats) -> Floats:
        """Two convolutions, each halving time and bins, then all bins of a time in one vector."""
        x = mel[:, :, None]  # [frames, bins, channels]
        for stage in ("a.conv1d.0", "a.conv1d.1"):
            x = convolve(x, self.weights[stage + ".weight"])
            x = np.maximum(0, layer_norm(x, self.weights[stage + ".norm.weight"]))
        return self.linear(x.reshape(len(x), -1), "a.input_projection")

    def block(self, name: str, x: Floats) -> Floats:
        """A conformer block: half a feed-forward, attention, convolution, the other half."""
        norm = self._norm
        x = x + HALF * self.feed_forward(name, x, "")
        a = self.attention(name, norm(x, name + "attn_pre_norm"))
        x = x + norm(a, name + "attn_post_norm")
        x = x + self.convolution(name, norm(x, name + "conv_norm"))
        x = x + HALF * self.feed_forward(name, x, "_1")
        return norm(x, name + "ln2")

    def feed_forward(self, name: str, x: Floats, which: str) -> Floats:
        """rms(W_down silu(W_up rms(x))); `which` of the two is the end of its tensors' names."""
        h = self.linear(self._norm(x, f"{name}ffn_norm{which}"), f"{name}ffn_up{which}")
        h = self.linear(silu(h), f"{name}ffn_down{which}")
        return self._norm(h, f"{name}ffn_post_norm{which}")

    def attention(self, name: str, h: Floats) -> Floats:
        """Each position over the last 12: softmax(cap(q · k + q · r)) v, r the distance's key."""
        shape = (len(h), self.audio.heads, -1)  # [n, heads, size]
        q, k, v = (self.linear(h, f"{name}attn_{x}").reshape(shape) for x in "qkv")
        q = q * self.weights[name + "per_dim_scale.weight"]  # softplus was taken by the converter
        q = q * np.float32(q.shape[-1] ** -0.5 / math.log(2))
        k = k * np.float32(math.log(1 + math.e) / math.log(2))
        r = self.distance_keys(name)  # [distance, heads, size]
        scores = np.einsum("nhd,nshd->nhs", q, last_ones(k)) + np.einsum("nhd,shd->nhs", q, r)
        scores = LOGIT_CAP * np.tanh(scores / LOGIT_CAP)
        before_the_sound = np.arange(len(h))[:, None, None] < np.arange(REACH)
        scores = np.where(before_the_sound, np.float32(-np.inf), scores)
        out = np.einsum("nhs,nshd->nhd", softmax(scores), last_ones(v))
        return self.linear(out.reshape(h.shape), name + "attn_out")

    def distance_keys(self, name: str) -> Floats:
        """W [sin(δ s), cos(δ s)] for the distances δ = 0 … 11: [distance, heads, size].

        The speeds s fall from 1 to 1 / 10000 in equal ratios."""
        speeds = 10000.0 ** -np.linspace(0, 1, self.audio.width // 2)
        angles = np.arange(REACH)[:, None] * speeds
        waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
        return self.linear(waves, name + "attn_k_rel").reshape(REACH, self.audio.heads, -1)

    def convolution(self, name: str, h: Floats) -> Floats:
        """A gated linear unit, five taps in time for each channel, and a mix of the channels."""
        value, gate = np.split(self.linear(h, name + "conv_pw1"), 2, axis=-1)
        g = value * sigmoid(gate)
        taps = self.weights[name + "conv_dw.weight"]  # [width, 5], the last one for now
        padded = np.pad(g, ((taps.shape[1] - 1, 0), (0, 0)))
        c = np.zeros_like(g)
        for i in range(taps.shape[1]):
            c += padded[i : i + len(g)] * taps[:, i]
        return self.linear(silu(self._norm(c, name + "norm_conv")), name + "conv_pw2")

    def linear(self, x: Floats, name: str) -> Floats:
        """W x; both sides clamped where the file has bounds for them."""
        y = self.weights.linear(self._clamp(x, name + ".input"), name + ".weight")
        return self._clamp(y, name + ".output")

    def _clamp(self, x: Floats, name: str) -> Floats:
        for bound, apply in (("_min", np.maximum), ("_max", np.minimum)):
            if name + bound in self.weights:
                x = apply(x, self.weights[name + bound])
        return x

    def _norm(self, x: Floats, name: str) -> Floats:
        return rms(x, self.weights[name + ".weight"], EPS)


def convolve(x: Floats, weight: Floats) -> Floats:
    """3 × 3 around every second place of x [T, bins, in], zeros outside: [T / 2, bins / 2, out].

    Halves are rounded up; the weight is [out, in, 3 times, 3 bins]."""
    padded = np.pad(x, ((1, 1), (1, 1), (0, 0)))
    times, bins = len(x) + len(x) % 2, x.shape[1] + x.shape[1] % 2
    out = np.zeros((times // 2, bins // 2, len(weight)), np.float32)
    for i in range(3):
        for j in range(3):
            out += padded[i : i + times : 2, j : j + bins : 2] @ weight[:, :, i, j].T
    return out


def layer_norm(x: Floats, weight: Floats) -> Floats:
    """(x − mean) / √(variance + eps) over the last axis, times the weight."""
    centred = x - x.mean(axis=-1, keepdims=True)
    return rms(centred, weight, EPS)


def last_ones(x: Floats) -> Floats:
    """Of x [n, heads, size] the rows p, p − 1, … p − 11 for every p: [n, 12, heads, size]."""
    padded = np.pad(x, ((REACH - 1, 0), (0, 0), (0, 0)))
    return np.stack([padded[REACH - 1 - s :][: len(x)] for s in range(REACH)], axis=1)


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + e⁻ˣ), written so that nothing overflows."""
    return HALF * (1 + np.tanh(HALF * x))


def silu(x: Floats) -> Floats:
    """x · sigmoid(x)."""
    return x * sigmoid(x)
