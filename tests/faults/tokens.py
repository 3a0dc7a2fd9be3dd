"""The fault table's answer with the ids of its tokens, and a backend that finishes it: for streams that may go on elsewhere.

Rules: a token is a piece of what the model writes, markup and all; its id is its place. What the events say is `plain`,
the same as of a backend that was not asked for ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from tests.answers import Chunk, Head, LastChunk, Step, event, json_answer, usage_event
from tests.scripted import DONE, Received

PROMPT = list(range(1000, 1010))
_WRITTEN = (  # of each event: what it takes to write it, and in how many tokens
    ("", 0),
    ("Let me", 2),
    (" look that up.", 4),
    ("</think>Hello", 3),
    (" there, wait.", 3),
    ("<tool_call>\n<function=look_up>\n", 5),
    ("<parameter=city>\n", 3),
    ("Paris\n</parameter>\n</function>\n</tool_call>", 4),
    ("", 1),  # the end
)
CLOSE = [("connection", "close")]
"""Questions leave no connection behind: the phases are about the request's own."""


def _cut(text: str, count: int) -> list[str]:
    size = -(-len(text) // count) if count else 0
    return [text[number * size : (number + 1) * size] for number in range(count)]


_OF_EVENT = [_cut(text, count) for text, count in _WRITTEN]
TOKENS = [token for tokens in _OF_EVENT for token in tokens]


def with_ids(plain: Sequence[bytes]) -> tuple[bytes, ...]:
    """The events as vLLM writes them where ids are asked for. Those behind the last token are what they were."""
    out, at = [], 0
    for said, tokens in zip(plain, _OF_EVENT, strict=False):
        payload = json.loads(said.removeprefix(b"data: "))
        payload["choices"][0]["token_ids"] = list(range(at, at + len(tokens))) or None
        if not out:
            payload["prompt_token_ids"] = PROMPT
        at += len(tokens)
        out.append(event(payload))
    return *out, *plain[len(out) :]


def _rest(had: int) -> list[Step]:
    """The answer behind so many tokens, as text."""
    steps: list[Step] = [Head(200, [("content-type", "text/event-stream"), ("transfer-encoding", "chunked")])]
    for place in range(had, len(TOKENS)):
        last = place == len(TOKENS) - 1
        choice = {
            "index": 0,
            "text": TOKENS[place],
            "finish_reason": "stop" if last else None,
            "token_ids": [place],
        }
        if place == had:
            choice["prompt_token_ids"] = [*PROMPT, *range(had)]
        steps.append(Chunk(event({"id": "cmpl-other", "object": "text_completion", "choices": [choice]})))
    usage = usage_event((len(PROMPT) + had, len(TOKENS) - had))
    return [*steps, Chunk(usage), Chunk(DONE), LastChunk()]


def finishes(asked: Received, otherwise: Callable[[Received], list[Step]]) -> list[Step]:
    """What a backend that gives ids answers."""
    body: dict[str, Any] = asked.json
    match asked.target:
        case "/detokenize":
            return json_answer({"prompt": "".join(TOKENS[id] for id in body["tokens"])}, headers=CLOSE)
        case "/v1/completions":
            assert body["prompt"][: len(PROMPT)] == PROMPT
            return _rest(len(body["prompt"]) - len(PROMPT))
        case "/tokenize" | "/extras/tokenize":  # what it can do is not found out here, but told
            return json_answer({"detail": "Not Found"}, 404, CLOSE)
    return otherwise(asked)
