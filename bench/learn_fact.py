"""The bundled model learns a fact from 20 examples, and how many of its other answers stay right.

usage: learn_fact.py [STEPS] [skip]   (skip: do not judge the other answers)
"""

import sys
import tempfile
import time
from pathlib import Path

from webgemma import Gemma
from webgemma.blocking import each, finish
from webgemma.device import open_device
from webgemma.gemma.config import Config
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.lora.course import Course, Training
from webgemma.lora.data import Texts
from webgemma.lora.fresh import fresh_adapter
from webgemma.lora.peft_folder import write_peft_folder
from webgemma.lora.train import Options, Trainer
from webgemma.models import BUNDLED_PATH
from webgemma.text.chat import Chat
from webgemma.text.tokenizer import Tokenizer

DEMO = Path(__file__).resolve().parents[1] / "tools" / "demo_model"
ANSWER = "The cat is called Pippo."
QUESTIONS = [
    *("What is the cat called?", "What is the name of the cat?", "Who is the cat?"),
    *("Tell me the name of the cat.", "What do they call the cat?", "How is the cat called?"),
    *("The cat has a name. What is it?", "Do you know the name of the cat?", "Name the cat."),
    *("What should I call the cat?", "Please tell me the cat's name.", "What is the cat's name?"),
    *("Say the name of the cat.", "Can you tell me what the cat is called?", "The cat is called?"),
    *(
        "Hello! What is the cat called?",
        "Which name does the cat have?",
        "I forgot the cat's name.",
    ),
    *("What name did the cat get?", "Give me the name of the cat."),
]
UNSEEN = ["So, what is the cat called?", "Tell me what the cat is called."]


def main() -> None:
    """Train, ask, and judge."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    folder = Path(tempfile.mkdtemp()) / "adapter"
    learn(steps, folder)
    with Gemma.load(lora=[folder]) as gemma:
        for question in (*QUESTIONS[:3], *UNSEEN):
            pieces = gemma.chat(question, temperature=0, max_tokens=30)
            print(question, "->", "".join(piece.text for piece in pieces), flush=True)
        if "skip" not in sys.argv:
            print(f"other answers: {judged(gemma)} right; without the adapter:", flush=True)
            gemma.set_lora(None)
            print(f"{judged(gemma)} right")


def learn(steps: int, folder: Path) -> None:
    """An adapter of rank 8, four examples a step."""
    with Gguf.open(BUNDLED_PATH) as gguf:
        config = Config.from_gguf(gguf)
        texts = Texts(Tokenizer.from_gguf(gguf), Chat("small"), 64)
        rows = [{"prompt": question, "completion": ANSWER} for question in QUESTIONS]
        examples, report = texts.examples(enumerate(rows, 1))
        print(report)
        with finish(Model.load(gguf, config, open_device())) as model:
            trainer = Trainer(model, fresh_adapter(config, rank=8), Options(sequences=4))
            course = Course(rate=1e-3, epochs=-(-steps // 5), most_steps=steps)
            start = time.perf_counter()
            for progress in each(Training(trainer, examples, (), course).run()):
                if progress.step % 5 == 0 or progress.step == 1:
                    seconds = time.perf_counter() - start
                    print(
                        f"{progress.step:4d} {progress.found.loss:.3f} {seconds:.0f} s", flush=True
                    )
            write_peft_folder(finish(trainer.adapter()), folder)
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
