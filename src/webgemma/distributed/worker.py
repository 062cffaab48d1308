"""What each process of a job runs: a model that answers blocks of rows."""

import asyncio
import json
import os
import pickle
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from webgemma.api import Gemma
from webgemma.distributed.cluster import enter_folder, import_ray, take_gpu
from webgemma.errors import DeviceLostError, WebgemmaError
from webgemma.server.protocol import Reply

DEVICE_LOST = 70  # the exit code of a process whose GPU was reset
TRIES = 3  # of a block, before it is given up
GIVEN_UP: Mapping[str, Any] = {"given_up": True}  # the answer to a row of such a block


@dataclass(frozen=True, slots=True)
class Work:
    """What the processes of a job do, the same for each."""

    model: str | None
    load: Mapping[str, Any]  # options of `Gemma.load`
    settings: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    think: bool = False
    gpus: Sequence[str] = ()
    job: str = ""  # a name of its own
    folder: str = "."  # to which paths are relative


class Tries:
    """Counts how often blocks were begun, in a process of Ray's that survives those that answer.

    Ray itself would try a block again for ever."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def count(self, block: int) -> int:
        """Count one more try of a block; return how many there are."""
        self._counts[block] += 1
        return self._counts[block]


class RowWorker:
    """A loaded model; Ray makes one in each process and calls it with blocks of rows.

    Several calls at once are served side by side, in one event loop."""

    def __init__(self, work: Work, tries: Any) -> None:
        enter_folder(work.folder)
        self.work, self.tries = work, tries
        gpu = take_gpu(work.gpus, work.job)
        self.model = Gemma.load(work.model, gpu=gpu, **work.load)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def __call__(self, block: Any) -> Any:
        """Return the answers to a block, a pyarrow table: `row` and JSON in `answer`."""
        import pyarrow as pa

        asked = [pickle.loads(value) for value in block["asked"].to_pylist()]
        answers: Sequence[Mapping[str, Any]] = [GIVEN_UP] * len(asked)
        if import_ray().get(self.tries.count.remote(block["row"][0].as_py())) <= TRIES:
            answers = asyncio.run_coroutine_threadsafe(self._answers(asked), self._loop).result()
        return pa.table({"row": block["row"], "answer": [json.dumps(one) for one in answers]})

    async def _answers(self, asked: Sequence[Any]) -> list[dict[str, Any]]:
        return await asyncio.gather(*map(self.answer, asked))

    async def answer(self, asked: Any) -> dict[str, Any]:
        """Return the reply to a prompt or to messages, or why there is none."""
        try:
            return await self._reply(asked)
        except DeviceLostError:
            os._exit(DEVICE_LOST)  # Ray starts the process again, and gives it the block again
        except WebgemmaError as error:
            return _failed(str(error))
        except MemoryError:
            return _failed("There is not enough memory for this row.")
        except Exception as error:
            return _failed(f"This row failed unexpectedly: {type(error).__name__}: {error}")

    async def _reply(self, asked: Any) -> dict[str, Any]:
        work, messages = self.work, asked
        if work.system is not None:
            turns = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
            messages = [{"role": "system", "content": work.system}, *turns]
        reply = Reply()
        stream = self.model.achat(messages, think=work.think, **work.settings)
        async with aclosing(stream) as pieces:
            async for piece in pieces:
                reply.add(piece)
        usage = reply.usage
        answer = {
            "reply": reply.text,
            "finish": reply.finish or "length",
            "usage": {"prompt": usage.prompt, "reply": usage.reply} if usage else None,
            "error": None,
        }
        return answer | ({"thinking": reply.thinking} if work.think else {})


def _failed(error: str) -> dict[str, Any]:
    return {"reply": None, "finish": None, "usage": None, "error": error}
