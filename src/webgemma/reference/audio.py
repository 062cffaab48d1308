"""Audio encoder of Gemma 4: 16 kHz samples in, soft tokens out.

E2B and E4B compute a log-mel spectrogram, subsample it four times in time and run a conformer; 12B
projects raw samples. Shapes: n positions (soft tokens), `width` of the conformer, `output` of the
text model. A linear layer is written W x. Every RMSNorm and layer norm has eps 1e-6.
"""

import math

import numpy as np

from webgemma.errors import GgufError
from webgemma.gemma.encoder_config import RAW_SAMPLES, SAMPLE_RATE, AudioConfig, audio_tensors
from webgemma.gemma.tensors import check_tensors
from webgemma.reference.text import rms, softmax
from webgemma.reference.vision import clamp, scalar_bounds
from webgemma.reference.weights import Floats, Weights

FRAME, HOP, FFT = 320, 160, 512  # samples: frames of 20 ms every 10 ms, zero-padded to 512
MEL_BINS = 128
MEL_FLOOR = 1e-3

EPS = 1e-6
ATTENTION_SPAN = 12  # positions that each position attends to: itself and the 11 before it
LOGIT_CAP = np.float32(50)
HALF = np.float32(0.5)


# Features


def log_mel(samples: Floats) -> Floats:
    """Return ln(|FFT(window · frame)| filters + 0.001), a log-mel spectrogram: [frames, 128]."""
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FRAME) / FRAME)  # periodic Hann window
    magnitudes = np.abs(np.fft.rfft(frames(samples) * window, FFT))  # [frames, 257]
    return np.log(magnitudes @ mel_filters() + MEL_FLOOR).astype(np.float32)


