"""A broken stream goes on at another backend: what one request keeps for that, and the leg that follows a break.

Rules
1. The request is routed, retried and paid for like any other (`Failover`); here is only what differs: which backends can
   finish this answer, what they are sent, and how what they send is read.
2. A leg begins only when everything agrees: the ids are there without a hole, the new backend decodes them to a text that
   reads like what the client has, and nothing the request asks for would be lost by the cut. Else the stream ends with
   an error, as it would have without any of this.
3. By token where that can be; where the tier allows it and no backend can, by text (`textway`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from proxy.abilities import NONE, Abilities, Ability, text_of
from proxy.aside import ask
from proxy.attempt import Plan, Step, Stuck
from proxy.classify import Classified
from proxy.clock import Clock
from proxy.errors import Ending, Outcome
from proxy.failover import Failover
from proxy.pool import Backend
from proxy.record import Record
from proxy.textway import TextWay
from proxy.toolwork import raw_engine
from proxy.wire.body import scan_object
from proxy.wire.continuation import ABORT, MOST_TORN, Transcript, torn
from proxy.wire.continuationskip import Differs
from proxy.wire.continuationstream import ContinuedStream, ContinuedText, Legs
from proxy.wire.continuationterms import Terms, read_terms
from proxy.wire.errors import Api
from proxy.wire.request import RequestBody
from proxy.wire.splice import apply, override
from proxy.wire.toolrender import ToolFormat

PATH = "/v1/completions"
TIMEOUT = 5.0
"""Seconds for decoding ids."""

_TAIL = 16
"""Of the prompt's ids, what is decoded to see whether the answer begins inside thinking."""

_RETURN_IDS = override("return_token_ids", True)


