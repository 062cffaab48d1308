"""Greedy answers to some prompts, printed right after training."""

import torch
from data import writer
from evaluation_set import cases
from model import Gemma4, biases

MAX_TOKENS = 220
NUMBER = 16


@torch.no_grad()
def print_samples(model: Gemma4, dtype: torch.dtype) -> None:
    """Print answers to some prompts of the evaluation (without a cache: simple, not fast)."""
    write = writer()
    tokenizer, device = write.tokenizer, model.token_embd.device
    picked = [case.turns[0] for case in cases()[:: len(cases()) // NUMBER]]
    for question in picked:
        messages = [{"role": "user", "content": question}]
        ids = write.chat.encode(tokenizer, messages)
        first = len(ids)
        while len(ids) < first + MAX_TOKENS and ids[-1] not in tokenizer.ends:
            tokens = torch.tensor([ids], device=device)
            masks = biases(torch.zeros_like(tokens), model.shape.window, dtype)
            ids.append(int(model.logits(model(tokens, masks, dtype)[:, -1]).argmax()))
        print(f"> {question}\n{tokenizer.decode(ids[first:])}\n", flush=True)
