"""What backends can do beyond the API, found out by asking them: whether a broken stream of theirs can go on elsewhere.

Rules
1. Nothing is assumed of a server by its name or version. A backend is asked when it is first needed and healthy, beside the
   requests, for a few tokens; until it has answered it can do nothing.
2. What it can do holds for `LASTS_SECONDS`, and until it was ejected: what comes back may be another build. What it
   could not do is asked again sooner: it may have been starting.
3. Two backends can finish each other's answers only if they cut text into the same tokens: their tokenizers are compared by
   what they make of a text that has something of everything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from hashlib import blake2b
from typing import Any

import orjson

from policies.frozen import frozen
from proxy.aside import ask
from proxy.clock import Clock
from proxy.config import ModelRoute
from proxy.pool import Backend, Pool

log = logging.getLogger("tierline.abilities")

LASTS_SECONDS = 300.0
ASK_AGAIN_SECONDS = 20.0
TIMEOUT = 10.0
"""Seconds for each question: a token may have to wait for its turn."""

_SAMPLE = (
    "Hello world, 12345 tokens! naïve café — 你好，世界 🙂 \t\n  def f(x):\n        return x*2 // [1.5e-3]\n"
    "<think></think><tool_call></tool_call><|im_start|><|im_end|>"
)
_TOKENIZE = (b"/tokenize", b"/extras/tokenize")
GO_ON: dict[str, object] = {"continue_final_message": True, "add_generation_prompt": False}
"""The last message is the beginning of the answer."""
_THOUGHT, _BEGUN = "It wants to hear two words.", "The first one"
_BEGINNING = [
    {"role": "user", "content": "ping"},
    {"role": "assistant", "content": _BEGUN, "reasoning": _THOUGHT, "reasoning_content": _THOUGHT},
]


@frozen
class Prefill:
    """It goes on with an answer whose beginning is the last message. shows: which path shows the prompt that it makes of
    messages. echoes: what it was given stands before what it adds."""

    shows: bytes
    echoes: bool


@frozen
class Ability:
    """exact: it gives ids of prompt and answer, decodes ids, and takes ids for a prompt. tokenizer: a digest of what it
    makes of text, None: not known; counts: the path that tells. prefill None: an answer that has begun would begin anew."""

    exact: bool
    tokenizer: str | None
    counts: bytes = _TOKENIZE[0]
    prefill: Prefill | None = None

    def alike(self, other: Ability) -> bool:
        """The same text is the same tokens to both."""
        return self.tokenizer is not None and self.tokenizer == other.tokenizer

    def __str__(self) -> str:
        ways = [way for way, can in (("token", self.exact), ("text", self.prefill)) if can]
        return f"can be continued by {' and '.join(ways)}" if ways else "cannot be continued"


NONE = Ability(False, None)
Server = tuple[str, str | None]
"""Which one was asked: see `BackendSpec.server`."""

Ask = Callable[[bytes, dict[str, object]], Awaitable[Any]]
"""A POST to a path: the decoded answer of a 200 (`aside.decoded`), else None."""


class Abilities:
    """Of every backend, as far as they are known."""

    def __init__(self, clock: Clock, pool: Pool) -> None:
        self._clock = clock
        self._pool = pool
        self._known: dict[str, tuple[float, Ability]] = {}
        self._servers: dict[str, Server] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    def of(self, name: str) -> Ability:
        """What is known of it now; asks, beside, where that is nothing or old."""
        backend = self._pool.backends[name]
        if not backend.health.healthy:
            self._known.pop(name, None)
            return NONE
        server = backend.spec.server
        if self._servers.setdefault(name, server) != server:  # the name is another one's now
            self._servers[name] = server
            self._known.pop(name, None)
        found = self._known.get(name)
        able = found is not None and (found[1].exact or found[1].prefill is not None)
        if found is None or self._clock.now() >= found[0] + (LASTS_SECONDS if able else ASK_AGAIN_SECONDS):
            self._ask(backend)
        return NONE if found is None else found[1]

    def among(self, route: ModelRoute) -> dict[str, Ability]:
        """Of all that may serve it now."""
        return {name: self.of(name) for name in self._pool.names(route)}

    async def settled(self) -> None:
        """Every question that was asked is answered."""
        while self._asking:
            await asyncio.gather(*self._asking.values(), return_exceptions=True)

    async def close(self) -> None:
        for task in self._asking.values():
            task.cancel()
        await self.settled()

    def _ask(self, backend: Backend) -> None:
        if backend.name not in self._asking:
            task = asyncio.get_running_loop().create_task(self._find_out(backend), name=f"ask {backend.name}")
            self._asking[backend.name] = task
            task.add_done_callback(lambda _: self._asking.pop(backend.name, None))

    async def _find_out(self, backend: Backend) -> None:
        before = self._known.get(backend.name)
        ability = await find_out(partial(ask, self._clock, backend, seconds=TIMEOUT))
        if self._servers.get(backend.name) != backend.spec.server:
            return
        self._known[backend.name] = self._clock.now(), ability
        if before is None or before[1] != ability:
            log.info("answers of backend %s %s", backend.name, ability)


async def find_out(ask: Ask) -> Ability:
    """What a backend can do."""
    ids: list[int] = []
    counts = _TOKENIZE[0]
    for counts in _TOKENIZE:
        if ids := await tokens(ask, counts, _SAMPLE):
            break
    if not ids:
        return NONE
    digest = blake2b(orjson.dumps(ids), digest_size=8).hexdigest()
    return Ability(await _exact(ask, ids), digest, counts, await _prefill(ask))


async def _exact(ask: Ask, ids: list[int]) -> bool:
    if await text_of(ask, ids) != _SAMPLE:
        return False
    message = {"role": "user", "content": "ping"}
    said = await ask(
        b"/v1/chat/completions", {"messages": [message], "max_tokens": 1, "return_token_ids": True}
    )
    prompt = _ids(said, "prompt_token_ids")
    if not prompt or not _ids(_choice(said), "token_ids"):
        return False
    go_on = {"prompt": prompt, "max_tokens": 1, "return_token_ids": True}
    rest = _choice(await ask(b"/v1/completions", go_on))
    return _ids(rest, "prompt_token_ids") == prompt and bool(_ids(rest, "token_ids"))


async def _prefill(ask: Ask) -> Prefill | None:
    for shows in (b"/tokenize", b"/apply-template"):
        prompt = await prompt_of(ask, shows, {"messages": _BEGINNING, **GO_ON})
        if prompt is not None:
            break
    if prompt is None or not prompt.endswith(_BEGUN):
        return None
    asked = {"messages": _BEGINNING, **GO_ON, "max_tokens": 8, "stream": True}
    events = await ask(b"/v1/chat/completions", asked)
    choices = [choice for event in events if (choice := _choice(event))] if isinstance(events, list) else []
    if not any(choice.get("finish_reason") for choice in choices):
        return None
    said = [(choice.get("delta") or {}).get("content") or "" for choice in choices]
    return Prefill(shows, "".join(said).lstrip().startswith(_BEGUN))


# -- questions that are also asked when an answer is to go on -----------------------------------------------------


async def tokens(ask: Ask, path: bytes, text: str) -> list[int]:
    """The tokens of a text, special ones as such; none where that is not told. path: `Ability.counts`."""
    asked = {"prompt": text, "add_special_tokens": False}  # vLLM
    return _ids(await ask(path, {**asked, "content": text, "input": text}), "tokens")


async def text_of(ask: Ask, ids: list[int]) -> str | None:
    """What tokens say."""
    return _prompt(await ask(b"/detokenize", {"tokens": ids}))


async def prompt_of(ask: Ask, shows: bytes, body: dict[str, object]) -> str | None:
    """The prompt that a backend makes of a chat request. shows: `Prefill.shows`."""
    answer = await ask(shows, body)
    if shows == b"/tokenize":
        ids = _ids(answer, "tokens")
        return await text_of(ask, ids) if ids else None
    return _prompt(answer)


def _prompt(answer: Any) -> str | None:
    prompt = answer.get("prompt") if isinstance(answer, dict) else None
    return prompt if isinstance(prompt, str) else None


def _choice(answer: Any) -> Any:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    return choices[0] if isinstance(choices, list) and choices else None


def _ids(answer: Any, key: str) -> list[int]:
    value = answer.get(key) if isinstance(answer, dict) else None
    ids = value if isinstance(value, list) else []
    return ids if all(type(id) is int for id in ids) else []
