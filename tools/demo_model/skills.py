"""Template chats: identity, limits, arithmetic, facts and small talk.

The corpora's `synth_chat.py` is loaded as a module; the generators here replace some of its own and
add others.
"""

import importlib.util
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from evaluation_set import cases, has_held_out_sum, held_out_prompts, held_out_sums, plain
from identity import HARD, IDENTITY, NO
from openings import BOYS, GIRLS
from settings import NAME
from talk import FAMOUS, HELLOS, LEADS, MORE_CITIES, MORE_COLOURS, SMALLTALK, TOPICS

Pairs = list[tuple[str, str]]
SYLLABLES = "ba be bo da del fi ga ki la lo ma mi na no pa ra ri ro sa ta to ve vi ya za zo".split()


def chats(path: Path, count: int, seed: int) -> Iterator[list[list[str]]]:
    """Yield chats as turns [["u", …], ["a", …], …]; none has a prompt of the evaluation."""
    synth = load(path)
    synth.R.seed(seed)
    refused = held_out_prompts()
    produced = 0
    while produced < count:
        _, pairs = synth.one()
        if any(
            plain(text) in refused or has_held_out_sum(f"{text} {reply}") or len(reply) < 2
            for text, reply in pairs
        ):
            continue
        produced += 1
        yield [turn for text, reply in pairs for turn in (["u", text], ["a", reply])]


def load(path: Path) -> ModuleType:
    """Return the shared module with the model's name and the generators of this module."""
    spec = importlib.util.spec_from_file_location("synth_chat", path)
    assert spec is not None
    assert spec.loader is not None
    synth = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(synth)
    synth.NAME = NAME
    ours: dict[str, tuple[Callable[[Any], Pairs], int]] = {
        "ident": (identity, 24),
        "unknown": (hard, 22),
        "add": (arithmetic, 34),
        "capital": (capital, 22),
        "opp": (opposite, 18),
        "color": (colour, 14),
        "recall": (recall, 26),
        "home": (home, 4),
        "greeting": (greeting, 10),
        "sounds": (animal, 16),
        "smalltalk": (smalltalk, 10),
    }
    for name, (generator, weight) in ours.items():
        synth.G[name] = (_bound(generator, synth), weight)
        setattr(synth, name, synth.G[name][0])  # the shared generators call each other by name
    synth.ALL = list(synth.G)
    synth.WT = [synth.G[name][1] for name in synth.ALL]
    return synth


HELD_OUT_NAMES = {
    name.title() for case in cases() if case.skill == "memory" for name in case.wanted
}


def _bound(generator: Callable[[Any], Pairs], synth: ModuleType) -> Callable[[], Pairs]:
    return lambda: generator(synth)


def question(s: Any, *variants: str) -> str:
    """Return one of the variants, sometimes with words before it or without case and marks."""
    text: str = s.R.choice(variants)
    if s.R.random() < 0.15:
        before = s.R.choice(LEADS)
        text = before + (text[0].lower() + text[1:] if before.endswith(", ") else text)
    return str(s.q(text))


def identity(s: Any) -> Pairs:
    """Return questions about its name, what it is and can do, and webgemma, with answers."""
    topics = s.R.sample(list(IDENTITY), s.R.choice((1, 1, 1, 2)))
    return [(question(s, *IDENTITY[topic][0]), s.R.choice(IDENTITY[topic][1])) for topic in topics]


def hard(s: Any) -> Pairs:
    """Return a request that is too hard, and a refusal that names what the model is."""
    pattern = s.R.choice(HARD)
    slots = {
        "topic": s.R.choice(TOPICS),
        "language": s.R.choice(("German", "French", "Spanish", "Italian", "Japanese", "Latin")),
        "code": s.R.choice(("Python", "JavaScript", "Java", "C++", "SQL", "Rust", "HTML")),
        "who": s.R.choice(FAMOUS),
        "n": s.R.randint(1000, 99999),
        "m": s.R.randint(1000, 99999),
    }
    return [(question(s, pattern.format(**slots)), s.R.choice(NO))]


