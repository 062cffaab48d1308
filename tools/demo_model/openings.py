"""Story openings with known topics: the teacher continues them, user turns name the topics."""

import random
from dataclasses import dataclass

BOYS = (
    "Tom Tim Max Ben Sam Jack Leo Finn Noah Luke Jake Oscar Hugo Theo Adam Dan Paul Henry David "
    "Mark Bob Spot Rex Billy Charlie Peter Joe Alex Toby Eddie Fred George Harry Johnny Mike Nick "
    "Ollie Robby Teddy Will Zack Danny Freddy Jim Buddy Lucky Felix Milo Oliver Bruno"
).split()
GIRLS = (
    "Lily Mia Anna Lucy Sara Emma Amy Zoe Ella Kate Rosa Nina Clara Grace Ivy Maya Eva Sue Molly "
    "Daisy Lena Nora Jane Sally Annie Becky Bella Betty Ruby Cindy Dolly Emily Fiona Gina Hannah "
    "Jenny Jill Julia Kitty Laura Luna Maggie Mary Nancy Olivia Penny Polly Rosie Sophie Tina Wendy"
).split()
PEOPLE = "girl boy princess prince king queen farmer fairy wizard pirate baker sailor".split()
FEMALE = {"girl", "princess", "queen", "fairy", "cow", "hen"}
MALE = {"boy", "prince", "king", "wizard", "pirate", "sailor"}
ANIMALS = (
    "dog cat bird rabbit bear mouse frog fish duck lion elephant monkey fox squirrel turtle cow "
    "pig horse owl butterfly bee dragon penguin giraffe snail puppy kitten bunny tiger sheep goat "
    "hen wolf deer whale dolphin crab spider ant worm ladybug hedgehog parrot kangaroo zebra panda "
    "hippo crocodile dinosaur unicorn octopus seal goose swan lamb pony caterpillar snake shark"
).split()
THINGS = (
    "robot star cloud tree flower train car truck boat snowman doll kite leaf balloon toy rocket "
    "moon sun teddy_bear tractor bus seed pumpkin raindrop snowflake mushroom"
).split()
ADJECTIVES = (
    "little small big brave kind happy sad clever funny curious shy lonely gentle hungry tired "
    "friendly lazy tiny old young playful grumpy silly proud polite careful quiet cheerful"
).split()
WISHES = (
    "wanted to fly|loved to sing|loved to paint|wanted to find a friend|was afraid of the dark|"
    "loved to dance|wanted to see the sea|had a red ball|found a shiny key|loved to eat apples|"
    "wanted to bake a cake|had a blue hat|liked to play in the rain|found a small box|lost a toy|"
    "wanted to climb a tall tree|loved to read books|wanted to help everyone|had a big dream|"
    "liked to look at the stars|planted a seed|saw a rainbow|could not sleep|made a kite|"
    "wanted to learn to swim|found a map|was afraid of water|wanted to go to the moon|"
    "loved to play in the snow|got lost in the woods|wanted to build a house|loved music|"
    "wanted to be a doctor|was looking for treasure|loved to jump|had no friends|"
    "wanted to make a new friend|did not like to share|told a lie|broke a cup|liked to run fast"
).split("|")
PLACES = (
    "the forest|a small house|a big city|the farm|the garden|the sea|a little village|a tall tree|"
    "the park|the zoo|the mountains|the jungle|a castle|the desert|a cave|the woods|a pond|a town"
).split("|")
OBJECTS = (
    "magic wand|shiny key|old map|red ball|little boat|music box|big red balloon|blue hat|"
    "gold coin|magic stone|paper plane|broken toy|lost shoe|warm scarf|birthday cake|"
    "yellow kite|tiny seed|treasure chest|silver bell|magic book|old clock|green umbrella|"
    "soft blanket|shiny shell|golden egg|picture book|little lamp|"
    "pretty necklace|toy train|wooden box"
).split("|")
OUTINGS = (
    "the beach|the zoo|the park|the forest|the store|the farm|the lake|school|the library|"
    "the mountains|the market|the circus|the playground|the river|the museum"
).split("|")
THEMES = {  # topic: the words that must occur, and the opening
    "sharing": (["share"], "{n} had a new toy. {p} did not want to share it with {m}."),
    "friendship": (["friend"], "{n} and {m} were best friends. They did everything together."),
    "being brave": (["brave"], "{n} wanted to be brave, but {q} was afraid of the dark."),
    "helping others": (["help"], "{n} loved to help others. One day, {q} saw {m}, who was sad."),
    "a birthday party": (
        ["birthday"],
        "It was {n}'s birthday. {p} was very excited for the party.",
    ),
    "a snowy day": (["snow"], "It was a cold day, and the snow was falling. {n} looked outside."),
    "a rainy day": (
        ["rain"],
        "It was a rainy day. {n} was sad because {q} could not play outside.",
    ),
    "being honest": (["truth"], "{n} broke a cup. {p} did not know how to tell the truth to mom."),
    "kindness": (["kind"], "{n} was a very kind child. One day, {q} met {m}, who had no friends."),
    "a lost toy": (["toy"], "{n} had a favorite toy. One day, {q} lost the toy and was very sad."),
    "learning to ride a bike": (["bike"], "{n} got a new bike. {p} wanted to learn to ride it."),
    "a picnic": (["picnic"], "One sunny day, {n} and {m} wanted to have a picnic in the park."),
    "a rainbow": (["rainbow"], "After the rain, {n} saw a big rainbow in the sky."),
    "the stars": (["star"], "Every night, {n} looked at the stars and made a wish."),
    "a garden": (["garden"], "{n} had a little garden. {p} planted seeds with {m}."),
    "going to bed": (["sleep"], "It was time for bed, but {n} could not sleep."),
    "a new friend": (["friend"], "{n} was new in town. {p} wanted to find a friend."),
    "saying sorry": (["sorry"], "{n} took a toy from {m}. {m} was sad, and {n} felt bad."),
    "trying again": (
        ["try"],
        "{n} wanted to build a tall tower, but it fell down again and again.",
    ),
    "music": (["music"], "{n} loved music. One day, {q} found an old drum."),
}
PRONOUNS = {True: ("She", "she"), False: ("He", "he")}


