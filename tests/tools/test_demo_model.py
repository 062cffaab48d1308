"""The demo model's recipe, where it needs no GPU: documents, rows, filters, scorers, prompts."""

import random
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from conftest import SHARED, needs_shared
from helpers.tiny import MERGES, _kind, vocabulary

from webgemma.gguf.formats import FORMATS
from webgemma.reference.dequantise import dequantise
from webgemma.text.tokenizer import Tokenizer

TURNS = [["u", "hello"], ["a", "hi there"], ["u", "the end?"], ["a", "the end."]]


@pytest.fixture(scope="module")
def writer():
    from documents import Writer

    tokens = vocabulary(320)
    kinds = [_kind(token) for token in tokens]
    return Writer(Tokenizer(tokens, MERGES, kinds, bos=2, eos=1, pad=0, unknown=3))


def generated_text(writer, ids, generated):
    """Return the text of the tokens that the model generates."""
    own = [token for token, is_own in zip(ids, generated, strict=True) if is_own]
    return writer.tokenizer.decode(own)


def test_a_chat_is_written_by_the_chat_template(writer):
    ids, generated = writer.conversation(TURNS, None)
    messages = [
        {"role": "user" if role == "u" else "assistant", "content": text} for role, text in TURNS
    ]
    assert ids == writer.chat.encode(writer.tokenizer, messages, add_generation_prompt=False)
    assert generated_text(writer, ids, generated) == "hi there<turn|>the end.<turn|>"


def test_the_models_tokens_follow_its_generation_prompt(writer):
    ids, generated = writer.conversation(TURNS[:2], None)
    prompt = writer.chat.encode(writer.tokenizer, [{"role": "user", "content": "hello"}])
    assert ids[: len(prompt)] == prompt
    assert generated.index(1) == len(prompt)


def test_a_thought_is_generated_by_the_model(writer):
    class Always(random.Random):
        def random(self):
            return 0.0

    ids, generated = writer.conversation(TURNS[:2], Always(1))
    text = generated_text(writer, ids, generated)
    assert text.startswith("<|channel>thought\n")
    assert text.endswith("\n<channel|>hi there<turn|>")
    assert "<|think|>" in writer.tokenizer.decode(ids)


def test_joined_chats_keep_every_turn():
    from documents import join_chats

    chats = [[["u", str(n)], ["a", str(n)]] for n in range(100)]
    joined = list(join_chats(chats, random.Random(1), 0.5))
    assert 30 < len(joined) < 80
    assert [turn for chat in joined for turn in chat] == [turn for chat in chats for turn in chat]


def test_rows_contain_every_document_once():
    from packing import MODEL, OTHER, PADDING, pack

    rng = random.Random(2)
    documents = [([2] + [n + 5] * rng.randint(1, 40), []) for n in range(200)]
    documents = [(ids, [n % 2 for n in range(len(ids))]) for ids, _ in documents]
    tokens, kinds = pack(documents, 64, 0)
    assert tokens.shape == kinds.shape
    assert tokens.shape[1] == 64
    assert Counter(tokens[kinds != PADDING].tolist()) == Counter(
        t for ids, _ in documents for t in ids
    )
    assert (tokens[kinds == PADDING] == 0).all()
    assert (kinds == MODEL).sum() == sum(sum(generated) for _, generated in documents)
    assert (kinds == OTHER).sum() == sum(
        len(generated) - sum(generated) for _, generated in documents
    )
    assert (kinds == PADDING).mean() < 0.1


def test_a_document_longer_than_a_row_is_split():
    from packing import pack

    tokens, kinds = pack([(list(range(10)), [1] * 10)], 4, 0)
    assert sorted(tokens[kinds > 0].tolist()) == list(range(10))
    assert len(tokens) == 3


@pytest.mark.parametrize(
    ("text", "gentle"),
    [
        ("The dog ran to the park and began to play.", True),
        ("The wolf killed the hen.", False),
        ("He had a Sword.", False),
        ("She studied the skill of painting.", True),
    ],
)
def test_violence_is_matched_by_whole_words(text, gentle):
    from filters import is_gentle

    assert is_gentle(text) == gentle


def test_a_good_story_is_long_complete_and_on_its_topic():
    from filters import is_good_story

    story = "Once there was a fox named Max. " + "The fox and Max ran on and on. " * 14
    assert is_good_story(story.strip(), ["fox", "Max"])
    assert not is_good_story(story.strip(), ["dragon"])
    assert not is_good_story(story + "and then", ["fox"])
    assert not is_good_story("There was a fox. The fox ran.", ["fox"])


def test_an_opening_mentions_its_topic():
    from filters import mentions
    from openings import THEMES, opening

    rng = random.Random(3)
    for start in islice(iter(lambda: opening(rng), None), 500):
        assert start.text.endswith(".")
        assert start.keys
        assert "_" not in start.topic
        if start.topic not in THEMES:
            assert all(mentions(start.text, key) for key in start.keys), start


def test_there_are_sixty_prompts_of_nine_skills():
    from evaluation_set import cases, held_out_sums

    counts = Counter(case.skill for case in cases())
    assert counts.total() == 60
    assert len(counts) == 9
    assert len(held_out_sums()) == counts["arithmetic"]


