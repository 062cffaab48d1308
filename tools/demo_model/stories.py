"""Templates: chats in which a user requests a story, and perhaps comments on it."""

import random

from openings import Opening

REQUESTS = [
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
PLAIN_REQUESTS = [
    *("Tell me a story.", "Tell me a short story.", "Can you tell me a story?", "Tell a story."),
    *("I want to hear a story.", "Please tell me a bedtime story.", "Write a short story."),
    *("Do you know a story?", "Make up a story.", "Another story, please.", "story please"),
]
BEFORE = ["", "", "", "", "", "", "Sure! ", "Here is a story for you. ", "Of course! "]
PLAIN_SHARE = 0.08
ABOUT_SHARE, THANKS_SHARE = 0.10, 0.15


def request(topic: str, rng: random.Random) -> str:
    """Return a user's request for a story about a topic."""
    if rng.random() < PLAIN_SHARE:
        return rng.choice(PLAIN_REQUESTS)
    text = rng.choice(REQUESTS).format(topic)
    if rng.random() < 0.1:
        text = text.lower()
    if rng.random() < 0.1:
        text = text.rstrip(".?")
    return text


def story_chat(opening: Opening, story: str, rng: random.Random) -> list[list[str]]:
    """Return a request and a story, sometimes with a comment and its reply."""
    turns = [["u", request(opening.topic, rng)], ["a", rng.choice(BEFORE) + story]]
    chance = rng.random()
    if chance < ABOUT_SHARE and opening.keys and opening.keys[-1][0].isupper():
        name = opening.keys[-1]
        comment = rng.choice(
            ("Who is the story about?", "Who was in the story?", "Who is it about?")
        )
        turns += [["u", comment], ["a", f"The story is about {name}."]]
    elif chance < ABOUT_SHARE + THANKS_SHARE:
        comment = rng.choice(("Thank you!", "That was nice!", "I liked that story.", "Nice story!"))
        reply = rng.choice(
            ("You are welcome!", "I am glad you liked it!", "Thank you for listening!")
        )
        turns += [["u", comment], ["a", reply]]
    return turns
