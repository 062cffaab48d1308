"""Stories as answers: how users ask for one, and what they say after it."""

import random

from openings import Opening

ASKS = [
    *("Tell me a story about {}.", "Tell me a short story about {}.", "Write a story about {}."),
    *("Can you tell me a story about {}?", "Write a short story about {}.", "A story about {}."),
    *("I want to hear a story about {}.", "Please tell me a story about {}.", "Story about {}"),
    *("Story about {}, please.", "Make up a story about {}.", "Could you write a story about {}?"),
    *(
        "Tell me a bedtime story about {}.",
        "Do you know a story about {}?",
        "Tell a story about {}.",
    ),
    *("I would like a story about {}.", "Please write a short story about {}.", "tell me about {}"),
    *(
        "Can you write me a story about {}?",
        "Tell my child a story about {}.",
        "Now a story about {}.",
    ),
    *("Tell me another story. This time about {}.", "Invent a story about {}.", "story: {}"),
    *(
        "Tell me a nice story about {}.",
        "Tell me a happy story about {}.",
        "I like {}. Tell me a story.",
    ),
]
PLAIN_ASKS = [
    *("Tell me a story.", "Tell me a short story.", "Can you tell me a story?", "Tell a story."),
    *("I want to hear a story.", "Please tell me a bedtime story.", "Write a short story."),
    *("Do you know a story?", "Make up a story.", "Another story, please.", "story please"),
]
BEFORE = ["", "", "", "", "", "", "Sure! ", "Here is a story for you. ", "Of course! "]
PLAIN_SHARE = 0.08
ABOUT_SHARE, THANKS_SHARE = 0.10, 0.15


def request(topic: str, rng: random.Random) -> str:
    """What a user types who wants this story."""
    if rng.random() < PLAIN_SHARE:
        return rng.choice(PLAIN_ASKS)
    said = rng.choice(ASKS).format(topic)
    if rng.random() < 0.1:
        said = said.lower()
    if rng.random() < 0.1:
        said = said.rstrip(".?")
    return said


def story_chat(opening: Opening, story: str, rng: random.Random) -> list[list[str]]:
    """Request and story, sometimes with a word about it after."""
    turns = [["u", request(opening.topic, rng)], ["a", rng.choice(BEFORE) + story]]
    chance = rng.random()
    if chance < ABOUT_SHARE and opening.keys and opening.keys[-1][0].isupper():
        name = opening.keys[-1]
        said = rng.choice(("Who is the story about?", "Who was in the story?", "Who is it about?"))
        turns += [["u", said], ["a", f"The story is about {name}."]]
    elif chance < ABOUT_SHARE + THANKS_SHARE:
        said = rng.choice(("Thank you!", "That was nice!", "I liked that story.", "Nice story!"))
        reply = rng.choice(
            ("You are welcome!", "I am glad you liked it!", "Thank you for listening!")
        )
        turns += [["u", said], ["a", reply]]
    return turns
