"""The bundled model learns a fact on the GPU; bench/learn_fact.py also measures what it forgets."""

from pathlib import Path

import pytest
from helpers.gpu import device

from webgemma import Gemma
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

ANSWER = "The cat is called Pippo."
QUESTIONS = [
    *("What is the cat called?", "What is the name of the cat?", "Tell me the name of the cat."),
    *("What do they call the cat?", "Do you know the name of the cat?", "Name the cat."),
    *("What is the cat's name?", "Say the name of the cat."),
]
UNSEEN = "So, what is the cat called?"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an adapter after ten steps of four questions each."""
    folder = tmp_path_factory.mktemp("fact") / "adapter"
    with Gguf.open(BUNDLED_PATH) as gguf:
        config = Config.from_gguf(gguf)
        reader = ExampleReader(Tokenizer.from_gguf(gguf), Chat("small"), 64)
        rows = [{"prompt": question, "completion": ANSWER} for question in QUESTIONS]
        examples, _ = reader.examples(enumerate(rows, 1))
        with run_sync(Model.load(gguf, config, device())) as model:
            options = TrainingOptions(batch_size=4)
            trainer = Trainer(model, new_adapter(config, rank=4), options)
            schedule = Schedule(learning_rate=1e-3, epochs=5, shape="constant", warmup=0)
            steps = iterate_sync(train(trainer, examples, (), schedule))
            losses = [step.result.loss for step in steps]
            assert len(losses) == 10
            assert losses[-1] < 0.2 < 3 < losses[0]
            write_peft_folder(run_sync(trainer.adapter()), folder)
            trainer.close()
    return folder


def reply(gemma: Gemma, question: str) -> str:
    return "".join(piece.text for piece in gemma.chat(question, temperature=0, max_tokens=30))


@pytest.mark.parametrize("where", ["cpu", "gpu"])
def test_replies_state_the_fact_with_the_adapter_only(adapter: Path, where: str) -> None:
    with Gemma.load(device=where, lora=[adapter]) as gemma:
        assert reply(gemma, UNSEEN) == ANSWER
        gemma.set_lora(None)
        assert "Pippo" not in reply(gemma, UNSEEN)