class Continuation:
    """Of one request. legs: (backend, tokens of the answer before it, by token or by text) of every attempt that went on.
    broke: the stream did, in the middle. why: it cannot go on."""

    __slots__ = (
        "_abilities",
        "_ability",
        "_asked",
        "_clock",
        "_had",
        "_last",
        "_terms",
        "_texts",
        "_transcript",
        "broke",
        "legs",
        "why",
    )

    def __init__(self, clock: Clock, abilities: Abilities, asked: Classified, *, text: bool = False) -> None:
        """text: the tier allows to go on by text."""
        self._clock = clock
        self._abilities = abilities
        self._asked = asked
        self._ability = NONE
        self._terms: Terms | None = None
        self._transcript: Transcript | None = None
        self._texts = text
        self._last = ""  # the backend that was asked last
        self.legs: list[tuple[str, int, str]] = []
        self._had = 0  # of `_made`, when the last leg began
        self.broke = False
        self.why: str | None = None

    @property
    def begun(self) -> bool:
        """The client has a part of the answer, and it may go on from there."""
        transcript = self._transcript
        return transcript is not None and transcript.begun and self.why is None

    @property
    def kept(self) -> tuple[object, ...]:
        """What belongs to one attempt, where two are made side by side."""
        return self._ability, self._terms, self._transcript, self._last, self.why

    def keep(self, kept: tuple[Any, ...]) -> None:
        """Go on with what belongs to that attempt."""
        self._ability, self._terms, self._transcript, self._last, self.why = kept

    def _watched(self, backend: Backend, step: Step) -> Step:
        """The first leg as it is sent: with ids asked for where the answer could go on behind them."""
        self._transcript = None
        body, asked = self._asked.body, self._asked
        assert isinstance(body, RequestBody)
        self._abilities.among(asked.route)  # so that it is known when it is needed
        self._ability = ability = self._abilities.of(backend.name)
        if not ability.exact and (not self._texts or ability.tokenizer is None):
            self.why = "backend"
            return step
        scan = scan_object(step.body)
        terms = read_terms(step.plan.api, scan, shows_usage=body.include_usage)
        if asked.work is not None and asked.work.form is not ToolFormat.OPENAI:
            terms = "tool_format"
        if isinstance(terms, str):
            self.why = terms
            return step
        self.why, self._terms = None, terms
        transcript = self._transcript = Transcript(shows_usage=terms.shows_usage, text=not ability.exact)
        sent = apply(scan, [_RETURN_IDS]) if ability.exact else step.body
        return Step(step.target, sent, replace(step.plan, transcript=transcript))

    @property
    def _made(self) -> int:
        """How much of the answer there is: tokens, where they are known, else characters."""
        transcript = self._transcript
        if transcript is None:
            return 0
        return len(transcript.ids) if transcript.usable else len(transcript.said.content)

    def _by_token(self, ability: Ability) -> bool:
        return self._ability.exact and ability.exact and ability.alike(self._ability)

    def _by_text(self, ability: Ability) -> bool:
        body = self._asked.body
        assert isinstance(body, RequestBody)
        able = ability.prefill is not None or body.api is Api.COMPLETIONS
        return self._texts and able and ability.alike(self._ability)

    def after_break(self, failover: Failover) -> bool:
        """An attempt failed, and the client has a part of the answer: whether another may go on from there."""
        self.broke = True
        if not self.begun:
            return False
        assert self._transcript is not None
        _ = self._transcript.said  # `usable` counts behind it
        abilities = self._abilities.among(self._asked.route)
        fit = {name for name, ability in abilities.items() if self._by_token(ability)}
        if not self._transcript.usable or not fit - failover.tried - {self._last}:
            fit |= {name for name, ability in abilities.items() if self._by_text(ability)}
        failover.moves = self._made > self._had
        failover.unfit = frozenset(abilities.keys() - fit)
        return True

    async def step(self, backend: Backend, step: Step) -> Step:
        """What `backend` is sent, where an ordinary attempt would send `step`. Raises Stuck, and TimeoutError where it does
        not answer."""
        self._last = backend.name
        if not self.begun:
            return self._watched(backend, step)
        try:
            ability = self._abilities.of(backend.name)
            if self._by_token(ability) and self._transcript is not None and self._transcript.usable:
                return await self._leg(backend, step.plan)
            return await self._text_leg(backend, ability, step)
        except Stuck as stuck:
            self.why = stuck.why
            raise

    def ending(self, outcome: Outcome) -> Ending | None:
        """How it went; None for a stream that did not break."""
        if not self.broke:
            return None
        if outcome in (Outcome.OK, Outcome.CANCELLED):
            return Ending.WHOLE if outcome is Outcome.OK else Ending.LEFT
        if self.why is not None:
            return Ending.UNSAFE
        return Ending.BROKEN if self.legs else Ending.NOBODY

    def note(self, record: Record) -> None:
        """What the record says of it."""
        record.continuation = self.ending(record.outcome)
        if record.continuation is not None:
            record.legs, record.continuation_why = tuple(self.legs), self.why

    async def _leg(self, backend: Backend, plan: Plan) -> Step:
        """What `backend` is sent to go on; plan: of an ordinary attempt there."""
        transcript, terms = self._transcript, self._terms
        assert transcript is not None
        assert terms is not None
        said, prompt = transcript.said, transcript.prompt_ids.tolist()
        if not transcript.usable or transcript.finish not in (None, ABORT):
            raise Stuck("ids")
        ids = transcript.ids.tolist()
        raw = await self._decoded(backend, ids)
        if raw is None:
            raise TimeoutError("it does not say what the ids mean")
        left = terms.left(len(ids))
        if left is not None and left < 1:
            raise Stuck("limit")
        if terms.cut_by_stop(raw):
            raise Stuck("stop")
        thinks = False
        if not (said.content or said.reasoning) and plan.api is Api.CHAT:
            tail = await self._text(backend, prompt[-_TAIL:])
            thinks = tail is not None and tail.rstrip().endswith("<think>")
        legs = Legs(said, raw, len(prompt), len(ids), thinks, terms.shows_usage)
        reader = ContinuedStream if plan.api is Api.CHAT else ContinuedText
        try:
            made = reader(legs, partial(raw_engine, self._asked.work))
        except Differs:
            raise Stuck("differs") from None
        transcript.next_leg(ids)
        self._went_on(backend, len(ids), "token")
        model = backend.served_model or self._asked.route.target
        body = terms.body(model, prompt, ids, raw=plan.api is Api.CHAT)
        return Step(PATH, body, replace(plan.with_reader(lambda: made), transcript=transcript))

    async def _text_leg(self, backend: Backend, ability: Ability, step: Step) -> Step:
        """The same by text; step: an ordinary attempt there."""
        transcript, terms = self._transcript, self._terms
        assert transcript is not None
        assert terms is not None
        if not self._by_text(ability):
            raise Stuck("ids" if self._ability.exact else "backend")
        way = TextWay(self._clock, backend, ability)
        step, had = await way.leg(step, transcript.said, terms, self._asked.work)
        transcript.next_text_leg()
        self._went_on(backend, had, "text")
        return replace(step, plan=replace(step.plan, transcript=transcript))

    def _went_on(self, backend: Backend, tokens: int, by: str) -> None:
        self._had = self._made
        self.legs.append((backend.name, tokens, by))

    async def _decoded(self, backend: Backend, ids: list[int]) -> str | None:
        """The text of `ids`, which are cut back to a whole character: an engine that is given half of one as a prompt
        loses the other half."""
        raw = text = await self._text(backend, ids)
        for cut in range(1, MOST_TORN + 1):
            if text is None or not torn(text) or cut > len(ids):
                break
            text = await self._text(backend, ids[:-cut])
            if text is not None and not torn(text):
                del ids[-cut:]
                return text
        return raw if text is not None else None

    async def _text(self, backend: Backend, ids: list[int]) -> str | None:
        if not ids:
            return ""
        return await text_of(partial(ask, self._clock, backend, seconds=TIMEOUT), ids)
