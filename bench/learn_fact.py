"""Teach the bundled model a fact with 20 examples, and count which other answers stay right.

Ten examples ask for the fact; the other ten are other questions with the answers that the model
gives before training, so that it learns when the fact does not apply."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from webgemma import Gemma
from webgemma.device import open_device
from webgemma.gemma.config import Config
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.lora.adapter import new_adapter
from webgemma.lora.data import ExampleReader
from webgemma.lora.peft_folder import write_peft_folder
from webgemma.lora.schedule import Schedule
from webgemma.lora.trainer import Trainer, TrainingOptions
from webgemma.lora.training import train
from webgemma.models import BUNDLED_PATH
from webgemma.sync import iterate_sync, run_sync
from webgemma.text.chat import Chat
from webgemma.text.tokenizer import Tokenizer

DEMO = Path(__file__).resolve().parents[1] / "tools" / "demo_model"
LOW_LOSS = 0.1  # a mean over five steps at which training stops
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
    """Train, print some answers, and score the others."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("max_steps", nargs="?", type=int, default=60)
    parser.add_argument("learning_rate", nargs="?", type=float, default=5e-4)
    parser.add_argument("skip", nargs="?", choices=["skip"], help="do not score the other answers")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp()) / "adapter"
    with Gemma.load() as gemma:
        rows = [{"prompt": question, "completion": ANSWER} for question in QUESTIONS]
        rows += [{"prompt": other, "completion": answered(gemma, other)} for other in OTHERS]
        learn(rows, options.max_steps, options.learning_rate, folder)
        gemma.set_lora([folder])
        for question in (*QUESTIONS[:3], *UNSEEN):
            print(question, "->", answered(gemma, question), flush=True)
        if not options.skip:
            print(f"other answers: {scored(gemma)} right", flush=True)
            gemma.set_lora(None)
            print(f"without the adapter: {scored(gemma)} right")


def answered(gemma: Gemma, question: str) -> str:
    """Return the likeliest answer."""
    return "".join(piece.text for piece in gemma.chat(question, temperature=0, max_tokens=60))


def learn(rows: list[dict[str, str]], steps: int, rate: float, folder: Path) -> None:
    """Train an adapter of rank 8, four examples a step, until the loss is low; write it."""
    with Gguf.open(BUNDLED_PATH) as gguf:
        config = Config.from_gguf(gguf)
        reader = ExampleReader(Tokenizer.from_gguf(gguf), Chat("small"), 64)
        examples, report = reader.examples(enumerate(rows, 1))
        print(report)
        with run_sync(Model.load(gguf, config, open_device())) as model:
            trainer = Trainer(model, new_adapter(config, rank=8), TrainingOptions(batch_size=4))
            schedule = Schedule(learning_rate=rate, max_steps=steps, shape="constant")
            start, recent = time.perf_counter(), list[float]()
            for progress in iterate_sync(train(trainer, examples, (), schedule)):
                loss, seconds = progress.result.loss, time.perf_counter() - start
                recent = [*recent, loss][-5:]
                print(f"{progress.step:4d} {loss:.3f} {seconds:.0f} s", flush=True)
                if len(recent) == 5 and sum(recent) / 5 < LOW_LOSS:
                    break
            write_peft_folder(run_sync(trainer.adapter()), folder)
            trainer.close()


def scored(gemma: Gemma) -> str:
    """Return how many of the demo model's 60 evaluation prompts are answered right."""
    sys.path.insert(0, str(DEMO))
    from evaluate import answer
    from evaluation_set import cases
    from scorers import score

    results = [score(case, answer(gemma, case)) for case in cases()]
    return f"{sum(results)} of {len(results)}"


if __name__ == "__main__":
    main()
