"""GGUF metadata of a Hugging Face tokenizer: tokenizer.json with byte-pair merges."""

import re
from typing import Any

from webgemma.errors import GgufError
from webgemma.text.bpe import SPACE

NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6  # GGUF's token types
_BYTE = re.compile(r"<0x[0-9A-F]{2}>", re.ASCII)
_PLACEHOLDER = re.compile(r"<unused[0-9]+>|<mask>")  # no text, though not marked as special
_EOS = "<eos>"
_NAMED_TOKENS = {  # spelling -> key
    "<bos>": "bos_token_id",
    _EOS: "eos_token_id",
    "<pad>": "padding_token_id",
    "<unk>": "unknown_token_id",
    "<mask>": "mask_token_id",
}


def tokenizer_metadata(
    tokenizer: dict[str, Any] | None, vocab: int, ends: Any = None, *, scored: bool = False
) -> dict[str, object]:
    """Return the tokenizer.ggml keys of a vocabulary with `vocab` ids.

    Without a tokenizer, the model is used with ids only. `ends` may list the ids that end a turn.
    A `scored` one, Gemma 3's, has scores in place of merges.
    """
    if tokenizer is None:
        return {"tokenizer.ggml.model": "none"}
    tokens, token_types = _tokens(tokenizer, vocab)
    metadata: dict[str, object] = {
        "model": "gemma4",
        "pre": "gemma4",
        "tokens": tokens,
        "token_type": token_types,
        "add_bos_token": True,
        "add_space_prefix": False,
    }
    if scored:
        metadata |= _scored(tokens, token_types, _merges(tokenizer))
    else:
        metadata["merges"] = _merges(tokenizer)
    ids = {token: at for at, token in enumerate(tokens)}
    metadata |= {key: ids[spelling] for spelling, key in _NAMED_TOKENS.items() if spelling in ids}
    if isinstance(ends, list) and ends and all(type(x) is int and 0 <= x < vocab for x in ends):
        metadata["eos_token_ids"] = ends
    return {"tokenizer.ggml." + key: value for key, value in metadata.items()}


def adds_eos(tokenizer: dict[str, Any] | None, settings: dict[str, Any] | None) -> bool:
    """Return whether a text is read with <eos> after it, as Google's embedding models read it.

    A tokenizer.json says so by its template, a tokenizer_config.json by a flag."""
    processor = (tokenizer or {}).get("post_processor")
    nested = processor.get("processors") if isinstance(processor, dict) else None
    for each in nested if isinstance(nested, list) else [processor]:
        template = each.get("single") if isinstance(each, dict) else None
        if isinstance(template, list):
            return any(_EOS in str(piece) for piece in template)
    return bool((settings or {}).get("add_eos_token", True))


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


def _scored(tokens: list[str], token_types: list[int], merges: list[str]) -> dict[str, object]:
    """Return what differs for Gemma 3: scores, and added tokens that are text where spelled.

    A piece has the higher a score, the sooner a merge makes it, as SentencePiece has them."""
    made: dict[str, int] = {}
    for rank, line in enumerate(merges):
        made.setdefault(line.replace(" ", "", 1), rank)
    kinds = [
        CONTROL if kind == USER_DEFINED and _PLACEHOLDER.fullmatch(token) else kind
        for token, kind in zip(tokens, token_types, strict=True)
    ]
    return {
        "model": "llama",
        "pre": "default",
        "tokens": [
            token.replace(SPACE, " ") if kind == USER_DEFINED else token
            for token, kind in zip(tokens, kinds, strict=True)
        ],
        "token_type": kinds,
        "scores": [-float(made.get(token, len(merges) + at)) for at, token in enumerate(tokens)],
    }


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
