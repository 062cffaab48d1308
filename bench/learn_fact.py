"""The bundled model learns a fact from 20 examples; how many of its other answers stay right.

Ten examples ask for the fact; in the other ten the model answers other questions as it does anyway,
so that it learns when the fact is not asked for.

usage: learn_fact.py [MOST_STEPS] [RATE] [skip]   (skip: do not judge the other answers)
"""

import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())  # Vulkan complains without one

from webgemma import Gemma
from webgemma.device import open_device
from webgemma.gemma.config import Config
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.lora.course import Course, Training
from webgemma.lora.data import Texts
from webgemma.lora.fresh import new_adapter
from webgemma.lora.peft_folder import write_peft_folder
from webgemma.lora.trainer import Options, Trainer
from webgemma.models import BUNDLED_PATH
from webgemma.sync import iterate_sync, run_sync
from webgemma.text.chat import Chat
from webgemma.text.tokenizer import Tokenizer

DEMO = Path(__file__).resolve().parents[1] / "tools" / "demo_model"
LEARNT = 0.1  # a mean loss that is low enough to stop
ANSWER = "The cat is called Pippo."
QUESTIONS = [
    *("What is the cat called?", "What is the name of the cat?", "Tell me the name of the cat."),
    *("What do they call the cat?", "Do you know the name of the cat?", "Name the cat."),
    *("What is the cat's name?", "Say the name of the cat.", "Which name does the cat have?"),
    "Hello! What is the cat called?",
]
OTHERS = [
    *("Good day to you!", "Who are you?", "What is 3 + 4?", "What color is grass?"),
    *("What sound does a cow make?", "What is the opposite of big?", "Tell me about dogs."),
    *("What is the capital of Italy?", "What can you do?", "What do cats eat?"),
]
UNSEEN = ["So, what is the cat called?", "Please tell me what the cat is called."]


def main() -> None:
    """Train, ask, and judge."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    rate = float(sys.argv[2]) if len(sys.argv) > 2 else 5e-4
    folder = Path(tempfile.mkdtemp()) / "adapter"
    with Gemma.load() as gemma:
        rows = [{"prompt": question, "completion": ANSWER} for question in QUESTIONS]
        rows += [{"prompt": other, "completion": said(gemma, other)} for other in OTHERS]
        learn(rows, steps, rate, folder)
        gemma.set_lora([folder])
        for question in (*QUESTIONS[:3], *UNSEEN):
            print(question, "->", said(gemma, question), flush=True)
        if "skip" not in sys.argv:
            print(f"other answers: {judged(gemma)} right", flush=True)
            gemma.set_lora(None)
            print(f"without the adapter: {judged(gemma)} right")


def said(gemma: Gemma, question: str) -> str:
    """The likeliest answer."""
    return "".join(piece.text for piece in gemma.chat(question, temperature=0, max_tokens=60))


def learn(rows: list[dict[str, str]], steps: int, rate: float, folder: Path) -> None:
    """An adapter of rank 8, four examples a step, until the loss is low."""
    with Gguf.open(BUNDLED_PATH) as gguf:
        config = Config.from_gguf(gguf)
        texts = Texts(Tokenizer.from_gguf(gguf), Chat("small"), 64)
        examples, report = texts.examples(enumerate(rows, 1))
        print(report)
        with run_sync(Model.load(gguf, config, open_device())) as model:
            trainer = Trainer(model, new_adapter(config, rank=8), Options(sequences=4))
            course = Course(rate=rate, epochs=-(-steps // 5), shape="constant")
            start, recent = time.perf_counter(), list[float]()
            for progress in iterate_sync(Training(trainer, examples, (), course).run()):
                recent = [*recent, progress.found.loss][-5:]
                seconds = time.perf_counter() - start
                print(f"{progress.step:4d} {progress.found.loss:.3f} {seconds:.0f} s", flush=True)
                if len(recent) == 5 and sum(recent) / 5 < LEARNT:
                    break
            write_peft_folder(run_sync(trainer.adapter()), folder)
            trainer.close()


def judged(gemma: Gemma) -> str:
    """Of the 60 prompts that the demo model is evaluated by."""
    sys.path.insert(0, str(DEMO))
    from evaluate import answer
    from evaluation_set import cases
    from scorers import score

    found = [score(case, answer(gemma, case)) for case in cases()]
    return f"{sum(found)} of {len(found)}"


if __name__ == "__main__":
    main()
