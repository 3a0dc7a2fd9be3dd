"""How far two servers say the same at temperature 0.

Rules: token by token where both give ids of the same tokenizer, else by words. Speculation and batching alone make
greedy answers differ now and then, so a share is told, and only what is asked for is demanded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from proxy.doctor.patient import Patient
from proxy.probe import Unreachable, plain_json

TOKENS = 128
PROMPTS = (
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that reverses a linked list.",
    "Translate into German: The quick brown fox jumps over the lazy dog.",
    "List the planets of the solar system with one fact each.",
    "What is the derivative of x squared times the sine of x? Show the steps.",
    "Write a short formal letter that cancels a subscription.",
    'Give a JSON object with the keys "name", "age" and "city" for an invented person.',
    "Summarise the plot of Romeo and Juliet in two sentences.",
)


@dataclass(frozen=True, slots=True)
class Agreement:
    """unit: token or word. equal: mean share of each answer up to where the two part, 1 where they do not. diverged: index
    of the first difference, by prompt; None: none."""

    unit: str
    equal: float
    diverged: tuple[int | None, ...]

    def __str__(self) -> str:
        same = sum(index is None for index in self.diverged)
        firsts = sorted(index for index in self.diverged if index is not None)
        where = f"; the others part at {self.unit} {', '.join(map(str, firsts))}" if firsts else ""
        return f"{self.equal:.1%} equal before they part, {same} of {len(self.diverged)} answers whole{where}"


async def compare(one: Patient, other: Patient) -> Agreement:
    """Raises `Unreachable` where either does not answer."""
    shares, diverged, units = [], [], set()
    for prompt in PROMPTS:
        (ids, words), (other_ids, other_words) = await _answer(one, prompt), await _answer(other, prompt)
        by_token = bool(ids and other_ids)
        units.add("token" if by_token else "word")
        mine: Sequence[object] = ids if by_token else words
        theirs: Sequence[object] = other_ids if by_token else other_words
        longest = max(len(mine), len(theirs), 1)
        first = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
        if first is None and len(mine) != len(theirs):
            first = min(len(mine), len(theirs))
        diverged.append(first)
        shares.append(1.0 if first is None else first / longest)
    return Agreement("token" if units == {"token"} else "word", fmean(shares), tuple(diverged))


async def _answer(patient: Patient, prompt: str) -> tuple[list[int], list[str]]:
    """(ids, words) of an answer, thinking included."""
    said = await patient.chat(prompt, TOKENS, temperature=0, return_token_ids=True)
    if said.status != 200:
        raise Unreachable(f"{patient.backend.url} answers {said.status}", "see its log")
    value: Any = plain_json(said.body)
    ids = value["choices"][0].get("token_ids") if value.get("choices") else None
    words = f"{said.reasoning} {said.content}".split()
    return (ids if isinstance(ids, list) else []), words
