"""Runs inside the server's environment: what a word is, for the texts of records and for queries alike, whatever the database.

Letters and digits make words; case, accents and compatibility forms make no difference (Café = CAFE = ｃａｆｅ). A character of a script
that is written without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese) and a symbol such as an emoji is a word of its own: several
in a row are found as a phrase, so that any part of a sentence can be looked for. Standard library only.
"""

from __future__ import annotations

import re
import unicodedata

LONGEST = 100
"""Characters of a word that count; what is longer is an encoded file rather than language."""
ACCENTS = re.compile("[\u0300-\u036f\ufe00-\ufe0f]")
"""Marks over Latin, Greek and Cyrillic letters, and variation selectors, which choose between two pictures of a sign."""
UNSPACED = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF),
            (0x20000, 0x3FFFF))
"""Thai and Lao, Burmese, Khmer, kana, and the blocks of Chinese characters."""


class Separation(dict[int, str]):
    """A table for str.translate, filled as characters are met: what separates words becomes a space."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        category = unicodedata.category(character)
        if category == "So" or any(first <= code <= last for first, last in UNSPACED):
            replacement = f" {character} "
        elif category[0] in "LMN" or character == "_":
            replacement = character
        else:
            replacement = " "
        self[code] = replacement
        return replacement


SEPARATION = Separation()


def words_of(text: str) -> list[str]:
    """The words of a text, in order, as they are compared. None contains white space, a quotation mark or another sign of punctuation."""
    if text.isascii():
        plain = text.lower()
    else:
        plain = unicodedata.normalize("NFC", ACCENTS.sub("", unicodedata.normalize("NFKD", text)).casefold())
    return [word[:LONGEST] for word in plain.translate(SEPARATION).split()]
