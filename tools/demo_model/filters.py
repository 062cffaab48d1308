"""Filters for the demo model's stories: gentle, complete, long enough and on their topic."""

import re

BLOCKED = re.compile(
    r"\b(?:"
    r"kill\w*|dead|die[sd]?|dying|death\w*|dies|blood\w*|bleed\w*|gun|guns|shoot\w*|pistol\w*|"
    r"rifle\w*|murder\w*|stab\w*|corpse\w*|grave|graves|hanged|sword\w*|weapon\w*|war|wars|battle\w*|"
    r"bomb\w*|explod\w*|poison\w*|attack\w*|drown\w*|slaughter\w*|behead\w*|tortur\w*|cruel\w*|"
    r"evil\w*|devil\w*|hell|damn\w*|suicid\w*|violen\w*|wound\w*|punch\w*|fight\w*|fought|hate[sd]?|"
    r"slave\w*|nigg\w*|negro\w*|savage\w*|whip|whipped|whipping|thrash\w*|beaten|drunk\w*|beer|"
    r"wine|whisky|whiskey|rum|alcohol\w*|cigar\w*|tobacco|naked|sex\w*|rape\w*|stupid|idiot\w*"
    r")\b",
    re.IGNORECASE,
)
SAD = re.compile(
    r"\b(?:never (?:be )?seen again|never came back|(?:was|were|got) eaten|gone forever|"
    r"(?:ate|eat|eaten|swallowed) (?:him|her|them|it|\w+) up|ate (?:him|her)\b(?! \w)|"
    r"(?:he|she|they) never (?:saw|found) \w+ again)\b",
    re.IGNORECASE,
)
ENDING = re.compile(r"[.!?][\"'”’]?$")
MIN_WORDS = 110


def is_gentle(text: str) -> bool:
    """Return whether a text has none of the blocked words."""
    return BLOCKED.search(text) is None


def is_happy(text: str) -> bool:
    """Return whether nobody is eaten or lost for ever, as far as the words tell."""
    return SAD.search(text) is None


def is_complete(text: str) -> bool:
    """Return whether a text ends as a sentence does and its quotation marks are in pairs."""
    return ENDING.search(text.rstrip()) is not None and text.count('"') % 2 == 0


def mentions(text: str, word: str) -> int:
    """Return how often a story mentions something, in the singular or the plural."""
    stem = re.escape(word.lower().removesuffix("s"))
    return len(re.findall(rf"\b{stem}", text.lower()))


def is_good_story(text: str, keys: list[str]) -> bool:
    """Return whether a story can be an answer.

    Each key occurs, and on average twice."""
    counts = [mentions(text, key) for key in keys]
    return (
        len(text.split()) >= MIN_WORDS
        and is_complete(text)
        and is_gentle(text)
        and all(counts)
        and sum(counts) >= 2 * len(counts)
    )
