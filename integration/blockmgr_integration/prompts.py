"""Chat prompts of exact lengths: one shared system prompt, many different questions.

A prompt is `shared` tokens that all requests have in common (the chat template's opening, the system
prompt, the opening of the user's turn) and `unique` tokens of its own (a ticket number, a question, the
template's closing). Texts are cut to length, or repeated where they are too short.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import cycle, islice
from typing import Any

_SYSTEM_MARK, _USER_MARK = "\u241fsystem\u241f", "\u241fuser\u241f"
_CLOSING = " Thank you very much for your help, I look forward to your answer."


@dataclass(frozen=True)
class PromptSet:
    """`ids[i]` is request i's prompt; the first `shared` ids are the same in all of them."""

    ids: list[list[int]]
    shared: int
    unique: int


@cache
def system_prompt() -> str:
    """The support assistant's instructions: policies and worked examples, about 1,000 tokens."""
    return _data("system_prompt.md").strip()


@cache
def questions() -> tuple[str, ...]:
    """Customers' questions of about 55 tokens, one a line of the data file."""
    return tuple(line for line in _data("questions.txt").splitlines() if line.strip())


def shared_prefix_prompts(tokenizer: Any, requests: int, shared: int, unique: int, seed: int) -> PromptSet:
    """`requests` prompts of `shared + unique` tokens each, the same for the same seed and tokenizer."""
    chooser = random.Random(seed)
    opening, middle, closing = _template_parts(tokenizer)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    head, turn, tail = encode(opening), encode(middle), encode(closing)
    room = shared - len(head) - len(turn)
    body = _fit(encode(system_prompt()), room) if room > 0 else []
    prefix = (head + body + turn)[:shared]
    order = list(questions())
    chooser.shuffle(order)
    tickets = chooser.sample(range(10_000, 100_000), requests)
    ids = []
    for number, ticket in enumerate(tickets):
        first = number % len(order)
        more = " ".join(order[first + 1 :] + order[:first])
        text = f"#{ticket} {order[first]}{_CLOSING} {more}"
        if unique > len(tail):
            ids.append(prefix + _fit(encode(text), unique - len(tail)) + tail)
        else:
            ids.append(prefix + _fit(encode(str(ticket)), unique))
    return PromptSet(ids, shared, unique)


def _fit(ids: list[int], length: int) -> list[int]:
    return list(islice(cycle(ids), length))


def _template_parts(tokenizer: Any) -> tuple[str, str, str]:
    """What the chat template puts before the system prompt, between it and the question, and after."""
    plain = ("", "\n\nCustomer: ", "\nAssistant:")
    if not getattr(tokenizer, "chat_template", None):
        return plain
    messages = [{"role": "system", "content": _SYSTEM_MARK}, {"role": "user", "content": _USER_MARK}]
    merged = [{"role": "user", "content": f"{_SYSTEM_MARK}\n\n{_USER_MARK}"}]
    for attempt in (messages, merged):
        try:
            text = tokenizer.apply_chat_template(attempt, tokenize=False, add_generation_prompt=True)
        except Exception:  # templates raise whatever they like at a role they don't know
            continue
        opening, found, rest = text.partition(_SYSTEM_MARK)
        middle, found_too, closing = rest.partition(_USER_MARK)
        if found and found_too:
            return opening, middle, closing
    return plain


def _data(name: str) -> str:
    return files("blockmgr_integration").joinpath("data", name).read_text(encoding="utf-8")