def arithmetic(s: Any) -> Pairs:
    """Return a sum, difference, product or quotient of small numbers, in digits or in words."""
    rng: random.Random = s.R
    while True:
        sign = rng.choice("+++---*/")
        a, b = _numbers(rng, sign)
        if (sign, a, b) not in held_out_sums():
            break
    result = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if sign == "/" else 0}[sign]
    word = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}[sign]
    if rng.random() < 0.2 and max(a, b, result) < 100:
        x, y, z = s.num(a), s.num(b), s.num(result)
        variants = (
            f"What is {x} {word} {y}?",
            f"What's {x} {word} {y}?",
            f"{s.cap(x)} {word} {y}?",
        )
        return [
            (question(s, *variants), rng.choice((f"{s.cap(x)} {word} {y} is {z}.", f"It is {z}.")))
        ]
    shown = {"*": rng.choice(("x", "*", "times")), "/": "/"}.get(sign, sign)
    variants = (
        *(f"What is {a} {shown} {b}?", f"What is {a} {word} {b}?", f"What's {a} {shown} {b}?"),
        *(
            f"{a} {shown} {b}",
            f"{a} {shown} {b} = ?",
            f"{a}{sign}{b}",
            f"Calculate {a} {shown} {b}.",
        ),
        *(f"How much is {a} {word} {b}?", f"Can you add {a} and {b}?" if sign == "+" else ""),
        *(f"What do you get if you add {a} and {b}?" if sign == "+" else "",),
        *(f"What is the sum of {a} and {b}?" if sign == "+" else "",),
        *(
            f"Can you tell me what {a} {word} {b} is?",
            f"Solve {a} {shown} {b}.",
            f"{a} {word} {b}?",
        ),
    )
    replies = (
        *(
            f"{a} {word} {b} is {result}.",
            f"{a} {word} {b} is {result}.",
            f"The answer is {result}.",
        ),
        f"{a} {'x' if sign == '*' else sign} {b} = {result}.",
    )
    return [(question(s, *filter(None, variants)), rng.choice(replies))]


def _numbers(rng: random.Random, sign: str) -> tuple[int, int]:
    if sign == "*":
        return rng.randint(0, 12), rng.randint(0, 12)
    if sign == "/":
        b = rng.randint(1, 10)
        return b * rng.randint(1, 10), b
    top = rng.choices((10, 20, 50, 99), (45, 35, 10, 10))[0]
    a, b = rng.randint(0, top), rng.randint(0, top)
    return (max(a, b), min(a, b)) if sign == "-" else (a, b)


def capital(s: Any) -> Pairs:
    """Return questions about capitals; the later ones may be short."""
    pairs: Pairs = []
    for at, (country, city) in enumerate(
        s.R.sample(list(s.CAPS.items()), s.R.choice((1, 1, 2, 3)))
    ):
        k = country
        short = (f"And of {k}?", f"And {k}?", f"What about {k}?", f"And the capital of {k}?")
        variants = (
            *(f"What is the capital of {k}?", f"What's the capital of {k}?", f"Capital of {k}?"),
            *(f"What is the capital city of {k}?", f"Which city is the capital of {k}?"),
            *(f"Name the capital of {k}.", f"Tell me the capital city of {k}.", f"{k}'s capital?"),
            *(f"Can you tell me the capital of {k}?", f"What city is the capital of {k}?"),
            *(f"Do you know the capital of {k}?", f"Please name the capital city of {k}."),
        )
        reply = s.R.choice(
            (f"The capital of {k} is {city}", f"{city} is the capital of {k}", f"It is {city}")
        )
        reply = reply.rstrip(".") + "." if at == 0 or "It is" in reply else f"It is {city}"
        text = question(s, *(short if at and s.R.random() < 0.6 else variants))
        pairs.append((text, reply.rstrip(".") + "."))
    return pairs