@dataclass(frozen=True)
class Opening:
    """The first sentences of a story, its topic, and the words that must occur in it."""

    text: str
    topic: str
    keys: list[str]


def a(phrase: str) -> str:
    """Return a phrase with its article."""
    return ("an " if phrase[0] in "aeiou" and not phrase.startswith("uni") else "a ") + phrase


def opening(rng: random.Random) -> Opening:
    """Return a random opening, of one of six kinds."""
    kinds = (_character, _place, _pair, _object, _theme, _outing)
    return rng.choices(kinds, (44, 14, 10, 12, 12, 8))[0](rng)


def _who(rng: random.Random, things: bool = True) -> tuple[str, str, bool]:
    """Return a kind of hero, a name for it, and whether it is female."""
    kind = rng.choice(rng.choices((ANIMALS, PEOPLE, THINGS), (60, 24, 16 if things else 0))[0])
    female = kind in FEMALE or (kind not in MALE and rng.random() < 0.5)
    return kind.replace("_", " "), rng.choice(GIRLS if female else BOYS), female


def _character(rng: random.Random) -> Opening:
    kind, name, female = _who(rng)
    hero = f"{rng.choice(ADJECTIVES)} {kind}" if rng.random() < 0.7 else kind
    text = f"Once upon a time, there was {a(hero)} named {name}."
    wish = rng.choice(WISHES)
    topics = [f"{a(hero)} named {name}", a(hero), a(kind), f"{a(hero)} called {name}"]
    if rng.random() < 0.6:
        text += f" {PRONOUNS[female][0]} {wish}."
        topics += [f"{a(hero)} who {wish}", f"{a(kind)} named {name} who {wish}"]
    topic = rng.choice(topics)
    if kind in ("moon", "sun") and topic == a(kind):
        topic = f"the {kind}"
    return Opening(text, topic, [kind.split()[-1], name])


def _place(rng: random.Random) -> Opening:
    kind, name, _ = _who(rng)
    place = rng.choice(PLACES)
    hero = f"{rng.choice(ADJECTIVES)} {kind}"
    text = f"Once upon a time, in {place}, there lived {a(hero)} named {name}."
    topic = rng.choice(
        (f"{a(hero)} named {name}", f"{a(kind)} in {place}", f"{a(hero)} in {place}")
    )
    return Opening(text, topic, [kind.split()[-1], name])


def _pair(rng: random.Random) -> Opening:
    (kind, name, _), (other, friend, _) = _who(rng), _who(rng)
    if rng.random() < 0.6 and kind != other and name != friend:
        text = (
            f"Once upon a time, there was {a(kind)} named {name} and {a(other)} named {friend}. "
            "They were good friends."
        )
        return Opening(text, f"{a(kind)} and {a(other)}", [kind.split()[-1], other.split()[-1]])
    first, second = rng.sample(BOYS + GIRLS, 2)
    text = rng.choice(
        (
            f"Once upon a time, there were two friends, {first} and {second}.",
            f"{first} and {second} were friends.",
            f"{first} and {second} were playing in the park.",
        )
    )
    topic = rng.choice((f"{first} and {second}", f"two friends named {first} and {second}"))
    return Opening(text, topic, [first, second])


def _object(rng: random.Random) -> Opening:
    thing = rng.choice(OBJECTS)
    kind, name, female = _who(rng, things=False)
    text = (
        f"Once upon a time, there was {a(kind)} named {name}. "
        f"One day, {PRONOUNS[female][1]} found {a(thing)}."
    )
    topics = (a(thing), f"{a(kind)} who found {a(thing)}", f"{name} and {a(thing)}")
    return Opening(text, rng.choice(topics), [thing.split()[-1]])


def _theme(rng: random.Random) -> Opening:
    theme = rng.choice(list(THEMES))
    keys, pattern = THEMES[theme]
    female = rng.random() < 0.5
    name, friend = rng.choice(GIRLS if female else BOYS), rng.choice(BOYS if female else GIRLS)
    she_capital, she = PRONOUNS[female]
    text = pattern.format(n=name, m=friend, p=she_capital, q=she)
    return Opening(text, theme, keys)


def _outing(rng: random.Random) -> Opening:
    first, second = rng.sample(BOYS + GIRLS, 2)
    place = rng.choice(OUTINGS)
    companion = rng.choice((f"and {second}", "and her mom" if first in GIRLS else "and his dad"))
    text = f"One day, {first} {companion} went to {place}."
    where = place.removeprefix("the ")
    topics = (f"a trip to {place}", f"a day at {place}", f"{first} at {place}")
    return Opening(text, rng.choice(topics), [where.rstrip("s")[:6], first])