@needs_shared
def test_no_template_chat_has_a_prompt_of_the_evaluation():
    from evaluation_set import has_held_out_sum, held_out_prompts, plain
    from skills import chats

    generator = SHARED.parent / "corpora" / "tools" / "synth_chat.py"
    for chat in chats(generator, 3000, 1):
        assert [role for role, _ in chat] == ["u", "a"] * (len(chat) // 2)
        for role, text in chat:
            assert not has_held_out_sum(text)
            assert role == "a" or plain(text) not in held_out_prompts()


def test_the_sets_of_the_second_training_are_apart():
    from evaluation_set import GREETINGS, PROMPTS, PROMPTS_2, TO_CHOOSE, cases, plain

    sets = [cases(path) for path in (PROMPTS, PROMPTS_2, TO_CHOOSE, GREETINGS)]
    assert [len(found) for found in sets] == [60, 100, 50, 40]
    questions = [{" / ".join(map(plain, case.turns)) for case in found} for found in sets[:3]]
    for at, one in enumerate(questions):
        assert all(not one & other for other in questions[at + 1 :])


@pytest.mark.parametrize(
    ("text", "held_out"),
    [
        ("What is the price of Bitcoin?", True),
        ("hello! what is the price of bitcoin", True),
        ("what is the price of the bitcoin", True),
        ("What is the price of a bus ticket?", False),
        ("hello", False),
        ("Which city is France's capital", True),
        ("Hi!", False),
        ("heyyy", True),
    ],
)
def test_a_prompt_is_recognised_in_nearly_its_words(text, held_out):
    from held_out import is_held_out

    assert is_held_out(text) == held_out


@pytest.mark.parametrize(
    ("text", "held_out"),
    [
        ("7 * 8", True),
        ("What is eight times seven?", True),
        ("17 minus 9 is 8.", True),
        ("9 minus 17", False),
        ("Add 13 and 9.", True),
        ("24 divided by 6 is 4.", True),
        ("7 * 9 = 63", False),
    ],
)
def test_a_sum_is_recognised_in_digits_and_words(text, held_out):
    from held_out import has_held_out_sum

    assert has_held_out_sum(text) == held_out


def test_templates_are_filled_completely():
    from templates import fill, intents

    rng = random.Random(4)
    for intent in (*intents("talk.txt"), *intents("refusals.txt")):
        assert intent.asks, intent.name
        assert intent.replies, intent.name
        for template in (*intent.asks, *intent.replies):
            for _ in range(5):
                text = fill(rng, template)
                assert text, template
                assert not set("(){}|[]") & set(text), (template, text)


@needs_shared
def test_no_chat_of_the_second_training_has_a_prompt_of_any_set():
    from chats_2 import Chats
    from evaluation_set import GREETINGS, PROMPTS, PROMPTS_2, TO_CHOOSE, cases, plain
    from held_out import has_held_out_sum, is_held_out, names

    generator = SHARED.parent / "corpora" / "tools" / "synth_chat.py"
    cases_of_all = [case for path in (PROMPTS, PROMPTS_2, TO_CHOOSE) for case in cases(path)]
    cases_of_all += [case for case in cases(GREETINGS) if case.skill == "other greeting"]
    prompts = {plain(case.turns[-1]) for case in cases_of_all if case.skill != "memory"} - {"hi"}
    people = {name for name in names() if name.isalpha()} - {"orange", "lyon"}
    said = set()
    for chat in islice(Chats(generator, 1), 1500):
        assert [role for role, _ in chat] == ["u", "a"] * (len(chat) // 2)
        for role, text in chat:
            assert text.strip()
            assert not has_held_out_sum(text)
            if role == "u":
                said.add(plain(text))
                assert plain(text) not in prompts
                assert not is_held_out(text)
                assert not (people & set(plain(text).split()) and " my name" in text)
    taught = {plain(case.turns[0]) for case in cases(GREETINGS)} & said
    assert {"hi", "hello", "hey"} <= taught


@pytest.mark.parametrize(
    ("skill", "wanted", "text", "right"),
    [
        ("capital", ["paris"], "The capital of France is Paris.", True),
        ("capital", ["rome"], "It is Romeo.", False),
        ("arithmetic", ["7", "seven"], "3 plus 4 is 7.", True),
        ("arithmetic", ["7", "seven"], "3 plus 7 is 10.", False),
        ("arithmetic", ["19"], "12 + 7 = 19.", True),
        ("arithmetic", ["7", "seven"], "Two plus five is seven.", True),
        ("story", ["mouse"], "A mouse ran.", False),
        ("story", ["mouse"], "A mouse sat down. " * 60, False),
        (
            "story",
            ["mouse"],
            " ".join(f"The mouse saw {n} stars and was glad to count them." for n in range(12)),
            True,
        ),
    ],
)
def test_answers_are_scored(skill, wanted, text, right):
    from evaluation_set import Case
    from scorers import Answer, score

    assert score(Case(skill, [""], wanted), Answer(text, ended=True)) == right
    assert not score(Case(skill, [""], wanted), Answer(text, ended=False))


def test_q8_0_is_accurate_to_half_a_step():
    from export import q8_0

    values = np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32)
    values[1, :32] = 0
    restored = dequantise(q8_0(values), FORMATS["Q8_0"], values.shape, "weights")
    steps = np.abs(values.reshape(3, 2, 32)).max(2, keepdims=True) / 127
    assert (np.abs(restored - values).reshape(3, 2, 32) <= 0.51 * steps).all()
    assert (restored[1, :32] == 0).all()


def test_sharing_layers_read_the_last_layer_of_their_kind_that_does_not_share():
    from settings import DEMO

    assert [DEMO.donor(layer) for layer in range(DEMO.layers)] == [0, 1, 2, 3, 4, 5, 4, 5]
    assert [DEMO.ffn_of(layer) for layer in range(DEMO.layers)] == [512] * 6 + [1024] * 2
