"""One backend, live: what runs there, how fast that goes, what it said.

Rules: no clock: `now` never goes back. Prefill is served one request after the other, in the order of `begin`; decoding
goes on beside it. What was predicted is kept with each request and compared when it happened: see `corrections`.
"""

from __future__ import annotations

from math import exp

from policies.corrections import Correction, Learned
from policies.member import Member
from policies.params import PolicyParams
from policies.predict import Measured, Speed
from policies.prefix import PrefixCache
from policies.speculation import Speculation
from policies.types import Forecast, Polled, RequestFacts, Result
from policies.workingset import Talk

SHORT = 16
"""Fewer tokens than this say nothing of a rate."""


LONG = 1.0
"""Seconds of one cold prefill that count in the stalled share: a longer one is over and done, no rate to go by."""


class Running:
    """A request on a backend. start: predicted seconds of its own prefill, `warm` and `cold` of it without corrections.
    output: tokens expected. clock: the decode clock when it got its first token."""

    __slots__ = (
        "begun", "cached", "clock", "cold", "facts", "first", "forecast", "output", "start", "talk", "warm",
    )  # fmt: skip

    def __init__(
        self, facts: RequestFacts, begun: float, forecast: Forecast, cached: float, output: float
    ) -> None:
        self.facts, self.begun, self.forecast = facts, begun, forecast
        self.cached, self.output = cached, output
        self.start = self.warm = self.cold = self.clock = 0.0
        self.first: float | None = None
        self.talk: Talk | None = None


