"""GGUF metadata of a Hugging Face tokenizer: tokenizer.json with byte-pair merges."""

import re
from typing import Any

from webgemma.errors import GgufError

NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6  # GGUF's token types
_BYTE = re.compile(r"<0x[0-9A-F]{2}>", re.ASCII)
_NAMED_TOKENS = {  # spelling -> key
    "<bos>": "bos_token_id",
    "<eos>": "eos_token_id",
    "<pad>": "padding_token_id",
    "<unk>": "unknown_token_id",
    "<mask>": "mask_token_id",
}


def tokenizer_metadata(
    tokenizer: dict[str, Any] | None, vocab: int, ends: Any = None
) -> dict[str, object]:
    """Return the tokenizer.ggml keys of a vocabulary with `vocab` ids.

    Without a tokenizer, the model is used with ids only. `ends` may list the ids that end a turn.
    """
    if tokenizer is None:
        return {"tokenizer.ggml.model": "none"}
    tokens, token_types = _tokens(tokenizer, vocab)
    metadata: dict[str, object] = {
        "model": "gemma4",
        "pre": "gemma4",
        "tokens": tokens,
        "token_type": token_types,
        "merges": _merges(tokenizer),
        "add_bos_token": True,
        "add_space_prefix": False,
    }
    ids = {token: at for at, token in enumerate(tokens)}
    metadata |= {key: ids[spelling] for spelling, key in _NAMED_TOKENS.items() if spelling in ids}
    if isinstance(ends, list) and ends and all(type(x) is int and 0 <= x < vocab for x in ends):
        metadata["eos_token_ids"] = ends
    return {"tokenizer.ggml." + key: value for key, value in metadata.items()}


def _tokens(tokenizer: dict[str, Any], vocab: int) -> tuple[list[str], list[int]]:
    """Return the spelling and type of every id; ids without a spelling are unused."""
    model = tokenizer.get("model")
    spelled = model.get("vocab") if isinstance(model, dict) else None
    added = tokenizer.get("added_tokens", [])
    if not isinstance(spelled, dict) or not isinstance(added, list):
        raise GgufError("tokenizer.json has no byte-pair vocabulary.")
    tokens, token_types = [f"[PAD{at}]" for at in range(vocab)], [UNUSED] * vocab
    for token, at in spelled.items():
        _check(token, at, vocab)
        tokens[at], token_types[at] = token, BYTE if _BYTE.fullmatch(token) else NORMAL
    for entry in added:
        fields: Any = entry if isinstance(entry, dict) else {}
        token, at = fields.get("content"), fields.get("id")
        _check(token, at, vocab)
        tokens[at], token_types[at] = token, CONTROL if fields.get("special") else USER_DEFINED
    return tokens, token_types


def _check(token: Any, at: Any, vocab: int) -> None:
    if not isinstance(token, str) or type(at) is not int or not 0 <= at < vocab:
        raise GgufError(
            f"tokenizer.json has the token {str(token)[:40]!r} with the id {str(at)[:20]}; "
            f"the model has the ids 0 to {vocab - 1}."
        )


def _merges(tokenizer: dict[str, Any]) -> list[str]:
    """Return the merges as "left right", given so or as pairs."""
    merges = tokenizer["model"].get("merges")
    if not isinstance(merges, list):
        raise GgufError("tokenizer.json has no list of merges.")
    lines = [" ".join(pair) if _is_pair(pair) else pair for pair in merges]
    if not all(isinstance(pair, str) for pair in lines):
        raise GgufError("tokenizer.json has merges that are not pairs of strings.")
    return lines


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(x, str) for x in pair)
