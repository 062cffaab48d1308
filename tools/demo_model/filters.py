"""Which stories are fit for the demo model: gentle, whole, long enough and on their topic."""

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
ENDING = re.compile(r"[.!?][\"'”’]?$")
LEAST_WORDS = 110


def is_gentle(text: str) -> bool:
    """Whether it holds none of the blocked words."""
    return BLOCKED.search(text) is None


def is_whole(text: str) -> bool:
    """Whether it ends as a sentence does and its quotation marks are in pairs."""
    return ENDING.search(text.rstrip()) is not None and text.count('"') % 2 == 0


def mentions(text: str, word: str) -> int:
    """How often a story speaks of something, in the singular or the plural."""
    stem = re.escape(word.lower().removesuffix("s"))
    return len(re.findall(rf"\b{stem}", text.lower()))


def is_good_story(text: str, keys: list[str]) -> bool:
    """Fit to be an answer: what was asked for comes up, and on the whole more than once."""
    found = [mentions(text, key) for key in keys]
    return (
        len(text.split()) >= LEAST_WORDS
        and is_whole(text)
        and is_gentle(text)
        and all(found)
        and sum(found) >= 2 * len(found)
    )
