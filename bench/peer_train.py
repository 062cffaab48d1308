"""Time the same training with PyTorch, transformers and PEFT, in bf16: tokens per second.

usage: peer_train.py [SEQUENCES] [LENGTH] [RANK] [--checkpointing] [--compile] [--tiny]

The shapes, the adapted matrices and the step (AdamW, clipping) are those of train_speed.py e2b.
Each adapter is timed with and without gradient checkpointing; --checkpointing: only with;
--compile: torch.compile too; --tiny: a small model, to check on any machine that all of this runs.
Needs torch, transformers with Gemma 4, and peft; nothing is downloaded.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # last: it has a folder `gguf`

import peft
import torch
import transformers
from helpers.blank import e2b

from webgemma.gemma.config import Config, text_tensors
from webgemma.lora.adapter import ALL_LINEAR, LAYER_MODULES, split_layer

WARM_UP, STEPS = 3, 10
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Variant:
    """One way to train.

    bf16 adapters are the fastest; float32 ones, with autocast for the products, are what
    transformers' Trainer uses with bf16=True, and have the precision of ours."""

    float32: bool
    checkpointing: bool
    compiled: bool = False

    @property
    def name(self) -> str:
        """The name that is printed."""
        adapter = "float32 adapter, autocast" if self.float32 else "bf16 adapter"
        checkpointing = "checkpointing" if self.checkpointing else "all kept"
        return f"{adapter}, {checkpointing}{', compiled' if self.compiled else ''}"


def main() -> None:
    """Time every variant; a failure is printed and the next one follows."""
    options = arguments()
    config = tiny() if options.tiny else e2b()
    card = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"peft {peft.__version__} on {card}: {options.sequences} sequences of {options.length} "
        f"tokens, rank {options.rank}, bf16 weights, sdpa, median of {STEPS} steps; "
        "{:,} parameters and {:,} trained".format(*sizes(config, options.rank)),
        flush=True,
    )
    choices = [True] if options.checkpointing else [False, True]
    variants = [Variant(float32, choice) for float32 in (True, False) for choice in choices]
    if options.compile:
        variants += [Variant(float32, choices[0], compiled=True) for float32 in (True, False)]
    for variant in variants:
        try:
            print(f"{variant.name}: {measured(config, variant, options)}", flush=True)
        except Exception as error:  # the figures of the others are still useful
            reason = (str(error).strip().splitlines() or ["no reason given"])[0]
            print(f"{variant.name}: failed: {type(error).__name__}: {reason[:200]}", flush=True)
        free_memory()


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, number in (("sequences", 4), ("length", 512), ("rank", 16)):
        parser.add_argument(name, nargs="?", type=int, default=number)
    for flag, help in (
        ("--checkpointing", "only with gradient checkpointing"),
        ("--compile", "torch.compile too"),
        ("--tiny", "a small model"),
    ):
        parser.add_argument(flag, action="store_true", help=help)
    return parser.parse_args()


def tiny() -> Config:
    """Return E2B's layers 10 to 19, narrower; the last five share keys and values."""
    layers = tuple(
        replace(
            layer,
            index=layer.index - 10,
            kv_donor=layer.kv_donor - 10,
            heads=2,
            head_dim=layer.head_dim // 16,
            ffn=layer.ffn // 64,
        )
        for layer in e2b().layers[10:20]
    )
    return replace(e2b(), layers=layers, width=64, vocab=512, ple=16)


def measured(config: Config, variant: Variant, options: argparse.Namespace) -> str:
    """Return the speed, memory and losses of one variant."""
    model = adapted(config, variant, options.rank)
    step = stepper(model, variant, ids_of(config, options.sequences, options.length))
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, times = [], []
    for _ in range(WARM_UP + STEPS):
        start = time.perf_counter()
        losses.append(step())
        times.append(time.perf_counter() - start)
    seconds = median(times[WARM_UP:])
    peak = f"{torch.cuda.max_memory_allocated() / 1e9:.2f} GB" if DEVICE == "cuda" else "uncounted"
    return (
        f"{options.sequences * options.length / seconds:.0f} tokens/s ({seconds:.4f} s, "
        f"{min(times[WARM_UP:]):.4f} to {max(times[WARM_UP:]):.4f}, first {times[0]:.1f}), "
        f"memory {peak}, loss {losses[0]:.3f} to {losses[-1]:.3f}"
    )


def adapted(config: Config, variant: Variant, rank: int) -> Any:
    """Return the model with random weights and a new adapter; ValueError if a size is not ours."""
    torch.manual_seed(1)
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(
            text_config(config), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    parameters, trained = sizes(config, rank)
    check("parameters", model.num_parameters(), parameters)
    if variant.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    lora = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=[LAYER_MODULES[target] for target in ALL_LINEAR],
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(model, lora, autocast_adapter_dtype=variant.float32).train()
    check("trained parameters", model.get_nb_trainable_parameters()[0], trained)
    return model


def sizes(config: Config, rank: int) -> tuple[int, int]:
    """Return the parameters of our model, and of its adapter on all linear layers."""
    shapes = {name: shape for name, shape, needed in text_tensors(config) if needed}
    adapted = [
        shape
        for name, shape in shapes.items()
        if (layer := split_layer(name)) and layer[1] in ALL_LINEAR
    ]
    return sum(map(prod, shapes.values())), rank * sum(map(sum, adapted))


def text_config(config: Config) -> transformers.Gemma4TextConfig:
    """Return these shapes as a configuration of transformers."""
    first, last = config.layers[0], config.layers[-1]  # sliding, full
    return transformers.Gemma4TextConfig(
        vocab_size=config.vocab,
        vocab_size_per_layer_input=config.vocab,
        hidden_size=config.width,
        hidden_size_per_layer_input=config.ple,
        intermediate_size=first.ffn,
        use_double_wide_mlp=last.ffn == 2 * first.ffn,
        num_hidden_layers=len(config.layers),
        num_kv_shared_layers=sum(layer.shares_kv for layer in config.layers),
        num_attention_heads=first.heads,
        num_key_value_heads=first.kv_heads,
        head_dim=first.head_dim,
        global_head_dim=last.head_dim,
        layer_types=[f"{'sliding' if x.sliding else 'full'}_attention" for x in config.layers],
        sliding_window=config.window,
        max_position_embeddings=config.context,
        rms_norm_eps=config.eps,
        final_logit_softcapping=config.softcap,
        use_cache=False,
    )


def check(what: str, theirs: int, ours: int) -> None:
    """Raise ValueError if the sizes differ: speeds of different models cannot be compared."""
    if theirs != ours:
        raise ValueError(f"transformers' model has {theirs} {what}, ours {ours}.")


def ids_of(config: Config, sequences: int, length: int) -> torch.Tensor:
    """Return random tokens after <bos>."""
    ids = torch.randint(3, config.vocab, (sequences, length), device=DEVICE)
    ids[:, 0] = 2
    return ids


def stepper(model: Any, variant: Variant, ids: torch.Tensor) -> Callable[[], float]:
    """Return a function that runs one training step, waits for it, and returns its loss."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, fused=True)
    forward = torch.compile(model, dynamic=False) if variant.compiled else model
    precision = torch.autocast(DEVICE, torch.bfloat16) if variant.float32 else nullcontext()

    def step() -> float:
        with precision:
            loss = forward(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return float(loss.detach())

    return step


def free_memory() -> None:
    """Free the memory of the last variant."""
    torch.compiler.reset()
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
