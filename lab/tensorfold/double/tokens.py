"""Tokens that are no model's: reversible without a vocabulary file, about three characters each.

A token is three characters of `a-z` and space (ids from 256), or one byte of UTF-8 (ids 0 to 255).
"""

import re

ALPHABET = " abcdefghijklmnopqrstuvwxyz"
BASE = 256
SIZE = len(ALPHABET)
PIECE = re.compile(r"[a-z ]{3}|.", re.DOTALL)


def pieces(text: str) -> list[str]:
    """The text of each token; a character of several bytes counts as one piece here."""
    return PIECE.findall(text)


def encode(text: str) -> list[int]:
    """Token ids of a text."""
    ids: list[int] = []
    for piece in pieces(text):
        if len(piece) == 3:
            a, b, c = (ALPHABET.index(letter) for letter in piece)
            ids.append(BASE + (a * SIZE + b) * SIZE + c)
        else:
            ids += piece.encode()
    return ids


def decode(ids: list[int]) -> str:
    """The text of token ids; raises ValueError for an id that there is not."""
    data = bytearray()
    for number in ids:
        if 0 <= number < BASE:
            data.append(number)
        elif number < BASE + SIZE**3:
            rest = number - BASE
            letters = (rest // SIZE**2, rest // SIZE % SIZE, rest % SIZE)
            data += "".join(ALPHABET[letter] for letter in letters).encode()
        else:
            raise ValueError(f"token {number} is not in the vocabulary")
    return data.decode(errors="replace")


def count(text: str) -> int:
    """How many tokens a text is."""
    return len(pieces(text)) if text.isascii() else len(encode(text))
