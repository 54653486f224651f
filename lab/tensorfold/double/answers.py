"""What the double says: right answers to a few questions, something harmless to all others.

Question (the last user message, any case)                     Reply
--------------------------------------------------------------------------------------------------------------
capital of France                                              Paris
`A + B` in digits                                              their sum
reply with OK                                                  OK
count to N                                                     1 2 3 ... N
N words                                                        N words
"... word/code/passphrase is X" in the prompt, and a question  X
for that word
"""

import re

HARMLESS = "This is a double of TensorFold: no model has read your text."
THOUGHT = "They ask something; the answer is short."
MOST_WORDS = 100_000
STATED = re.compile(
    r"\b(?:word|code|passphrase|password|canary|needle)\s*(?:is|was|=|:)\s*[\"'`*]*([A-Za-z0-9][\w-]*)",
    re.IGNORECASE,
)
ASKED = re.compile(
    r"\b(?:what|which|repeat|say|tell|name|give)\b[^.?!]*\b(?:word|code|passphrase|password|canary|needle)\b"
)


def answer(prompt: str, question: str) -> str:
    """The reply to the last user message `question` of the whole `prompt`."""
    asked = question.lower()
    if stated := _stated(prompt, asked):
        return stated
    if "capital of france" in asked:
        return "Paris"
    if found := re.search(r"(\d{1,9})\s*\+\s*(\d{1,9})", asked):
        return str(int(found[1]) + int(found[2]))
    if "reply with ok" in asked:
        return "OK"
    if found := re.search(r"count to (\d{1,6})", asked):
        return " ".join(str(number) for number in range(1, min(int(found[1]), MOST_WORDS) + 1))
    if found := re.search(r"\b(\d{1,6}) words", asked):
        return " ".join(f"word{number}" for number in range(1, min(int(found[1]), MOST_WORDS) + 1))
    return HARMLESS


def _stated(prompt: str, asked: str) -> str:
    """The word that the prompt states, when the end of the question asks for it."""
    if not ASKED.search(asked[-400:]) and not ASKED.search(asked[:400]):
        return ""
    found = STATED.search(prompt)
    return found[1] if found else ""


def spoilt(fault: str) -> str:
    """The reply of a model that has collapsed in one of three ways."""
    return {"bangs": "!" * 64, "empty": "", "repeated": " ".join(["the"] * 64)}[fault]
