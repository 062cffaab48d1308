# ruff: noqa: E501  (a question's forms stand on one line, as in templates/*.txt)
"""Chats of the second training: its templates, with skills of the first one in new words."""

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import skills
from held_out import has_held_out_sum, is_held_out, names
from openings import BOYS, GIRLS
from settings import NAME
from templates import Intent, fill, intents

Pairs = list[tuple[str, str]]
LEADS = ["Hi! ", "Hello, ", "Hey, ", "Okay, ", "So, ", "Please tell me, ", "Quick question: "]
LEADS += ["I have a question. ", "Hm, ", "Tell me, ", "And ", "Good morning! ", "Well, ", "Um, "]
GREETINGS = ("hello", "hello", "hello", "hello", "morning", "afternoon", "evening", "day", "how")
ABOUT_ITSELF = {"ident", "greeting", "greet", "unknown", "smalltalk", "howru", "joke"}
OWN_WORDS = re.compile(r"\b(i|i'm|my|me|mine)\b", re.IGNORECASE)
SYLLABLES = (
    "ba bri do den fa gri hol ja kel li lo mar mi na no os pa ri ron sa ste ta tro ul va wen"
)
SYMBOLS = "%$#@!?*&~^+=<>/|._-"


class Chats:
    """Writes chats; the same seed gives the same ones."""

    def __init__(self, shared: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.synth: ModuleType = skills.load(shared)
        self.synth.R.seed(seed)
        old = [name for name in self.synth.ALL if name not in ABOUT_ITSELF]
        self.old = old, [self.synth.G[name][1] for name in old]
        talk = {intent.name: intent for intent in intents("talk.txt")}
        self.talk = list(talk.values())
        self.greetings = [talk[name] for name in GREETINGS]
        self.help = [i for i in self.talk if i.name in HELP]
        self.kinds: list[tuple[Callable[[], Pairs], int]] = [
            (self.small_talk, 24),
            (self.page_help, 20),
            (self.refusal, 24),
            (self.nonsense, 3),
            (self.first_training, 30),
            (self.sum, 10),
            (self.question, 16),
            (self.memory, 10),
        ]

    def __iter__(self) -> Iterator[list[list[str]]]:
        """Yield chats without end; none has a prompt of an evaluation, or nearly its words."""
        while True:
            yield [turn for ask, reply in self.chat() for turn in (["u", ask], ["a", reply])]

    def chat(self) -> Pairs:
        """Return one to five exchanges, often after a greeting."""
        rng = self.rng
        pairs = self.greeting() if rng.random() < 0.3 else []
        for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4)) - bool(pairs and rng.random() < 0.4)):
            makers, weights = zip(*self.kinds, strict=True)
            pairs = pairs + self.allowed(rng.choices(makers, weights)[0])
        return pairs

    def allowed(self, make: Callable[[], Pairs]) -> Pairs:
        """Return what a function makes, at the first time when nothing of it is held out."""
        while True:
            pairs = [(ask, reply) for ask, reply in make() if ask.strip() and reply.strip()]
            if pairs and not any(is_refused(ask, reply) for ask, reply in pairs):
                return pairs

    def noisy(self, text: str) -> str:
        """Return a turn as people type it: other case, fewer or more marks, words before it."""
        rng = self.rng
        if rng.random() < 0.12:
            lead = rng.choice(LEADS)
            text = lead + (text[0].lower() + text[1:] if lead.endswith((", ", "And ")) else text)
        chance = rng.random()
        if chance < 0.2:
            text = text.lower()
        elif chance < 0.22:
            text = text.upper()
        elif chance < 0.6:
            text = text[0].upper() + text[1:]
        chance = rng.random()
        if chance < 0.2:
            text = text.rstrip(".?!") or text
        elif chance < 0.25 and text[-1] in ".!?":
            text += rng.choice((text[-1], text[-1] * 2, " please", " :)"))
        return text

    def of(self, intent: Intent) -> Pairs:
        """Return one exchange of an intent."""
        ask = fill(self.rng, self.rng.choice(intent.asks))
        return [(self.noisy(ask), fill(self.rng, self.rng.choice(intent.replies)))]

    def greeting(self) -> Pairs:
        """Return a greeting and its reply."""
        return self.allowed(lambda: self.of(self.rng.choice(self.greetings)))

    def small_talk(self) -> Pairs:
        """Return small talk; half of it greetings."""
        return self.of(self.rng.choice(self.greetings if self.rng.random() < 0.4 else self.talk))

    def page_help(self) -> Pairs:
        """Return a question about the model, webgemma or the page."""
        return self.of(self.rng.choice(self.help))

    def refusal(self) -> Pairs:
        """Return a request that is too hard."""
        return self.of(self.rng.choice(intents("refusals.txt")))

    def nonsense(self) -> Pairs:
        """Return letters, signs, or words in no order, which are not understood."""
        rng, synth = self.rng, self.synth
        kind = rng.random()
        letters = "qwertzuiopasdfghjklyxcvbnm"
        if kind < 0.45:
            words = [
                "".join(rng.choices(letters, k=rng.randint(2, 7))) for _ in range(rng.randint(1, 5))
            ]
        elif kind < 0.6:
            words = [
                "".join(rng.choices(SYLLABLES.split(), k=rng.randint(2, 3)))
                for _ in range(rng.randint(2, 5))
            ]
        elif kind < 0.7:
            words = [
                "".join(rng.choices(SYMBOLS, k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3))
            ]
        else:
            words = rng.sample(
                [
                    *synth.WORDS,
                    "the",
                    "of",
                    "why",
                    "is",
                    "and",
                    "never",
                    "seven",
                    "loud",
                    "because",
                    "on",
                    "green",
                ],
                rng.randint(4, 7),
            )
        reply = rng.choice(NOT_UNDERSTOOD)
        return [(" ".join(words) + rng.choice(("", "", "?", "!", ".")), reply)]

    def first_training(self) -> Pairs:
        """Return an exchange of the first training: facts, words, feelings, jokes and others."""
        names_of, weights = self.old
        return list(self.synth.G[self.synth.R.choices(names_of, weights)[0]][0]())

    def sum(self) -> Pairs:
        """Return a small sum in many words; the result is computed."""
        rng = self.rng
        sign = rng.choice("+++---*/")
        a, b = skills._numbers(rng, sign)
        result = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if sign == "/" else 0}[sign]
        said = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}[sign]
        forms = {
            "+": "(Add|Please add|Can you add) {a} and {b}[ together].;(What is|Tell me|Give me|Find) the sum of {a} and {b}?;{a} and {b} (is|are|makes|make|together) (what|how much)?;How much (is|are|makes) {a} and {b}[ together]?;(What do I get when|What happens if|What is it when) I add {b} to {a}?;What (do|does) {a} and {b} (give|come to|add up to)?;I have {a} and get {b} more. How many[ is that]?",
            "-": "(Subtract|Take|Can you take|Please take) {b} from {a}.;(What is left|How much is left) (when|if) I take {b} from {a}?;{a} (less|take away) {b}?;(What is|Tell me) the difference (between|of) {a} and {b}?;(What is|How much is) {a} (less|take away) {b}?;I have {a} and give away {b}. How many are left?",
            "*": "(Multiply|Please multiply|Can you multiply) {a} (by|and|with) {b}.;(What is|Tell me) the product of {a} and {b}?;How much (is|are) {a} times {b}?;{a} x {b}?;{a} times {b} (is|makes|equals) (what|how much)?",
            "/": "(Divide|Please divide|Can you divide) {a} by {b}.;How (often|many times) does {b} go into {a}?;(What is|How much is) {a} over {b}?;{a} : {b}?;(Share|Split) {a} (by|among|between) {b}.",
        }[sign].split(";")
        both = "{a} {s} {b}[ =][?];[So |Now |And |Please: ]{a} {w} {b}[ is][ please][?|.];{a} {w} {b} (is|makes|equals) (what|how much)?;(Work out|Calculate|Compute|Solve|Do|Figure out|Count) {a} (s|w) {b}[ please| for me| now].;(I need|I want|Give me|Tell me|Find|Say) (the result of|the answer to|) {a} {w} {b}[ please|.];(Do you know|Can you tell me|Could you work out) (what|how much) {a} {w} {b} is?;(How much is|What is|What's|What would be) {a} (s|w) {b}[, please| then]?".split(
            ";"
        )
        form = rng.choice(forms if rng.random() < 0.5 else both)
        in_words = rng.random() < 0.25 and max(a, b, result) < 100 and "{s}" not in form
        x, y, z = (self.synth.num(v) if in_words else v for v in (a, b, result))
        form = form.replace("(s|w)", rng.choice((sign, said)) if not in_words else said)
        ask = fill(rng, form.format(a=x, b=y, s=sign, w=said))
        reply = f"{x} {said} {y} is {z}."
        return [(self.noisy(ask), reply[0].upper() + reply[1:])]

    def question(self) -> Pairs:
        """Return a question about a capital, colour, animal or opposite, in new words."""
        rng, s = self.rng, self.synth
        kind = rng.randrange(4)
        if kind == 0:
            k, city = rng.choice(list(s.CAPS.items()))
            other = rng.choice(list(s.CAPS.values()))
            either = f"{city} or {other}" if rng.random() < 0.5 else f"{other} or {city}"
            forms = "{k} has (what|which) capital?;(I want to know|I am looking for|I forgot|Name|Give me|Say) the capital [city ]of {k}.;{k}: (capital|what is the capital|which capital)?;(What is|Say|Tell me) (the capital of|the main city of) {k}?;(What|Which) capital (does {k} have|belongs to {k})?;(What's|Which is) the capital of {k}, {either}?;The capital of {k} is (what|which city|called what)?;(Where is|Which city is) the government of {k}?;capital {k}"
            ask = forms.replace("{either}", either).replace("{k}", k)
            reply = f"The capital of {k} is {city.rstrip('.')}."
        elif kind == 1:
            colours = s.COL | skills.MORE_COLOURS
            thing, shade = rng.choice(list(colours.items()))
            bare = re.sub(r"^(a|an|the) ", "", thing)
            other = rng.choice([c for c in s.CATS["colors"] if c not in shade])
            forms = f"(Which|What) (color|colour) (is|has) {thing}?;(Say|Give me|I want to know|I forgot) the (color|colour) of {thing}.;{thing} (is|has) (what|which) (color|colour)?;Is {thing} {shade} or {other}?;Is {thing} {other} or {shade}?;{bare}: (what|which) (color|colour)?;(Think of|Look at|Imagine) {thing}. What (color|colour) is it?;(What is|What's) the (color|colour) of {thing}?"
            ask, reply = forms, f"{thing[0].upper() + thing[1:]} is {shade}."
            if rng.random() < 0.25:
                (x, y), mixed = rng.choice(list(s.MIX.items()))
                x, y = rng.sample((x, y), 2)
                ask = f"{x} and {y} (mixed|together) (make|give|is) what [color]?;(Mix|Put together) {x} and {y}. What (do I get|color is it|comes out)?;What (is|color is) {x} (mixed with|and|plus) {y}?"
                reply = f"When you mix {x} and {y}, you get {mixed}."
        elif kind == 2:
            name = rng.choice(list(s.AN))
            sound, young, legs, food, where, group, _ = s.AN[name]
            one, many = s.an(name), s.pl(name)
            upper = one[0].upper() + one[1:]
            other = rng.choice(
                [g for g in ("mammal", "bird", "fish", "insect", "reptile") if g != group]
            )
            options = [
                (
                    f"(What|How) is the (baby|young|child) of {one} called?;(Name|Tell me|Say) the (young|baby) of {one}.;{upper}'s (baby|child) is (called what|a what)?;What (name|word) is there for a (little|young|small) {name}?",
                    f"A baby {name} is called {s.an(young)}.",
                ),
                (
                    f"(How many|What number of) legs (are on|has) {one} [got]?;{upper} has how many (legs|feet)?;(Count|Tell me) the legs of {one}.;How many legs do {many} (walk on|have got)?",
                    f"{upper} has {s.num(legs) if legs else 'no'} legs.",
                ),
                (
                    f"Where (would|could|might|do) (I|you|we) (see|meet|find|look for) {one}?;In (what|which) place do {many} live?;(Tell me|Say) where {many} (live|are|are found).;What is the home of {one}?",
                    f"{many[0].upper() + many[1:]} live {where}.",
                ),
                (
                    f"What (food|kind of food) (do|does) ({many}|the {name}) (like|need|eat|want)?;(Tell me|Say) what {many} eat.;What (should|can|would) I (feed|give) {one}?;What would {one} (like to eat|eat|choose to eat)?",
                    f"{many[0].upper() + many[1:]} eat {food}.",
                ),
                (
                    f"(Is|So is|Would you call) {one} {s.an(other)}?;(I think|Is it true that) {one} is {s.an(other)}[.|?];Are {many} {other}s?",
                    f"No, {one} is not {s.an(other)}. It is {s.an(group)}.",
                ),
                (
                    f"(Is|So is|Would you call) {one} {s.an(group)}?;Is it true that {one} is {s.an(group)}?",
                    f"Yes, {one} is {s.an(group)}.",
                ),
            ]
            if sound:
                options.append(
                    (
                        f"(What|Which) (sound|noise|call) (does|do) ({one}|the {name}) make?;How (does|do) ({one}|the {name}) (sound|go|call)?;(Make|Do|Say|Imitate) the (sound|noise) of {one}.;(Tell me|Say) what {one} says.;What do you hear (from|when you meet) {one}?",
                        f'{upper} says "{sound}".',
                    )
                )
            ask, reply = rng.choice(options)
        else:
            unclear = {"short", "light", "quiet", "white", "last", "end", "back", "down", "out"}
            both = dict(s.OPP) | {b: a for a, b in s.OPP.items() if b not in unclear | set(s.OPP)}
            a, b = rng.choice(list(both.items()))
            ask = f"(Say|Give me|I am looking for|I want|Find) the opposite (of|of the word|to) {a}.;{a}: what is the opposite?;(What|Which word) is (not|the reverse of|the contrary of|opposite to|the opposite of) {a}?;(The opposite|The contrary) of {a} is (what|which word)?;If it is not {a}, (it is what|then it is|what is it)?;Not {a} but what?;(Do you know|Can you say|Can you name) the opposite of {a}?;opposite {a}"
            reply = f'The opposite of "{a}" is "{b}".'
        return [(self.noisy(fill(rng, rng.choice(ask.split(";")))), reply)]

    def name(self) -> str:
        """Return a name, often an invented one, so that it must be read and not guessed."""
        rng = self.rng
        if rng.random() < 0.5:
            return rng.choice(self.synth.PEOPLE + BOYS + GIRLS)
        return "".join(rng.choices(SYLLABLES.split(), k=rng.choice((2, 2, 3)))).capitalize()

    def memory(self) -> Pairs:
        """Return a chat in which the user says something about itself and asks for it later."""
        rng, s = self.rng, self.synth
        name, kind = self.name(), rng.randrange(6)
        if kind < 3:
            tell = f"[Hi, |Hello, |Hey! |Good morning, |Good evening! ](my name is|I am|I'm|call me|you can call me|they call me|people call me|it is) {name}[.|!][ I like {rng.choice(('music', 'books', 'dogs', 'tea', 'football', 'rain'))}.| How are you?| Nice to meet you.| I live in {rng.choice(list(s.CAPS.values()))}]"
            back = f"(Hello|Hi|Nice to meet you), {name}! (How can I help you?|What would you like to talk about?)"
            ask = "(What is|What's|Tell me|Say|Do you know|Do you remember|Do you still know) my name[ again| now][, please][?];(Who am I|What am I called|How am I called|Who is writing to you|What do people call me)[ again][?];(What|How) (do you call|did I say you call|would you call) me?;(Do you know|Do you remember|Can you tell me|Can you say) (who I am|what I am called|how I am called)?"
            answer = f"Your name is {name}."
        elif kind == 3:
            pet = rng.choice(
                "dog cat rabbit horse turtle duck mouse bird hamster fish parrot".split()
            )
            tell = f"(My {pet} is called|I have a {pet} named|I have a {pet} called|I got a {pet}. The name is|The name of my {pet} is|We have a {pet}, it is called) {name}."
            back = f"{name} is a nice name for a {pet}!"
            ask = f"(What is|What's|Tell me|Do you remember|Say) (the name of my {pet}|my {pet}'s name|the name of the {pet})[ again][?];(What|How) (is|did I say is) my {pet} called?"
            answer = f"Your {pet} is called {name}."
        elif kind == 4:
            topic, choices = rng.choice(
                (
                    ("color", s.CATS["colors"]),
                    ("fruit", s.CATS["fruits"]),
                    ("sport", s.CATS["sports"]),
                    ("drink", s.CATS["drinks"]),
                    ("food", "pizza soup rice pasta bread cheese cake".split()),
                )
            )
            thing = rng.choice(choices)
            tell = f"(My favorite {topic} is {thing}|I like {thing} best|The {topic} that I like most is {thing}|Of all {topic}s I like {thing})."
            back = f"I like {thing}, too!"
            ask = f"(What is|What's|Tell me|Do you remember|Which is) my favorite {topic}[ again][?];(What|Which) {topic} do I (like|love|prefer|like best)[?]"
            answer = f"Your favorite {topic} is {thing}."
        else:
            number, city = (
                rng.randint(5, 90),
                rng.choice([*s.CAPS.values(), *skills.MORE_CITIES]).rstrip("."),
            )
            if rng.random() < 0.5:
                tell, back = f"(I am|I'm) {number}[ years old].", f"{number} is a great age!"
                ask = "(How old am I|What is my age|Do you remember my age|Tell me my age|Do you know how old I am)[ again][?]"
                answer = f"You are {number} years old."
            else:
                tell, back = (
                    f"(I live in|I am from|My home is|My town is|We live in) {city}.",
                    f"{city} is a nice place!",
                )
                ask = "(Where do I live|Where am I from|What is my town|What city do I live in|Where is my home|Do you remember where I live)[ again][?]"
                answer = f"You live in {city}."
        between: Pairs = []
        for _ in range(rng.choice((0, 0, 1, 1, 2))):
            between += self.allowed(
                rng.choice((self.sum, self.question, self.small_talk, self.page_help))
            )
        first = (self.noisy_start(fill(rng, tell)), fill(rng, back))
        return [first, *between, (self.noisy(fill(rng, rng.choice(ask.split(";")))), answer)]

    def noisy_start(self, text: str) -> str:
        """Return a turn with a capital or not; names keep their case."""
        return text[0].upper() + text[1:] if self.rng.random() < 0.8 else text


HELP = {"who", "what", "can", "limits", "size", "maker", "gemma", "webgemma", "load", "command"}
HELP |= {"gguf", "ollama", "ollama how", "button", "private", "free", "browser", "needs", "age"}
HELP |= {"home", "feelings"}
NOT_UNDERSTOOD = (
    "I am sorry, I do not understand that. Can you say it in other words?",
    "Sorry, I do not understand. I only know simple English.",
)


def is_refused(ask: str, reply: str) -> bool:
    """Return whether an exchange has a prompt, a sum or a name that is held out, or another name."""
    tells = OWN_WORDS.search(ask) and names() & set(re.findall(r"[a-z]+|\d+", ask.lower()))
    sums = has_held_out_sum(ask) or has_held_out_sum(reply)
    return bool(tells) or sums or is_held_out(ask) or ("Tiny" in reply and NAME != "Tiny")