class State:
    """`healthy_since`: when it last recovered, None: it never failed. `full_until`: it said itself that it takes no more
    before then."""

    def __init__(self, member: Member, params: PolicyParams) -> None:
        self.healthy = True
        self.healthy_since: float | None = None
        self.suspect = False
        self.draining = False
        self.full_until = 0.0
        self.in_flight_tokens = 0
        self.held_tokens = 0.0  # prompt and expected answer of those running
        self.prompts = 0  # tokens of the prompts of those running
        self.outputs = 0.0  # answers expected of those running
        self.turn = 0
        self.running: dict[int, Running] = {}
        self.pending: dict[int, Running] = {}
        self.polled, self.polled_at, self.excess = Polled(), -1e9, 0
        self.warm, self.cold, self.decode = Correction(), Correction(), Correction()
        self.integrity, self.calls = 1.0, 0
        self.fill = 1.0  # AIMD on the working set: share of its budget
        self._speed_of: object = None
        self.speculation = Speculation(params.speculation)
        self._clock = 0.0
        self._at = 0.0
        self._pace = 0.0
        self._pending_seconds = 0.0
        self._progress = 0.0
        self._stalled = self._worked = 0.0
        self._dirty = True
        self._tpot = self._tpot_more = 0.0
        self.configure(member, params)
        self.cache = PrefixCache(member.kv_tokens)

    def configure(self, member: Member, params: PolicyParams) -> None:
        """What was learned stays, unless the configuration is another one."""
        self.member, self.params = member, params
        self.speculation.params = params.speculation
        profile = member.profile
        if profile is not None and profile.quality_only:
            profile = None
        self.block = member.block_tokens or (784 if profile is not None else 16)
        if self._speed_of is not profile or not hasattr(self, "speed"):
            self._speed_of = profile
            self.speed: Speed = Measured(profile, self.block) if profile is not None else Learned()
            for correction in (self.warm, self.cold, self.decode):
                correction.forget()
        if hasattr(self, "cache"):
            self.cache.capacity = member.kv_tokens
        self.window, self.collapses_beyond = member.usable_window, member.collapses_beyond
        drafts = profile is not None and profile.measured.speculation.draft_tokens > 0
        self.speculates = drafts if member.speculates is None else member.speculates
        self._per_step = profile.tokens_per_step if profile is not None else None
        self._dirty = True

    # -- what would happen

    def queue(self, now: float) -> float:
        """Seconds until a request that comes now would begin its prefill.

        The predicted starts of those before it, less what the first has had. One that is overdue is expected to
        need half as long again as it is overdue: so a backend that stands still looks worse every second.
        """
        if not self.pending:
            return 0.0
        head = next(iter(self.pending.values()))
        left = head.start - (now - max(head.begun, self._progress))
        return self._pending_seconds - head.start + (left if left > 0 else min(60.0, -0.5 * left))

    @property
    def ahead(self) -> float:
        """Seconds of prefill that were predicted for the requests there without a first token."""
        return self._pending_seconds

    def waited(self, now: float) -> tuple[float, float | None]:
        """(seconds that the request whose turn it is has waited for its first token, what was predicted for it). None:
        there is none, or nothing measured to go by."""
        if not self.pending or not self.measured:
            return 0.0, None
        head = next(iter(self.pending.values()))
        return now - max(head.begun, self._progress), head.start

    def starts(self, prompt: float, cached: float) -> tuple[float, float]:
        """(warm, cold) seconds of a prompt, uncorrected."""
        return self.speed.warm(prompt, cached), self.speed.cold(prompt, cached)

    def forecast(
        self, now: float, warm: float, cold: float, context: float, output: float, uncached: float
    ) -> Forecast:
        """For a request with these uncorrected starts. See `Forecast`; degrades to guesses without a profile.

        prefill = warm × its factor + cold × its factor + one decode step per chunk
        tpot = surface(streams + 1, mean context) × factor ÷ (1 - stalled), stalled: prefill's recent share
        harm = harm_weight × (cold × streams that decode + slowdown of each × tokens they have left)
        """
        if self._dirty:
            self._refresh(now)
        predict = self.params.predict
        streams = len(self.running)
        fade = 1.0 - (now - self.polled_at) / self.params.router.fresh_seconds
        more = self.excess * fade if self.excess and fade > 0 else 0.0
        if streams + more < 4:
            tpot = self.speed.tpot(streams + more + 1, (self.prompts + context) / (streams + 1))
        elif more:
            tpot = self.speed.tpot(streams + more + 1, context)
        else:
            tpot = self._tpot_more
        factor = self.decode.factor
        tpot *= factor
        decoding = streams - len(self.pending)
        cold *= self.cold.factor
        prefill = warm * self.warm.factor + cold
        if decoding and cold:
            prefill += self._step * (1.0 + uncached // self.speed.batched_tokens)
        slower = max(0.0, tpot - self._tpot * factor) if streams else 0.0
        harm = cold * decoding + slower * 0.5 * self.outputs
        tpot /= 1.0 - self.stalled(now)
        queue = self.queue(now) + more * 0.1 * prefill
        return Forecast(
            queue, prefill, tpot, predict.decode_weight * output * tpot, predict.harm_weight * harm
        )

    @property
    def measured(self) -> bool:
        """What is predicted of it comes from a profile."""
        return isinstance(self.speed, Measured)

    def alone(self, context: float) -> float:
        """Seconds per token of a stream that it has to itself."""
        return self.speed.tpot(1.0, context) * self.decode.factor

    def tpot_more(self, now: float) -> float:
        """Seconds per token with one more stream like those here."""
        if self._dirty:
            self._refresh(now)
        return self._tpot_more * self.decode.factor / (1.0 - self.stalled(now))

    def stalled(self, now: float) -> float:
        """Share of its recent time in which cold prefill kept streams from decoding, 0..0.8."""
        tau = self.params.predict.stall_seconds
        return min(0.8, self._stalled * exp((self._at - now) / tau) / tau)

    def busy(self, now: float) -> float:
        """Share of its recent time in which it was starting requests, 0..1, and more if they overlapped."""
        tau = self.params.predict.stall_seconds * 3
        return self._worked * exp((self._at - now) / tau) / tau

    # -- what happens

    def begin(self, now: float, id: int, running: Running) -> None:
        self._pass(now)
        self.running[id] = running
        if not self.pending:
            self._progress = now
        self.pending[id] = running
        running.start = running.forecast.prefill
        self._pending_seconds += running.start
        self._stalled += min(running.cold, LONG)
        self.in_flight_tokens += running.facts.context_tokens
        self.prompts += running.facts.prompt.tokens
        self.held_tokens += running.facts.prompt.tokens + running.output
        self.outputs += running.output

    def first_token(self, now: float, id: int) -> None:
        running = self.running[id]
        if running.first is not None:
            return
        self._pass(now)
        self._learn_start(now, id, running)
        self._leave_pending(now, id, running)
        running.first, running.clock = now, self._clock

    def finish(self, now: float, id: int, result: Result) -> Running:
        running = self.running[id]
        self._pass(now)
        del self.running[id]
        if running.first is None:
            self._leave_pending(now, id, running)
        elif result.ok and result.completion_tokens and result.completion_tokens > SHORT:
            self._learn_decode(now, running, result.completion_tokens - 1)
        self.in_flight_tokens -= running.facts.context_tokens
        self.prompts -= running.facts.prompt.tokens
        self.held_tokens -= running.facts.prompt.tokens + running.output
        self.outputs -= running.output
        if not self.running:
            self.held_tokens = self.outputs = 0.0
        if result.calls_ok is not None:
            self.calls += 1
            self.integrity += 0.02 * (result.calls_ok - self.integrity)
        return running

    def restarted(self) -> None:
        """Its cache is empty; what was learned of its speed is kept for a card does not change."""
        self.cache.clear()
        self.speculation.restarted()

    # -- how

    def _pass(self, now: float) -> None:
        """The decode clock: tokens that each stream should have got since the beginning, uncorrected."""
        if self._dirty:
            self._refresh(now)
        passed = now - self._at
        if passed > 0:
            self._clock += passed * self._pace
            tau = self.params.predict.stall_seconds
            self._stalled *= exp(-passed / tau)
            self._worked *= exp(-passed / (3 * tau))
            self._at = now
        self._dirty = True

    def _refresh(self, now: float) -> None:
        """The surfaces at the present load: once per change, not per choice."""
        self._dirty = False
        streams = len(self.running)
        decoding = streams - len(self.pending)
        context = self.prompts / streams if streams else 0.0
        self._tpot = self.speed.tpot(streams, context) if streams else 0.0
        self._tpot_more = self.speed.tpot(streams + 1, context)
        alone = self._tpot if decoding == streams else self.speed.tpot(decoding, context) if decoding else 0.0
        self._step = alone * (self._per_step(context) if self._per_step is not None else 1.0)
        self._pace = 1.0 / alone if alone else 0.0
        if decoding and self.pending:
            head = next(iter(self.pending.values()))
            uncached = max(1.0, head.facts.prompt.tokens - head.cached)
            chunks = 1 + uncached // self.speed.batched_tokens
            stretched = head.cold + chunks * self._step if head.cold else 0.0
            got = head.warm + (chunks * self._step if head.cold else 0.0)
            self._pace *= got / (head.warm + stretched) if head.warm + stretched > 0 else 1.0

    def _leave_pending(self, now: float, id: int, running: Running) -> None:
        del self.pending[id]
        self._worked += now - max(running.begun, self._progress)
        self._pending_seconds = self._pending_seconds - running.start if self.pending else 0.0
        self._progress = now

    def _learn_start(self, now: float, id: int, running: Running) -> None:
        """Observed: since its turn came. The larger part of the start is corrected, by what the other leaves."""
        observed = now - max(running.begun, self._progress)
        if next(iter(self.pending)) != id:
            return
        warm, cold = running.warm, running.cold
        steps = running.start - warm * self.warm.factor - cold * self.cold.factor
        if cold > warm:
            left = observed - warm * self.warm.factor - max(0.0, steps)
            self.cold.observe(cold, max(left, 0.1 * cold), 0.15 * cold / (cold + 0.3))
        else:
            left = observed - cold * self.cold.factor
            self.warm.observe(warm, max(left, 0.1 * warm), 0.05)
        if isinstance(self.speed, Learned):
            self.speed.saw_prefill(running.facts.prompt.tokens - running.cached, observed)
            self.cold.forget()

    def _learn_decode(self, now: float, running: Running, tokens: int) -> None:
        """Tokens that the clock says it should have got ÷ tokens it got."""
        due = self._clock - running.clock
        assert running.first is not None
        seconds = (now - running.first) / tokens
        ratio = due / tokens
        if self.speculates:
            self.speculation.answered(now, running.facts.prompt.tokens, ratio)
        if isinstance(self.speed, Learned):
            self.speed.saw_decode(len(self.running) + 1, running.facts.prompt.tokens, seconds)
        else:
            self.decode.observe(1.0, ratio, 0.2)
