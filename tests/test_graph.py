"""Scratch memory of the recorder: which tensors share a buffer."""

from itertools import pairwise

from helpers.gpu import device

from webgemma.graph import SMALL_NBYTES, Recorder, Tensor


def chain(*tensors: Tensor, recorder: Recorder) -> None:
    """Record copies, each tensor written from the one before it, and allocate them all."""
    for source, target in pairwise(tensors):
        recorder.call("copy", (1,), source=source, to=target, vec4s=1, THREADS=64, EACH=1)
    recorder.plan()


def test_only_large_scratch_reuses_memory() -> None:
    for nbytes, reused in ((SMALL_NBYTES, False), (SMALL_NBYTES + 16, True)):
        recorder = Recorder(device())
        tensors = [recorder.scratch(nbytes // 4) for _ in range(4)]
        chain(*tensors, recorder=recorder)
        assert (tensors[0].buffer is tensors[2].buffer) == reused
        assert tensors[0].buffer is not tensors[1].buffer


def test_tensors_of_a_shared_buffer_are_side_by_side_until_the_last_is_read() -> None:
    recorder = Recorder(device())
    first, second, *others = (recorder.scratch(n) for n in (30_000, 7, 30_000, 30_000, 30_000))
    recorder.share_buffer(first, second)
    chain(first, *others, second, recorder=recorder)
    assert first.buffer is second.buffer
    assert second.offset % 256 == 0
    assert first.offset + first.nbytes <= second.offset <= first.buffer.nbytes - second.nbytes
    assert all(first.buffer is not other.buffer for other in others)
