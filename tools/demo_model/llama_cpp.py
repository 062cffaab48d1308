"""Load an exported file in llama.cpp and compare token ids and best tokens with webgemma's."""

import argparse
import ctypes as C
from pathlib import Path

import numpy as np
from data import writer

from webgemma.gemma.config import Config
from webgemma.gguf.reader import Gguf
from webgemma.reference.text import TextModel
from webgemma.reference.weights import Weights

TEXTS = ["Hello! How are you?", "Tom has 12 apples.\n\nHe ate   3.", "naïve 🦙 tests", "▁x\ty"]
CHAT = [
    ["u", "Tell me a story about a dog."],
    ["a", "Once upon a time, there was a dog named Max. He loved to run in the park. " * 20],
]


class ModelParameters(C.Structure):
    """llama_model_params: the fields that are set here, then more than enough bytes."""

    _fields_ = [("devices", C.c_void_p), ("overrides", C.c_void_p), ("gpu_layers", C.c_int32)]
    _fields_ += [("rest", C.c_uint8 * 300)]


class ContextParameters(C.Structure):
    """llama_context_params: the fields that are set here, then more than enough bytes."""

    _fields_ = [("context", C.c_uint32), ("batch", C.c_uint32), ("micro_batch", C.c_uint32)]
    _fields_ += [("some", C.c_uint8 * 40), ("flash", C.c_int32), ("more", C.c_uint8 * 48)]
    _fields_ += [("k_type", C.c_int32), ("v_type", C.c_int32)]
    _fields_ += [("rest", C.c_uint8 * 300)]


class Batch(C.Structure):
    """llama_batch: tokens in their order."""

    _fields_ = [("n", C.c_int32), ("token", C.POINTER(C.c_int32)), ("embd", C.c_void_p)]
    _fields_ += [(name, C.c_void_p) for name in ("pos", "n_seq", "seq")]
    _fields_ += [("logits", C.POINTER(C.c_int8))]


class Peer:
    """A model in llama.cpp, on the CPU."""

    def __init__(self, folder: Path, path: str, *, exact: bool = False) -> None:
        patterns = ("libggml-base*", "libggml.*", "libllama.*")
        paths = [sorted(folder.glob(pattern))[0] for pattern in patterns]
        _, ggml, self.c = (C.CDLL(str(path), mode=C.RTLD_GLOBAL) for path in paths)
        ggml.ggml_backend_load_all_from_path(str(folder).encode())
        self.c.llama_backend_init()
        for name in ("model_load_from_file", "init_from_model", "model_get_vocab"):
            getattr(self.c, f"llama_{name}").restype = C.c_void_p
        self.c.llama_model_default_params.restype = ModelParameters
        self.c.llama_context_default_params.restype = ContextParameters
        self.c.llama_batch_init.restype = Batch
        self.c.llama_get_logits_ith.restype = C.POINTER(C.c_float)
        self.model = self.c.llama_model_load_from_file(
            path.encode(), self.c.llama_model_default_params()
        )
        assert self.model, "llama.cpp cannot load the file"
        self.vocabulary = C.c_void_p(self.c.llama_model_get_vocab(C.c_void_p(self.model)))
        parameters = self.c.llama_context_default_params()
        parameters.context = parameters.batch = parameters.micro_batch = 1024
        if exact:  # keys and values in float32 (0 of ggml's formats), no flash attention
            assert (parameters.k_type, parameters.v_type, parameters.flash) == (1, 1, -1)
            parameters.k_type = parameters.v_type = parameters.flash = 0
        context = self.c.llama_init_from_model(C.c_void_p(self.model), parameters)
        assert context, "llama.cpp cannot create a context"
        self.context = C.c_void_p(context)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""
        data, ids = text.encode(), (C.c_int32 * 4096)()
        count = self.c.llama_tokenize(self.vocabulary, data, len(data), ids, 4096, False, False)
        return list(ids[:count])

    def best(self, ids: list[int]) -> np.ndarray:
        """Return the best token after each of the ids."""
        return self.logits(ids).argmax(1)

    def logits(self, ids: list[int]) -> np.ndarray:
        """Return the logits after each of the ids: [len(ids), vocab]."""
        batch = self.c.llama_batch_init(len(ids), 0, 1)
        batch.n = len(ids)
        position = C.cast(batch.pos, C.POINTER(C.c_int32))
        number = C.cast(batch.n_seq, C.POINTER(C.c_int32))
        sequence = C.cast(batch.seq, C.POINTER(C.POINTER(C.c_int32)))
        for at, token in enumerate(ids):
            batch.token[at], position[at], number[at], batch.logits[at] = token, at, 1, 1
            sequence[at][0] = 0
        assert self.c.llama_decode(self.context, batch) == 0
        size = self.c.llama_vocab_n_tokens(self.vocabulary)
        rows = [self.c.llama_get_logits_ith(self.context, at)[:size] for at in range(len(ids))]
        return np.array(rows)


def main() -> None:
    """Compare the ids of texts, then best tokens with the reference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "libraries",
        type=Path,
        help="the libraries of npm @node-llama-cpp/linux-x64, a folder on LD_LIBRARY_PATH",
    )
    parser.add_argument("model", help="a GGUF file of the demo model")
    options = parser.parse_args()
    peer = Peer(options.libraries, options.model)
    tokenizer = writer().tokenizer
    for text in TEXTS:
        assert peer.encode(text) == tokenizer.encode(text), (text, peer.encode(text))
    ids = writer().conversation(CHAT, None)[0]
    gguf = Gguf.open(options.model)
    ours = TextModel(Config.from_gguf(gguf), Weights(gguf)).forward(ids).argmax(1)
    same = float((ours == peer.best(ids)).mean())
    print(f"llama.cpp: same token ids; the same best token at {same:.1%} of {len(ids)} positions")


if __name__ == "__main__":
    main()