def frames(samples: Floats) -> Floats:
    """Return frames of 320 samples, one every 160, after 160 zeros: [frames, 320].

    There are as many as windows of 321 samples, of which the last sample is dropped. Less than one
    frame of audio is padded with zeros to one."""
    padded = np.pad(samples, (FRAME // 2, max(0, FRAME // 2 + 1 - len(samples))))
    return np.lib.stride_tricks.sliding_window_view(padded, FRAME + 1)[::HOP, :FRAME]


def mel_filters() -> np.ndarray:
    """Return the mel filterbank [257, 128]: triangles of height 1 from peak to peak.

    Peaks are evenly spaced in mel = 2595 · log10(1 + hertz / 700) from 0 to half the sample rate;
    each triangle falls to 0 at the peaks of its neighbours."""
    top = 2595 * math.log10(1 + SAMPLE_RATE / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, MEL_BINS + 2) / 2595) - 1)  # in hertz
    low, peak, high = edges[:-2], edges[1:-1], edges[2:]
    hertz = np.linspace(0, SAMPLE_RATE / 2, FFT // 2 + 1)[:, None]
    rising, falling = (hertz - low) / (peak - low), (high - hertz) / (high - peak)
    return np.maximum(0, np.minimum(rising, falling))


def raw_frames(samples: Floats) -> Floats:
    """Return the samples in rows of 640, the last one padded with zeros: [n, 640]."""
    return np.pad(samples, (0, -len(samples) % RAW_SAMPLES)).reshape(-1, RAW_SAMPLES)


# Encoder


class AudioEncoder:
    """Audio encoder: a configuration and its weights."""

    def __init__(self, audio: AudioConfig, weights: Weights) -> None:
        self.audio = audio
        self.weights = weights
        specs = list(audio_tensors(audio))
        check_tensors(weights.gguf, specs, weights.tensors)
        linears = [name.removesuffix(".weight") for name, _, _ in specs if ".weight" in name]
        self._bounds = scalar_bounds(weights, linears)

    def encode(self, samples: Floats) -> Floats:
        """Return soft tokens of samples at 16 kHz, each 30 s encoded separately: [n, output]."""
        features = log_mel if self.audio.layers else raw_frames
        segments = [samples[segment] for segment in self.audio.segments(len(samples))]
        return np.concatenate([self.encode_features(features(segment)) for segment in segments])

    @np.errstate(over="ignore", invalid="ignore")  # `project` raises for values that are not finite
    def encode_features(self, features: Floats) -> Floats:
        """Return soft tokens [n, output] of log_mel's rows; without layers, of raw_frames'."""
        if not self.audio.layers:
            return self.project(features)
        x = self.subsample(features)  # [n, width], n about frames / 4
        for index in range(self.audio.layers):
            x = self.conformer_block(f"a.blk.{index}.", x)
        x = self.linear(x, "a.pre_encode.out") + self.weights["a.pre_encode.out.bias"]
        return self.project(x)

    def project(self, x: Floats) -> Floats:
        """Return W rms(x): [n, output]. GgufError when a value is not finite."""
        normed = rms(x, None, EPS)
        if "mm.a.soft_emb_norm.weight" in self.weights:
            normed = normed * self.weights["mm.a.soft_emb_norm.weight"]
        soft = self.linear(normed, "mm.a.input_projection")
        if not np.isfinite(soft).all():
            raise GgufError(
                f"{self.weights.gguf.name}: the audio encoder computes NaN or infinity, so its "
                "weights are damaged; check the file with `webgemma verify`."
            )
        return soft

    def subsample(self, mel: Floats) -> Floats:
        """Return W x [n, width], where x are two stages of relu(layer_norm(convolve(x))).

        Each stage halves time and bins; the bins and channels of a time become one vector."""
        x = mel[:, :, None]  # [frames, bins, channels]
        for stage in ("a.conv1d.0", "a.conv1d.1"):
            x = convolve(x, self.weights[stage + ".weight"])
            x = np.maximum(0, layer_norm(x, self.weights[stage + ".norm.weight"]))
        return self.linear(x.reshape(len(x), -1), "a.input_projection")

    def conformer_block(self, name: str, x: Floats) -> Floats:
        """Return the output of a conformer block: [n, width].

        x = x + ½ feed_forward(x)
        x = x + rms(attention(rms(x)))
        x = x + convolution(rms(x))
        x = rms(x + ½ feed_forward₁(x))"""
        norm = self._norm
        x = x + HALF * self.feed_forward(name, x, "")
        a = self.attention(name, norm(x, name + "attn_pre_norm"))
        x = x + norm(a, name + "attn_post_norm")
        x = x + self.convolution(name, norm(x, name + "conv_norm"))
        x = x + HALF * self.feed_forward(name, x, "_1")
        return norm(x, name + "ln2")

    def feed_forward(self, name: str, x: Floats, suffix: str) -> Floats:
        """Return rms(W_down silu(W_up rms(x))); a block has two, with tensors named "" and "_1"."""
        h = self.linear(self._norm(x, f"{name}ffn_norm{suffix}"), f"{name}ffn_up{suffix}")
        h = self.linear(silu(h), f"{name}ffn_down{suffix}")
        return self._norm(h, f"{name}ffn_post_norm{suffix}")

    def attention(self, name: str, h: Floats) -> Floats:
        """Return W_o softmax(50 tanh((q · k + q · r) / 50)) v over the last 12 positions.

        r is the relative-position key of the distance between query and key. q and k are scaled:
        q · per_dim_scale / (√head_dim · ln 2), k · ln(1 + e) / ln 2."""
        shape = (len(h), self.audio.heads, -1)  # [n, heads, head_dim]
        q, k, v = (self.linear(h, f"{name}attn_{x}").reshape(shape) for x in "qkv")
        q = q * self.weights[name + "per_dim_scale.weight"]  # the converter applied the softplus
        q = q * np.float32(q.shape[-1] ** -0.5 / math.log(2))
        k = k * np.float32(math.log(1 + math.e) / math.log(2))
        r = self.relative_keys(name)  # [distance, heads, head_dim]
        scores = np.einsum("nhd,nshd->nhs", q, recent_rows(k)) + np.einsum("nhd,shd->nhs", q, r)
        capped = LOGIT_CAP * np.tanh(scores / LOGIT_CAP)
        scores = np.where(np.isfinite(scores), capped, np.float32(np.nan))  # damage is not capped
        before_start = np.arange(len(h))[:, None, None] < np.arange(ATTENTION_SPAN)
        scores = np.where(before_start, np.float32(-np.inf), scores)
        out = np.einsum("nhs,nshd->nhd", softmax(scores), recent_rows(v))
        return self.linear(out.reshape(h.shape), name + "attn_out")

    def relative_keys(self, name: str) -> Floats:
        """Return W [sin(δ f), cos(δ f)] for distances δ = 0 … 11: [distance, heads, head_dim].

        The frequencies f fall from 1 to 1 / 10000 in equal ratios."""
        frequencies = 10000.0 ** -np.linspace(0, 1, self.audio.width // 2)
        angles = np.arange(ATTENTION_SPAN)[:, None] * frequencies
        waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
        keys = self.linear(waves, name + "attn_k_rel")
        return keys.reshape(ATTENTION_SPAN, self.audio.heads, -1)

    def convolution(self, name: str, h: Floats) -> Floats:
        """Return W_2 silu(rms(depthwise(value · sigmoid(gate)))) for [value, gate] = W_1 h.

        The depthwise convolution is causal: five taps in time for each channel."""
        value, gate = np.split(self.linear(h, name + "conv_pw1"), 2, axis=-1)
        g = value * sigmoid(gate)
        taps = self.weights[name + "conv_dw.weight"]  # [width, 5], the last for the current time
        padded = np.pad(g, ((taps.shape[1] - 1, 0), (0, 0)))
        c = np.zeros_like(g)
        for i in range(taps.shape[1]):
            c += padded[i : i + len(g)] * taps[:, i]
        return self.linear(silu(self._norm(c, name + "norm_conv")), name + "conv_pw2")

    def linear(self, x: Floats, name: str) -> Floats:
        """Return W x, with input and output clamped to the bounds that the file has for them."""
        input_min, input_max, output_min, output_max = self._bounds[name]
        y = self.weights.linear(clamp(x, input_min, input_max), name + ".weight")
        return clamp(y, output_min, output_max)

    def _norm(self, x: Floats, name: str) -> Floats:
        return rms(x, self.weights[name + ".weight"], EPS)


# Operations


def convolve(x: Floats, weight: Floats) -> Floats:
    """Return the 3 × 3 convolution of x [T, bins, in] with stride 2: [T / 2, bins / 2, out].

    x is padded with one zero on each side; halves are rounded up. The weight is
    [out, in, 3 times, 3 bins]."""
    padded = np.pad(x, ((1, 1), (1, 1), (0, 0)))
    times, bins = len(x) + len(x) % 2, x.shape[1] + x.shape[1] % 2
    out = np.zeros((times // 2, bins // 2, len(weight)), np.float32)
    for i in range(3):
        for j in range(3):
            out += padded[i : i + times : 2, j : j + bins : 2] @ weight[:, :, i, j].T
    return out


def layer_norm(x: Floats, weight: Floats) -> Floats:
    """Return (x − mean(x)) / √(variance(x) + eps) · weight over the last axis."""
    centred = x - x.mean(axis=-1, keepdims=True)
    return rms(centred, weight, EPS)


def recent_rows(x: Floats) -> Floats:
    """Return rows p, p − 1, … p − 11 of x [n, heads, size] for every p: [n, 12, heads, size].

    Rows before the first are zero."""
    padded = np.pad(x, ((ATTENTION_SPAN - 1, 0), (0, 0), (0, 0)))
    return np.stack(
        [padded[ATTENTION_SPAN - 1 - s :][: len(x)] for s in range(ATTENTION_SPAN)], axis=1
    )


def sigmoid(x: Floats) -> Floats:
    """Return 1 / (1 + e⁻ˣ) as ½ (1 + tanh(x / 2)), which does not overflow."""
    return HALF * (1 + np.tanh(HALF * x))


def silu(x: Floats) -> Floats:
    """Return x · sigmoid(x)."""
    return x * sigmoid(x)