def opposite(s: Any) -> Pairs:
    """Return questions about opposites, in both directions where the reverse is clear."""
    unclear = {"short", "light", "quiet", "white", "last", "end", "back", "down", "out"}
    both = dict(s.OPP) | {b: a for a, b in s.OPP.items() if b not in unclear | set(s.OPP)}
    pairs: Pairs = []
    for at, (a, b) in enumerate(s.R.sample(list(both.items()), s.R.choice((1, 1, 2)))):
        short = (f"And of {a}?", f"And {a}?", f'And the opposite of "{a}"?', f"What about {a}?")
        variants = (
            *(
                f"What is the opposite of {a}?",
                f'What is the opposite of "{a}"?',
                f"Opposite of {a}?",
            ),
            *(
                f"What's the opposite of {a}?",
                f"Tell me the opposite of {a}.",
                f"Name the opposite of {a}.",
            ),
            *(f"What word is the opposite of {a}?", f'Which word means the opposite of "{a}"?'),
            *(f"Can you tell me the opposite of {a}?", f"What is the contrary of {a}?"),
        )
        replies = (
            f"The opposite of {a} is {b}.",
            f'The opposite of "{a}" is "{b}".',
            f"It is {b}.",
        )
        text = question(s, *(short if at and s.R.random() < 0.6 else variants))
        pairs.append((text, s.R.choice(replies)))
    return pairs


def colour(s: Any) -> Pairs:
    """Return a question about the colour of a thing or of a mixture."""
    if s.R.random() < 0.3:
        (x, y), mixture = s.R.choice(list(s.MIX.items()))
        x, y = s.R.sample((x, y), 2)
        variants = (
            *(f"What do you get when you mix {x} and {y}?", f"What color do {x} and {y} make?"),
            *(f"If I mix {x} and {y}, what color do I get?", f"Mix {x} and {y}. What color is it?"),
            *(f"What happens when I mix {x} and {y} paint?", f"{x} and {y} make what color?"),
        )
        return [(question(s, *variants), f"When you mix {x} and {y}, you get {mixture}.")]
    thing, shade = s.R.choice(list((s.COL | MORE_COLOURS).items()))
    bare = thing.removeprefix("a ").removeprefix("an ").removeprefix("the ")
    variants = (
        *(f"What color is {thing}?", f"Tell me the color of {thing}.", f"What colour is {thing}?"),
        *(
            f"Which color is {thing}?",
            f"What is the color of {thing}?",
            f"Do you know the color of {thing}?",
        ),
        *(f"Which color does {thing} have?", f"What color does {thing} have?", f"color of {bare}?"),
    )
    replies = (f"{s.cap(thing)} is {shade}.", f"{s.cap(thing)} is {shade}.", f"It is {shade}.")
    return [(question(s, *variants), s.R.choice(replies))]


def animal(s: Any) -> Pairs:
    """Return questions about sounds, young, legs, homes, food and kinds of animals."""
    name = s.R.choice(list(s.AN))
    sound, young, legs, food, home, kind, _ = s.AN[name]
    one, many = s.an(name), s.pl(name)
    questions: list[tuple[tuple[str, ...], str]] = [
        (
            (
                *(f"What is a baby {name} called?", f"What do you call a young {name}?"),
                *(f"What's the name for a baby {name}?", f"How do we call a baby {name}?"),
            ),
            f"A baby {name} is called {s.an(young)}.",
        ),
        (
            (
                *(f"How many legs does {one} have?", f"How many legs do {many} have?"),
                *(f"Do you know how many legs {one} has?", f"Number of legs of {one}?"),
            ),
            f"{s.cap(one)} has {s.num(legs) if legs else 'no'} legs.",
        ),
        (
            (f"Where do {many} live?", f"Where does {one} live?", f"Where can I find {many}?"),
            f"{s.cap(many)} live {home}.",
        ),
        (
            (f"What do {many} eat?", f"What does {one} eat?", f"What do {many} like to eat?"),
            f"{s.cap(many)} eat {food}.",
        ),
        (
            (f"What kind of animal is {one}?", f"Is {one} a mammal, a bird, or something else?"),
            f"{s.cap(one)} is {s.an(kind)}.",
        ),
    ]
    if sound:
        cries = (f"Which animal says {sound}?", f'Which animal goes "{sound}"?')
        questions.append(
            (
                (
                    f"What sound does {one} make?",
                    f"What does {one} say?",
                    f"What noise does {one} make?",
                ),
                f'{s.cap(one)} says "{sound}".',
            )
        )
        if sound != "roar":
            questions.append((cries, f'{s.cap(one)} says "{sound}".'))
    return [
        (question(s, *variants), reply)
        for variants, reply in s.R.sample(questions, s.R.choice((1, 1, 2)))
    ]


