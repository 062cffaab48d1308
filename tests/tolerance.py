"""Numerical tolerances of all tests. Loosening one needs a reason in the same commit."""

# The reference against transformers, absolute; the standard deviation of the logits is about 4.
LOGITS_OF_TRANSFORMERS = 5e-4
HIDDEN_OF_TRANSFORMERS = 5e-4
DRAFTS_OF_TRANSFORMERS = 1e-4  # logits and states of a drafter, relative: 2e-5 was measured
VECTORS_OF_TRANSFORMERS = 3e-6  # embeddings, whose length is 1, absolute: 1e-6 was measured
MEL_OF_TRANSFORMERS = 1e-4  # log-mel; transformers' FFT is in float32: 4e-5 was measured
AUDIO_TOKENS_OF_TRANSFORMERS = 2e-5  # soft tokens, whose standard deviation is about 1

# Logits of a canvas and states of DiffusionGemma's encoder, absolute: 3.6e-4 was measured.
CANVAS_OF_TRANSFORMERS = 1e-3

# Soft tokens of the reference against transformers, absolute; their standard deviation is about 1.
# Pooled features before the projection, relative to the largest value.
SOFT_TOKENS_OF_TRANSFORMERS = 2e-5
POOLED_OF_TRANSFORMERS = 2e-5
# Networks of random weights amplify the differences of soft tokens: 3.5e-4 was measured.
SOFT_LOGITS_OF_TRANSFORMERS = 1e-3
# Soft tokens of the GPU's encoders in float32, relative to the largest value.
GPU_SOFT_TOKENS = 2e-5
# On matrix units: root mean square, relative. Random weights: 3e-4 to 1.8e-3 was measured; the
# recorded image and audio: 5e-4 to 6e-4.
F16_SOFT_TOKENS = 4e-3
# Log-mel bins on the GPU, absolute: 5e-5 was measured. The silent bins of a pure tone hold rounding
# errors only; there, the mel bins are compared, relative to the loudest.
GPU_MEL = 1e-4
GPU_MEL_OF_A_TONE = 1e-6
GPU_SOFT_LOGITS = 2e-3  # against transformers; random weights amplify differences of soft tokens

# The reference with a cache against itself in one call: only the order of float32 sums differs.
LOGITS_INCREMENTAL = 5e-4
# A product in one piece or in several, which BLAS may sum up in another order: 2e-5 was measured.
LOGITS_IN_PIECES = 1e-4

# Tones through the resampler, of full scale: changes below 7 kHz, remainders above 8.2 kHz.
RESAMPLED = 5e-6

# Kernels against the reference or numpy, relative to the largest value.
F32_KERNEL = 1e-5
DECODED = 1e-6  # of each weight
F16_ROUNDING = 1e-3  # of a value stored in float16: one unit in the last place
ROUNDING = {"int16": 1e-4, "int8": 2e-2}  # of a product with activations as integers

# Products on matrix units, relative to the lengths of their rows: against products of the same
# float16 (only sums in float32 differ: 6e-8 was measured), and of the exact factors, which are
# rounded by 2^-11 at most (2e-4 was measured).
F16_SUMS = 2e-6
F16_PRODUCT = 5e-4
# With both factors in two float16, of which the least bits are left out.
SPLIT_PRODUCT = 2e-6
# Attention there, relative to the largest value: its weights are rounded by 2^-11 at most, too.
F16_ATTENTION = 5e-4

# The GPU engine against transformers (absolute, float32 cache) and the reference (relative).
GPU_LOGITS_OF_TRANSFORMERS = 5e-3
GPU_LOGITS = 1e-3
# Embeddings, whose length is 1, absolute, against transformers and the reference: 5e-7 (exact),
# 2e-5 (int16) and, on matrix units, 7e-4 was measured.
GPU_VECTORS = {"exact": 3e-6, "int16": 6e-5, "f16": 2e-3}
GPU_DRAFTS = 1e-4  # states of a drafter after several drafts, relative to the largest
GPU_LOGITS_OF_ITSELF = 1e-5  # in several calls or one: only the order of float32 sums differs
# With keys and values in float16, absolute: 0.04 to 0.12 was measured, of logits up to 16.
F16_LOGITS_OF_TRANSFORMERS = 0.2
# The same of a real model, with activations as integers, too: 0.012 was measured.
INT16_LOGITS_OF_TRANSFORMERS = 0.04
# With activations as integers: root mean square, relative to the logits' standard deviation.
INT8_LOGITS = 0.1
# On matrix units, with the cache in float16: 2e-3 to 4e-3 was measured.
F16_LOGITS = 0.01
# Networks of random weights amplify rounding: 1e-3 and 0.29 were measured token by token.
RANDOM_LOGITS = {"int16": 3e-3, "int8": 0.4}

# Sampling on the GPU against the reference.
LOGPROB = 1e-4
QUANTILE = 1e-5

# Gradients of adapters: finite differences of the loss in float64; transformers and autograd in
# float32, relative to the largest gradient of the tensor.
FINITE_DIFFERENCES = 1e-5
GRADIENTS_OF_TRANSFORMERS = 1e-3
# Logits of llama.cpp with its float16 GELU, root mean square, of a standard deviation of 4: what is
# close to the middle of two float16 is rounded the other way on another CPU. 8e-3 was measured.
LOGITS_OF_LLAMA_CPP = 2e-2
# On the GPU, relative to the largest gradient of the tensor: against the reference, and against
# itself in several calls or one.
GPU_GRADIENTS = 1e-3
GPU_GRADIENTS_OF_ITSELF = 1e-4
# Rounded to float16 on request, relative to the length of the gradient: networks of random weights
# amplify the rounding in their first layers. 0.03 was measured.
F16_GRADIENTS = 0.1
