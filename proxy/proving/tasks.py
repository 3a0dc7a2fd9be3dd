"""The functional gates: what any sound server of a sound model gets right, and a broken kernel, cache or parser does not.

Rules: each is asked with its own words and judged by what must be in the answer, not by its wording. A needle lies in
the middle of a text as long as was asked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from random import Random

from policies.gatefile import Outcome
from proxy.doctor.patient import Patient, Said
from proxy.doctor.tools import TOOLS
from proxy.probe import Unreachable, printable
from proxy.sim.text import WORDS

RUNS = 5
TOKENS = 4096
"""Thinking included."""
FIBONACCI = (0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377)
CODE_WORD, NEEDLE = "marzipan", "739154"
LONG_SECONDS = 600.0
TRIES = 4


class Wrong(Exception):
    """The answer is not right; the text says what it was."""


async def fibonacci(patient: Patient) -> str:
    """The same question several times: right each time."""
    text = (
        "Write the first 15 Fibonacci numbers, beginning with 0 and 1, separated by commas, and nothing else."
    )
    answers = []
    for run in range(RUNS):
        answer = _text(await patient.chat(text, TOKENS, temperature=0))
        numbers = [int(number) for number in re.findall(r"\d{1,6}", answer)]
        if not _holds(numbers, FIBONACCI):
            raise Wrong(f"run {run + 1} of {RUNS}: {printable(answer)!r}")
        answers.append(answer)
    different = len(set(answers))
    return f"{RUNS} of {RUNS} right" + (f", in {different} wordings" if different > 1 else ", word for word")


def _holds(numbers: list[int], wanted: tuple[int, ...]) -> bool:
    size = len(wanted)
    return any(tuple(numbers[i : i + size]) == wanted for i in range(len(numbers) - size + 1))


async def tool_call(patient: Patient) -> str:
    """One call, of the right tool, with the right argument."""
    text = "What is the weather in Paris now? Use the tool."
    said = await patient.chat(text, TOKENS, temperature=0, tools=TOOLS, tool_choice="auto")
    answer = _text(said, empty=True)
    if len(said.calls) != 1:
        raise Wrong(f"{len(said.calls)} calls; the text is {printable(answer)!r}")
    name, arguments = said.calls[0]
    try:
        value = json.loads(arguments)
    except ValueError:
        value = None
    if name != "get_weather" or not isinstance(value, dict) or "paris" not in str(value.get("city")).lower():
        raise Wrong(f"{name}({printable(arguments)})")
    return f"{name}({printable(arguments)})"


async def turns(patient: Patient) -> str:
    """What was said two turns ago is still known."""
    messages: list[dict[str, object]] = []
    answer = ""
    for text in (
        f"Remember this word: {CODE_WORD}. Answer only: OK.",
        "Name one colour. Answer with one word.",
        "Which word did I ask you to remember? Answer with that word only.",
    ):
        messages.append({"role": "user", "content": text})
        answer = _text(await patient.talk(messages, TOKENS, temperature=0))
        messages.append({"role": "assistant", "content": answer})
    if CODE_WORD not in answer.lower():
        raise Wrong(f"{printable(answer)!r} in place of {CODE_WORD!r}")
    return "the word of the first turn is known in the third"


async def arithmetic(patient: Patient) -> str:
    text = "What is 47 times 83? Answer with the number only."
    answer = _text(await patient.chat(text, TOKENS, temperature=0))
    if "3901" not in re.sub(r"(?<=\d)[,. ](?=\d{3}\b)", "", answer):
        raise Wrong(f"47 x 83 is {printable(answer)!r}")
    return "47 x 83 = 3901"


def needle(tokens: int) -> Callable[[Patient], Awaitable[str]]:
    """A number in the middle of a text of about so many tokens."""

    async def look(patient: Patient) -> str:
        words = int(tokens / 1.4)
        for _ in range(TRIES):  # until the server does not find it too long
            messages = [{"role": "user", "content": _haystack(words)}]
            said = await patient.talk(messages, TOKENS, seconds=LONG_SECONDS, temperature=0)
            if said.status != 400:
                break
            words = int(words * 0.8)
        answer = _text(said)
        length = said.usage.get("prompt_tokens", f"about {tokens}")
        if NEEDLE not in answer:
            raise Wrong(f"not found in {length} tokens: {printable(answer)!r}")
        return f"found in {length} tokens"

    return look


def _haystack(words: int) -> str:
    rng = Random(7)
    text = [rng.choice(WORDS) for _ in range(max(2, words))]
    text.insert(len(text) // 2, f". The secret number is {NEEDLE}. ")
    return f"Read this text.\n\n{' '.join(text)}\n\nWhat is the secret number? Answer with the number only."


def _text(said: Said, *, empty: bool = False) -> str:
    """What is said behind the thinking, wherever that was. Raises `Wrong`."""
    if said.status != 200:
        raise Wrong(f"it answers {said.status}: {printable(said.body[:400].decode('utf-8', 'replace'))}")
    answer = said.content.rpartition("</think>")[2].strip()
    if not answer and not empty:
        raise Wrong(f"no text (finish_reason {said.finish!r})")
    return answer


def gates(needle_tokens: int) -> dict[str, Callable[[Patient], Awaitable[str]]]:
    """needle_tokens: 0 leaves the needle out."""
    found: dict[str, Callable[[Patient], Awaitable[str]]] = {
        "fibonacci": fibonacci,
        "tool call": tool_call,
        "turns": turns,
        "arithmetic": arithmetic,
    }
    return found | ({"needle": needle(needle_tokens)} if needle_tokens else {})


async def take(
    patient: Patient, wanted: dict[str, Callable[[Patient], Awaitable[str]]], told: Callable[[Outcome], None]
) -> list[Outcome]:
    """One after the other; what cannot be asked has failed."""
    outcomes = []
    for name, look in wanted.items():
        try:
            outcome = Outcome(name, True, await look(patient))
        except Wrong as wrong:
            outcome = Outcome(name, False, str(wrong))
        except Unreachable as error:
            outcome = Outcome(name, False, error.detail)
        outcomes.append(outcome)
        told(outcome)
    return outcomes