def a_name(rng: random.Random, people: list[str]) -> str:
    """Return a name; often an invented one, so that it must be read and not guessed."""
    if rng.random() < 0.6:
        return rng.choice([name for name in people + BOYS + GIRLS if name not in HELD_OUT_NAMES])
    return "".join(rng.choices(SYLLABLES, k=rng.choice((2, 2, 3)))).capitalize()


def recall(s: Any) -> Pairs:
    """Return a chat in which the user gives a name and asks for it, at once or later."""
    name = a_name(s.R, s.PEOPLE)
    introductions = (
        *(
            f"My name is {name}.",
            f"Hi, I am {name}.",
            f"Hello! I'm {name}.",
            f"I am called {name}.",
        ),
        *(
            f"Hi! My name is {name}.",
            f"Hello, my name is {name}.",
            f"I'm {name}.",
            f"Call me {name}.",
        ),
        *(f"Hey, {name} here.", f"My name is {name}. What is yours?", f"You can call me {name}."),
        *(f"Please remember my name: {name}.", f"People call me {name}.", f"{name} is my name."),
    )
    introduction = s.R.choice(introductions)
    welcome = (f"Nice to meet you, {name}!", f"Hello, {name}! How can I help you?", f"Hi, {name}!")
    reply = s.R.choice(welcome)
    if introduction.endswith("yours?"):
        reply = f"Nice to meet you, {name}! My name is {NAME}."
    generators = (capital, opposite, colour, arithmetic, animal, smalltalk, identity)
    between = [
        pair
        for generator in s.R.sample(generators, s.R.choice((0, 0, 1, 1, 2, 3)))
        for pair in generator(s)
    ]
    variants = (
        *("What is my name?", "What's my name?", "Do you remember my name?", "Who am I?"),
        *("Do you know my name?", "Tell me my name.", "Can you tell me my name?", "Say my name."),
        *("What did I say my name was?", "Do you still know my name?", "What am I called?"),
    )
    answers = (f"Your name is {name}.", f"Your name is {name}.", f"You are {name}.")
    return [(introduction, reply), *between, (question(s, *variants), s.R.choice(answers))]


def home(s: Any) -> Pairs:
    """Return a chat in which the user gives a city and asks for it."""
    city = s.R.choice([*s.CAPS.values(), *MORE_CITIES]).rstrip(".")
    statement = s.R.choice((f"I live in {city}.", f"I am from {city}.", f"My home is in {city}."))
    reply = s.R.choice((f"{city} is a nice place!", f"I would like to hear more about {city}."))
    between = s.R.choice((capital, opposite, colour, arithmetic))(s) if s.R.random() < 0.4 else []
    variants = ("Where do I live?", "Which city do I live in?", "Do you remember where I live?")
    return [(statement, reply), *between, (question(s, *variants), f"You live in {city}.")]


def greeting(s: Any) -> Pairs:
    """Return a greeting and its reply."""
    hello = s.R.choice(HELLOS)
    back = (
        hello
        if hello.startswith("Good")
        else s.R.choice(("Hello", "Hi", "Hi there", "Hello there"))
    )
    ask = s.R.choice(("How can I help you today?", "What would you like to talk about?"))
    if "how are" in hello or hello == "What's up":
        return [(s.q(hello + "?"), f"{back}! I am doing well, thank you. {ask}")]
    return [(s.q(hello + s.R.choice(("", "!", "."))), f"{back}! {ask}")]


def smalltalk(s: Any) -> Pairs:
    """Return a short turn and its short reply."""
    text, reply = s.R.choice(SMALLTALK)
    return [(s.q(text), reply)]
