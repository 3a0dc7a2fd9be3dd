"""One request's answer in the making, streamed or whole.

Rules: told by the drive, writes straight to the transport; no task of its own. While the client does not read,
tokens pile up and leave together, as vLLM's do. `done` resolves exactly once, when nothing more will be sent.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from proxy.front import Answer
from proxy.sim import shapes
from proxy.sim.ask import Ask, Json, error
from proxy.sim.exposition import Exposition
from proxy.sim.faults import Fault, FaultKind
from proxy.sim.plan import Cutter, Delta, Plan
from proxy.sim.shapes import ChatEvents, Counts, TextEvents
from proxy.sim.text import Tokenizer

Headers = list[tuple[bytes, bytes]]
ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


@dataclass(frozen=True, slots=True)
class Identity:
    """What every event of an answer repeats."""

    id: str
    created: int
    model: str
    prompt_ids: list[int] | None


class Choice:
    """One of a request's answers: the sink of one engine request."""

    def __init__(self, reply: Reply, index: int, plan: Plan, tokenizer: Tokenizer, at: float) -> None:
        self.reply = reply
        self.index = index
        self.plan = plan
        self.cutter = Cutter(plan, tokenizer, ids=reply.ask.token_ids)
        self.spoken = False
        self.owed = 0
        self.ended = False
        self._times = [at, at, at, at]  # submitted, started, first token, last token

    def call_id(self, call: int) -> str:
        return f"chatcmpl-tool-{self.reply.identity.id[-14:]}{self.index}{call}"

    def started(self, at: float, cached: int) -> None:
        if not self.spoken:
            self._times[1] = at
            self.reply.counts.cached = cached

    def tokens(self, at: float, n: int) -> None:
        if self.owed == 0 and not self.spoken and self.cutter.taken == 0:
            self._times[2] = at
            self.reply.exposition.observe("time_to_first_token_seconds", at - self._times[0])
        elif n:
            self.reply.exposition.observe("inter_token_latency_seconds", at - self._times[3])
        self._times[3] = at
        self.owed += n
        self.reply.progress(self)

    def finished(self, at: float) -> None:
        submitted, started, first, _ = self._times
        observe, tokens = self.reply.exposition.observe, self.plan.tokens
        observe("e2e_request_latency_seconds", at - submitted)
        observe("request_queue_time_seconds", started - submitted)
        observe("request_prefill_time_seconds", first - started)
        observe("request_inference_time_seconds", at - started)
        observe("request_decode_time_seconds", at - first)
        observe("request_prompt_tokens", self.reply.counts.prompt)
        observe("request_generation_tokens", tokens)
        if tokens > 1:
            observe("request_time_per_output_token_seconds", (at - first) / (tokens - 1))
        self.reply.exposition.finished["length" if self.plan.finish == "length" else "stop"] += 1
        self.ended = True
        self.owed = self.cutter.left
        self.reply.progress(self)


