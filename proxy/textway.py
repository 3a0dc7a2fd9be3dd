"""A leg that goes on behind the text of a broken answer, at a backend that gives no token ids.

Rules
1. What a backend makes of the very request is looked at before it is asked to go on: its prompt must end with what the
   client has, behind the whole thinking and nowhere inside one.
2. Tokens of what the client has are counted by the backend's own tokenizer. That is an estimate: the text may have been
   other tokens when it was generated.
"""

from __future__ import annotations

import json
from functools import partial

from proxy.abilities import GO_ON, Ability, Ask, Prefill, prompt_of, tokens
from proxy.aside import ask
from proxy.attempt import Step, Stuck
from proxy.clock import Clock
from proxy.pool import Backend
from proxy.toolwork import ToolWork, rest_engine
from proxy.wire.body import BodyError, scan_object
from proxy.wire.continuation import Said
from proxy.wire.continuationterms import Terms
from proxy.wire.continuationtext import Seam, TextLeg, TextLegCompletion, not_text, text_body
from proxy.wire.errors import Api

TIMEOUT = 5.0
"""Seconds for each question to the backend."""


class TextWay:
    """To one backend."""

    def __init__(self, clock: Clock, backend: Backend, ability: Ability) -> None:
        self._ask: Ask = partial(ask, clock, backend, seconds=TIMEOUT)
        self._ability = ability

    async def leg(self, step: Step, said: Said, terms: Terms, work: ToolWork | None) -> tuple[Step, int]:
        """(what the backend is sent to go on, tokens of the answer so far). step: an ordinary attempt there. Raises Stuck,
        and TimeoutError where it does not answer."""
        api, prefill = step.plan.api, self._ability.prefill
        scan = scan_object(step.body)
        if (why := not_text(api, scan, said)) is not None:
            raise Stuck(why)
        if terms.cut_by_stop(said.content):
            raise Stuck("stop")
        had = len(await tokens(self._ask, self._ability.counts, said.reasoning + said.content))
        if not had:
            raise TimeoutError("it does not count the text")
        left = terms.left(had)
        if left is not None and left < 1:
            raise Stuck("limit")
        try:
            body = text_body(api, scan, said, left, GO_ON)
        except BodyError:
            raise Stuck("body") from None
        echoes = False
        if api is Api.CHAT:
            if prefill is None:
                raise Stuck("backend")
            await self._look(prefill, step.body, body, said)
            echoes = prefill.echoes
        seam = Seam(said, had, echoes=echoes, shows_usage=terms.shows_usage)

        def reader() -> TextLeg | TextLegCompletion:
            if api is Api.COMPLETIONS:
                return TextLegCompletion(seam)
            return TextLeg(seam, partial(rest_engine, work), said.thoughts or ("reasoning",))

        hidden = not terms.shows_usage  # then nobody misses it where it does not come
        plan = step.plan.with_reader(reader, hide_usage=hidden)
        return Step(step.target, body, plan), had

    async def _look(self, prefill: Prefill, asked: bytes, goes_on: bytes, said: Said) -> None:
        """Raises Stuck where the prompt is not what would have been generated so far, as far as that can be seen."""
        prompt = await prompt_of(self._ask, prefill.shows, json.loads(goes_on))
        if prompt is None:
            raise TimeoutError("it does not show its prompt")
        if not prompt.endswith(said.content.rstrip()):
            raise Stuck("differs")
        if said.reasoning:
            if said.reasoning.strip() not in prompt:
                raise Stuck("thinking")
            return
        before = await prompt_of(self._ask, prefill.shows, json.loads(asked))
        if before is None or before.rstrip().endswith("<think>"):
            raise Stuck("thinking")  # it began inside thinking, and nobody told thinking and text apart
