"""Whether a request goes now, waits or is turned away. The gate only does what is said here.

Rules: no clock: `now` never goes back. An answer `Go` has begun in the fleet: choice and lease are one step. Whoever
waits gets exactly one further answer, from `advance`, or is withdrawn. Call `advance` after every event of the fleet
and at `next_event_at`. Nobody overtakes within a line, and a line whose first cannot go holds up no other line.

A backend is closed for a request, for now, while one of these holds (an idle one is open to all, and so is one without
profile: a guess is no reason to let anybody wait):
- its prefill is busy for longer than `ahead_seconds`: what waits here can still be overtaken by a warm turn;
- tokens per second would fall below the SLO of those there: tpot > tpot_margin × the tier's, which it could keep alone;
- its KV cache cannot hold the prompt and the expected answer beside those running;
- a new conversation, and those that live there are expected to fill the cache or its time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from math import ceil, exp, inf
from random import Random

from policies.filters import tier as quality
from policies.fleet import Fleet
from policies.lines import Line, Side, Waiting
from policies.params import PolicyParams
from policies.router import Router
from policies.state import State
from policies.types import (
    BackendView,
    Decision,
    Drop,
    DropReason,
    Forecast,
    Go,
    RequestFacts,
    Shed,
    ShedReason,
    Verdict,
    Wait,
)

Names = Callable[[str, tuple[str, ...]], tuple[str, ...]]
"""(public name of a model, backends that it had) → those that it has now."""

_NONE: frozenset[str] = frozenset()
LOOK = 4
"""How many of a line are tried when its first cannot go."""
SOONEST = 0.01
"""Seconds between two looks without an event, at least."""
LATE_FACTOR, IN_TIME, LEAST_TRUST = 0.7, 0.002, 0.1
"""What trust in predicted waits is multiplied by when one was wrong, what each right one adds, and its least: about one
in a hundred is wrong where waits are long."""
AIM, SPENT_FACTOR = 0.7, 0.85
"""Beyond this share of the time until it must start, a start is in time by luck: what it takes from there varies. Trust is
multiplied by the second."""
RATE_SECONDS = 20.0
"""Over how long the rate at which the line moves is averaged."""


class Admission:
    """All that wait for one fleet."""

    def __init__(self, fleet: Fleet, router: Router, params: PolicyParams, rng: Random) -> None:
        self._fleet, self._rng = fleet, rng
        self._lines: dict[tuple[str, int], Line] = {}
        self._waiting: dict[int, Waiting] = {}
        self._version = -1
        self._untils: list[tuple[float, int]] = []
        self._opens_at = inf
        self._gone, self._gone_at = 0.0, 0.0
        self._trust = 1.0
        self.configure(0.0, router, params)

    def configure(self, now: float, router: Router, params: PolicyParams, names: Names | None = None) -> None:
        """Another policy from now on; who waits stays in line, for those that `names` gives now."""
        self._router, self._params, self._gate = router, params, params.gate
        self._weights = dict(params.gate.weights)
        self._version = -1
        if names is not None:
            for one in self._waiting.values():
                one.names = names(one.facts.model, one.names)

    # -- what is asked

    def offer(
        self, now: float, id: int, facts: RequestFacts, names: Iterable[str], *, pinned: str | None = None
    ) -> Verdict:
        """A request arrives; `names`: the backends of its model."""
        names = tuple(names)
        if not self._params.admits:
            return self.again(now, id, facts, names, pinned=pinned)
        fleet = self._fleet
        fleet.talks.sweep(now)
        talk = fleet.talks.get(fleet.talks.key(facts))
        one = Waiting(id, facts, names, pinned, now, talk is not None and talk.turns > 0)
        line = self._lines.get(_line(facts))
        go, decision, views = None, None, None
        if line is None or not line.before(one)[0]:
            go, decision, views = self._try(now, one)
            if go is not None:
                return go
            if not decision.only_full():
                return self._refuse(now, one, ShedReason.NO_BACKEND, decision)
        else:
            views = fleet.views(now, facts, names)
            decision = self._router.choose(facts, views, self._rng, pinned=pinned)
            if decision.backend is None and not decision.only_full():
                return self._refuse(now, one, ShedReason.NO_BACKEND, decision)
            decision = _held(views, decision)
        return self._wait(now, one, views, decision)

    def again(
        self,
        now: float,
        id: int,
        facts: RequestFacts,
        names: Iterable[str],
        *,
        tried: frozenset[str] = _NONE,
        pinned: str | None = None,
        larger_than: int | None = None,
    ) -> Go | Shed:
        """A further attempt of a request that has been let in: it does not wait again."""
        views = self._fleet.views(now, facts, names)
        decision = self._router.choose(
            facts, views, self._rng, tried=tried, pinned=pinned, larger_than=larger_than
        )
        if decision.backend is None:
            full = decision.only_full()
            return Shed(ShedReason.FULL if full else ShedReason.NO_BACKEND, int(full), decision)
        return self._go(now, id, facts, views, decision)

    def beside(
        self, now: float, id: int, facts: RequestFacts, names: Iterable[str], *, tried: frozenset[str]
    ) -> Go | None:
        """A second attempt beside one that runs: only while nobody waits, and where it would start at once."""
        if self._waiting:
            return None
        most = self._slowest(facts)

        def hold(state: State, forecast: Forecast, tokens: float) -> bool:
            busy = forecast.queue > 0 or state.held_tokens + tokens > state.member.kv_tokens
            return busy or (bool(state.running) and forecast.tpot > most)

        views = self._fleet.views(now, facts, names, hold)
        decision = self._router.choose(facts, views, self._rng, tried=tried)
        view = next((view for view in views if view.name == decision.backend), None)
        if view is None or view.remote or view.suspect or view.collapsed or view.waiting:
            return None
        return self._go(now, id, facts, views, decision)

    def advance(self, now: float) -> list[tuple[int, Verdict]]:
        """Those whose wait ends now, in order."""
        out: list[tuple[int, Verdict]] = []
        if not self._waiting:
            return out
        self._expire(now, out)
        if self._version == self._fleet.version and now < self._opens_at:
            return out
        self._fleet.talks.sweep(now)
        for line in self._in_order():
            for side in line.sides:
                self._serve(now, line, side, out)
        self._version = self._fleet.version
        self._opens_at = self._next_opening(now)
        return out

    def next_event_at(self) -> float | None:
        """When `advance` has something to say if nothing else happens; None: not before an event."""
        untils = self._untils
        while untils and untils[0][1] not in self._waiting:
            heappop(untils)
        return min(untils[0][0], self._opens_at) if untils else None

    def withdraw(self, now: float, id: int) -> None:
        """Who waited has left."""
        one = self._waiting.pop(id, None)
        if one is not None:
            self._lines[_line(one.facts)].remove(one, served=False)

    def waiting(self) -> dict[tuple[str, int], int]:
        """(tier, priority) → how many are in line."""
        return {key: len(line) for key, line in self._lines.items()}

    # -- trying

    def _try(self, now: float, one: Waiting) -> tuple[Go | None, Decision, tuple[BackendView, ...]]:
        """Go where it is best if that is open. If it is not: elsewhere, unless waiting for it is predicted to be sooner."""
        facts, gate = one.facts, self._gate
        most = self._slowest(facts)
        fresh = not one.running and self._fleet.talks.key(facts) is not None

        def hold(state: State, forecast: Forecast, tokens: float) -> bool:
            if not state.measured:
                return False
            if not state.running and not (fresh and self._crowded(now, state, facts)):
                return False
            return (
                forecast.queue > gate.ahead_seconds
                or (forecast.tpot > most and state.alone(facts.prompt.tokens) <= most)
                or state.held_tokens + tokens > state.member.kv_tokens
                or (fresh and self._crowded(now, state, facts))
            )

        views = self._fleet.views(now, facts, one.names, hold)
        decision = self._router.choose(facts, views, self._rng, pinned=one.pinned)
        if decision.backend is None:
            return None, decision, views
        chosen = next(view for view in views if view.name == decision.backend)
        assert chosen.forecast is not None
        for drop in decision.drops:
            if drop.reason is DropReason.HELD:
                other = next(view for view in views if view.name == drop.backend)
                assert other.forecast is not None
                if other.forecast.cost + gate.ahead_seconds < chosen.forecast.cost:
                    return None, _held(views, decision), views
        return self._go(now, one.id, facts, views, decision), decision, views

    def _slowest(self, facts: RequestFacts) -> float:
        """Seconds per token that a backend may be filled to."""
        slo = facts.tier.slo
        return slo.tpot_seconds * self._gate.tpot_margin if slo is not None else inf

    def _crowded(self, now: float, state: State, facts: RequestFacts) -> bool:
        """A new conversation would be one too many there."""
        params, talks, name = self._params.working_set, self._fleet.talks, state.member.name
        live = talks.live.get(name, 0)
        if not live:
            return False
        budget = state.member.kv_tokens * params.kv_share * state.fill
        if talks.tokens.get(name, 0.0) + talks.expected(facts) > budget:
            return True
        return state.busy(now) > params.busy_share

    def _is_crowded(self, now: float, one: Waiting, views: tuple[BackendView, ...]) -> bool:
        """A new conversation, and one too many on every backend of its tier's quality."""
        facts, states = one.facts, self._fleet.states
        if one.running or self._fleet.talks.key(facts) is None:
            return False
        mine = [
            view for view in views if not view.remote and quality(facts, view, self._params.router) is None
        ]
        return all(self._crowded(now, states[view.name], facts) for view in mine)

    def _go(
        self,
        now: float,
        id: int,
        facts: RequestFacts,
        views: Iterable[BackendView],
        decision: Decision,
    ) -> Go:
        view = next(view for view in views if view.name == decision.backend)
        self._fleet.begin(now, id, view.name, facts, view)
        self._left(now)
        return Go(decision, view)

    # -- waiting

    def _wait(self, now: float, one: Waiting, views: tuple[BackendView, ...], decision: Decision) -> Verdict:
        """In line, if its turn comes in time; else turned away at once."""
        facts, gate = one.facts, self._gate
        self._date(now, one, views)
        key = _line(facts)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line(self._weights)
        wait = self._drain(now, one, line, views)
        if self._is_crowded(now, one, views):
            one.reason = ShedReason.WORKING_SET
        if len(line) >= gate.queue:
            return self._refuse(now, one, ShedReason.QUEUE_FULL, decision, wait)
        if now + wait > (one.until if one.running else now + (one.due - now) * self._trusted(one, line)):
            return self._refuse(now, one, one.reason, decision, wait)
        line.add(one)
        self._waiting[one.id] = one
        heappush(self._untils, (min(one.due, one.until), one.id))
        self._opens_at = min(self._opens_at, self._next_opening(now))
        return Wait(wait, one.reason)

    def _trusted(self, one: Waiting, line: Line) -> float:
        """Of the time until it must start, how much may be predicted to pass: what is let in under overload must start in
        time. A tenant that has but a few in line, beside others, is not to blame that forecasts were wrong."""
        return 1.0 if 4 * line.count(one.facts.share) < len(line) else self._trust

    def _date(self, now: float, one: Waiting, views: tuple[BackendView, ...]) -> None:
        """Until when it must start, and until when it waits."""
        if one.promise:
            return
        facts, gate = one.facts, self._gate
        promise = self._fleet.promise(facts, views)
        at = one.since + (promise if promise is not None else gate.wait_seconds)
        if facts.deadline is not None:
            at = facts.deadline
        starts = [view.forecast.prefill for view in views if view.forecast is not None]
        start = min(starts, default=0.0)
        one.promise = at
        one.cost = max(0.05, start)
        one.due = max(at - start - gate.ahead_seconds, one.since + gate.ahead_seconds)
        one.until = at
        if facts.deadline is None:
            # Ending a conversation loses all its turns to come; late is better.
            late = gate.wait_seconds if one.running else gate.late_seconds
            one.until = max(one.due + late, one.since + late)

    def _drain(self, now: float, one: Waiting, line: Line, views: tuple[BackendView, ...]) -> float:
        """Seconds until it starts, predicted.

        While prefill is what is short: what is busy now, and the starts of those before it over the backends that share
        them. While places are (tokens per second or the cache): those before it ÷ the rate at which places open.
        """
        most, states = self._slowest(one.facts), self._fleet.states
        if not any(states[view.name].measured for view in views):
            ahead, rate = line.before(one)[0], self._rate(now)
            return ahead / rate if rate > 0 else 0.0  # guesses turn nobody away
        queues = [view.forecast.queue for view in views if view.forecast is not None]
        short = [
            states[view.name].tpot_more(now) > most
            or states[view.name].held_tokens + one.facts.prompt.tokens > view.kv_tokens
            for view in views
        ]
        ahead, work = line.before(one)
        wait = max(0.0, min(queues, default=0.0) - self._gate.ahead_seconds)
        wait += work / max(1, len(short) - sum(short))
        if not all(short) or not short:
            return wait
        durations = [view.forecast.finish for view in views if view.forecast is not None]
        rate = max(self._rate(now), self._fleet.ending(now, min(durations, default=1.0)))
        return max(wait, (ahead + 1) / rate if rate > 0 else 0.0)

    def _rate(self, now: float) -> float:
        """Requests per second that have begun lately."""
        return self._gone / RATE_SECONDS * exp((self._gone_at - now) / RATE_SECONDS)

    def _next_opening(self, now: float) -> float:
        """When, without any event, enough prefill is done somewhere for one more, or a backend that said that it was
        full may be asked again."""
        best = inf
        for state in self._fleet.states.values():
            over = state.queue(now) - self._gate.ahead_seconds
            over = max(over, state.full_until - now)
            if 0 < over < best and state.healthy:
                best = over
        return now + max(best, SOONEST)

    def _closed(self, now: float, state: State, most: float, prompt: float) -> bool:
        """Closed to whoever asks."""
        return bool(state.running and state.measured) and (
            state.queue(now) > self._gate.ahead_seconds
            or (state.tpot_more(now) > most and state.alone(prompt) <= most)
            or state.held_tokens >= state.member.kv_tokens
        )

    def _left(self, now: float) -> None:
        self._gone = self._gone * exp((self._gone_at - now) / RATE_SECONDS) + 1.0
        self._gone_at = now

    def _in_order(self) -> list[Line]:
        """Higher priority first; of one priority the tier whose first has waited longest."""
        keys = sorted(
            [key for key, line in self._lines.items() if len(line)],
            key=lambda key: (-key[1], self._lines[key].oldest()),
        )
        return [self._lines[key] for key in keys]

    def _serve(self, now: float, line: Line, side: Side, out: list[tuple[int, Verdict]]) -> None:
        while side:
            first = next(iter(next(iter(side.values())).values()))
            most = self._slowest(first.facts)
            states = self._fleet.states
            tokens, names = first.facts.prompt.tokens, first.names
            if names and all(self._closed(now, states[name], most, tokens) for name in names):
                return
            for one in line.heads(side, LOOK):
                go, decision, _ = self._try(now, one)
                if go is None and not decision.only_full():
                    self._remove(one, served=False)
                    out.append((one.id, self._refuse(now, one, ShedReason.NO_BACKEND, decision)))
                    break
                if go is not None:
                    if now <= one.since + AIM * (one.due - one.since):
                        self._trust = min(1.0, self._trust + IN_TIME)
                    elif now <= one.due:
                        self._trust = max(LEAST_TRUST, self._trust * SPENT_FACTOR)
                    self._remove(one, served=True)
                    out.append((one.id, go))
                    break
            else:
                return

    def _expire(self, now: float, out: list[tuple[int, Verdict]]) -> None:
        untils = self._untils
        while untils and untils[0][0] <= now:
            gone = self._waiting.get(heappop(untils)[1])
            if gone is None:
                continue
            one = gone
            if now < one.until or one.due == one.until:
                self._trust = max(LEAST_TRUST, self._trust * LATE_FACTOR)
            if now < one.until:
                self._lines[_line(one.facts)].is_late(one)
                heappush(untils, (one.until, one.id))
                continue
            self._remove(one, served=False)
            views = self._fleet.views(now, one.facts, one.names)
            decision = _held(views, self._router.choose(one.facts, views, self._rng, pinned=one.pinned))
            line = self._lines[_line(one.facts)]
            out.append(
                (
                    one.id,
                    self._refuse(now, one, ShedReason.EXPIRED, decision, self._drain(now, one, line, views)),
                )
            )

    def _remove(self, one: Waiting, *, served: bool) -> None:
        del self._waiting[one.id]
        self._lines[_line(one.facts)].remove(one, served=served)

    # -- turning away

    def _refuse(
        self, now: float, one: Waiting, reason: ShedReason, decision: Decision, wait: float = 0.0
    ) -> Verdict:
        """A tier's last resort takes it, if there is one; else the answer is no."""
        facts = one.facts
        if facts.tier.last_resort:
            remotes = [name for name in one.names if self._fleet.states[name].member.remote]
            if remotes:
                verdict = self.again(now, one.id, facts, remotes, pinned=one.pinned)
                if isinstance(verdict, Go):
                    return verdict
        after = 0 if reason is ShedReason.NO_BACKEND else min(60, max(1, ceil(wait)))
        return Shed(reason, after, decision)


def _held(views: tuple[BackendView, ...], decision: Decision) -> Decision:
    """The same with nobody chosen: those that might serve it do not now."""
    dropped = {drop.backend for drop in decision.drops}
    held = [Drop(view.name, DropReason.HELD) for view in views if view.name not in dropped]
    return Decision(None, None, (*decision.drops, *held))


def _line(facts: RequestFacts) -> tuple[str, int]:
    return facts.tier.name, facts.priority