class Reply:
    """Common to both; `fault` is what goes wrong with this one."""

    def __init__(
        self,
        answer: Answer,
        headers: Headers,
        ask: Ask,
        identity: Identity,
        counts: Counts,
        exposition: Exposition,
        fault: Fault | None,
    ) -> None:
        self.answer = answer
        self.headers = headers
        self.ask = ask
        self.identity = identity
        self.counts = counts
        self.exposition = exposition
        self.fault = fault
        self.choices: list[Choice] = []
        self.done = asyncio.get_running_loop().create_future()

    def progress(self, choice: Choice) -> None:
        raise NotImplementedError

    def die(self) -> None:
        """The engine was killed."""
        raise NotImplementedError

    def abort(self) -> None:
        """The server was told to stop."""
        raise NotImplementedError

    def over(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def break_off(self) -> None:
        self.answer.abort()
        self.over()


class StreamReply(Reply):
    def begin(self) -> None:
        """The head goes out at once, as soon as the request is understood."""
        kind = (b"content-type", b"text/event-stream; charset=utf-8")
        self.answer.start(200, [*self.headers, kind], None)
        events = ChatEvents if self.ask.chat else TextEvents
        i = self.identity
        self.events: ChatEvents | TextEvents = events(self.ask, i.id, i.created, i.model, i.prompt_ids)
        self.answer.watch(None, self._resume)

    def progress(self, choice: Choice) -> None:
        if self.done.done() or self.answer.gone or self.answer.paused:
            return
        n, choice.owed = choice.owed, 0
        if self.fault is not None and self._goes_wrong(choice, n):
            return
        if n:
            self._say(choice, n)

    def die(self) -> None:
        if not self.done.done():
            failed = error(ENGINE_DEAD, "InternalServerError", None, 500)
            self.answer.push(shapes.event(shapes.dumps(failed)))
            self._close()

    def abort(self) -> None:
        if self.done.done():
            return
        for choice in self.choices:
            if choice.cutter.left:
                last = self.events.abort(choice.index, self.counts)
                self.answer.push(last if self.ask.usage else shapes.with_fingerprint(last))
        if self.ask.usage:
            self.answer.push(self.events.usage(self.counts))
        self._close()

    def _say(self, choice: Choice, n: int) -> None:
        """`n` tokens of text, and the end when they were the last."""
        push, events, index = self.answer.push, self.events, choice.index
        if not choice.spoken:
            choice.spoken = True
            push(events.role(index, self.counts))
        before = choice.cutter.taken, choice.cutter.reasoning
        deltas = choice.cutter.take(n)
        self.counts.completion += choice.cutter.taken - before[0]
        self.counts.reasoning += choice.cutter.reasoning - before[1]
        last = choice.cutter.left == 0
        held = deltas.pop() if last and deltas else None
        for delta in deltas:
            push(events.delta(index, delta, choice.call_id(delta.call), self.counts))
        if last:
            self._end(choice, held)
        elif self.ask.token_ids and choice.cutter.loose:
            push(events.silent(index, choice.cutter.loose, self.counts))

    def _end(self, choice: Choice, held: Delta | None) -> None:
        call_id = choice.call_id(held.call if held else 0)
        end = self.events.end(choice.index, choice.plan, self.counts, held, call_id, choice.cutter.loose)
        final = all(c.cutter.left == 0 for c in self.choices)
        self.answer.push(shapes.with_fingerprint(end) if final and not self.ask.usage else end)
        if final:
            if self.ask.usage:
                self.answer.push(self.events.usage(self.counts))
            self._close()

    def _close(self) -> None:
        self.answer.push(shapes.DONE)
        self.answer.finish()
        self.over()

    def _resume(self) -> None:
        for choice in self.choices:
            if choice.owed:
                self.progress(choice)

    def _goes_wrong(self, choice: Choice, n: int) -> bool:
        """Say what comes before the fault, then be the fault; True if nothing more is to be said."""
        fault = self.fault
        assert fault is not None
        before = max(0, (fault.after_tokens or 0) - choice.cutter.taken)
        if n < before or (n == before and choice.cutter.left > n):
            return False
        if before:
            self._say(choice, before)
            choice.owed = n - before
        self.fault = None if fault.kind is not FaultKind.HANG else fault
        match fault.kind:
            case FaultKind.RESET:
                self.break_off()
            case FaultKind.TRUNCATED:
                self.answer.finish()
                self.over()
            case FaultKind.ABORT:
                self.abort()
            case FaultKind.MALFORMED:
                self.answer.push(
                    b'data: {"id":"%b","choices":[{"index":0,"del\n\n' % self.identity.id.encode()
                )
                if not self.done.done():
                    self.progress(choice)
        return True


class WholeReply(Reply):
    """Not streamed. Its faults come at the end, whatever `after_tokens` says."""

    def begin(self) -> None:
        """Nothing is sent until all is there."""

    def progress(self, choice: Choice) -> None:
        if self.done.done() or not all(c.ended for c in self.choices):
            return
        self._send([c.plan.finish for c in self.choices])

    def die(self) -> None:
        if not self.done.done():
            failed = error(ENGINE_DEAD, "InternalServerError", None, 500)
            self._write(500, shapes.dumps(failed))

    def abort(self) -> None:
        if not self.done.done():
            self._send(["abort"] * len(self.choices))

    def _send(self, finishes: list[str]) -> None:
        i, choices = self.identity, []
        for choice, finish in zip(self.choices, finishes, strict=True):
            # What was generated; what an aborted engine had so far is not known here, and is not told.
            deltas = choice.cutter.take(choice.cutter.left if finish != "abort" else 0)
            choices.append(self._choice(choice, finish, deltas))
        self.counts.completion = sum(c.cutter.taken for c in self.choices)
        self.counts.reasoning = sum(c.cutter.reasoning for c in self.choices)
        if self.ask.chat:
            body = shapes.chat_body(i.id, i.created, i.model, choices, self.counts, i.prompt_ids)
        else:
            body = shapes.text_body(i.id, i.created, i.model, choices, self.counts)
        self._write(200, body)

    def _choice(self, choice: Choice, finish: str, deltas: list[Delta]) -> Json:
        ids = [id for delta in deltas for id in delta.ids]
        if not self.ask.chat:
            prompt_ids = self.identity.prompt_ids
            return shapes.text_choice(self.ask, choice.index, choice.plan, finish, deltas, ids, prompt_ids)
        calls = [choice.call_id(n) for n in range(1 + max((d.call for d in deltas), default=0))]
        return shapes.chat_choice(self.ask, choice.index, choice.plan, finish, deltas, ids, calls)

    def _write(self, status: int, body: bytes) -> None:
        headers = [*self.headers, (b"content-type", b"application/json")]
        kind = self.fault.kind if self.fault is not None else None
        if kind is FaultKind.HANG:
            return
        if kind in (FaultKind.RESET, FaultKind.TRUNCATED):
            if kind is FaultKind.TRUNCATED:
                self.answer.start(status, headers, len(body), body[: len(body) // 2])
            self.break_off()
            return
        self.answer.send(status, headers, body[: len(body) // 2] if kind is FaultKind.MALFORMED else body)
        self.over()
