"""A tokenizer.json (byte-pair merges) as GGUF metadata, or the note that there are no words."""

import re
from typing import Any

from webgemma.errors import GgufError

NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6  # GGUF's token types
_BYTE = re.compile(r"<0x[0-9A-F]{2}>", re.ASCII)
_NAMED = {  # spelling -> key
    "<bos>": "bos_token_id",
    "<eos>": "eos_token_id",
    "<pad>": "padding_token_id",
    "<unk>": "unknown_token_id",
    "<mask>": "mask_token_id",
}


def tokenizer_metadata(
    tokenizer: dict[str, Any] | None, vocab: int, ends: Any = None
) -> dict[str, object]:
    """All tokenizer.ggml keys; a file without words takes ids. `ends` may list what ends a turn."""
    if tokenizer is None:
        return {"tokenizer.ggml.model": "none"}
    tokens, kinds = _tokens(tokenizer, vocab)
    metadata: dict[str, object] = {
        "model": "gemma4",
        "pre": "gemma4",
        "tokens": tokens,
        "token_type": kinds,
        "merges": _merges(tokenizer),
        "add_bos_token": True,
        "add_space_prefix": False,
    }
    ids = {token: at for at, token in enumerate(tokens)}
    metadata |= {key: ids[spelling] for spelling, key in _NAMED.items() if spelling in ids}
    if isinstance(ends, list) and ends and all(type(x) is int and 0 <= x < vocab for x in ends):
        metadata["eos_token_ids"] = ends
    return {"tokenizer.ggml." + key: value for key, value in metadata.items()}


def _tokens(tokenizer: dict[str, Any], vocab: int) -> tuple[list[str], list[int]]:
    """Every id's spelling and kind; ids that nobody spells are unused."""
    model = tokenizer.get("model")
    spelled = model.get("vocab") if isinstance(model, dict) else None
    added = tokenizer.get("added_tokens", [])
    if not isinstance(spelled, dict) or not isinstance(added, list):
        raise GgufError("tokenizer.json has no vocabulary of byte pairs.")
    tokens, kinds = [f"[PAD{at}]" for at in range(vocab)], [UNUSED] * vocab
    for token, at in spelled.items():
        _check(token, at, vocab)
        tokens[at], kinds[at] = token, BYTE if _BYTE.fullmatch(token) else NORMAL
    for entry in added:
        facts: Any = entry if isinstance(entry, dict) else {}
        token, at = facts.get("content"), facts.get("id")
        _check(token, at, vocab)
        tokens[at], kinds[at] = token, CONTROL if facts.get("special") else USER_DEFINED
    return tokens, kinds


def _check(token: Any, at: Any, vocab: int) -> None:
    if not isinstance(token, str) or type(at) is not int or not 0 <= at < vocab:
        raise GgufError(
            f"tokenizer.json gives the token {str(token)[:40]!r} the id {str(at)[:20]}; "
            f"the model has the ids 0 to {vocab - 1}."
        )


def _merges(tokenizer: dict[str, Any]) -> list[str]:
    """Pairs, or strings with a space between the two."""
    merges = tokenizer["model"].get("merges")
    if not isinstance(merges, list):
        raise GgufError("tokenizer.json has no list of merges.")
    found = [" ".join(pair) if _is_pair(pair) else pair for pair in merges]
    if not all(isinstance(pair, str) for pair in found):
        raise GgufError("tokenizer.json has merges that are no pairs of strings.")
    return found


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(x, str) for x in pair)
