"""What the model says right after training, greedily, to a handful of prompts."""

import torch
from data import writer
from evaluation_set import cases
from model import Gemma4, biases

LONGEST = 220
NUMBER = 16


@torch.no_grad()
def print_samples(model: Gemma4, dtype: torch.dtype) -> None:
    """One answer for every few prompts of the evaluation (no cache: simple, not fast)."""
    write = writer()
    tokenizer, device = write.tokenizer, model.token_embd.device
    picked = [case.turns[0] for case in cases()[:: len(cases()) // NUMBER]]
    for said in picked:
        messages = [{"role": "user", "content": said}]
        ids = write.chat.encode(tokenizer, messages)
        first = len(ids)
        while len(ids) < first + LONGEST and ids[-1] not in tokenizer.ends:
            tokens = torch.tensor([ids], device=device)
            sees = biases(torch.zeros_like(tokens), model.shape.window, dtype)
            ids.append(int(model.logits(model(tokens, sees, dtype)[:, -1]).argmax()))
        print(f"> {said}\n{tokenizer.decode(ids[first:])}\n", flush=True)
