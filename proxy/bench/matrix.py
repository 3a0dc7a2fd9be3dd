"""The whole matrix, and the profile that it makes.

Rules: cells that cannot fit the window or the KV cache are left out, and said. A cell that fails is left out, too,
and the rest goes on. What no request can measure (quality, seats, the prefill chunk) is taken from the profile that
the server is said to be like, or is what vLLM does by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import fmean

from policies.measured import LatencyRow, Measured, Quality, SpecKind, Speculation
from policies.profile import Profile
from proxy.bench.cells import SHORT, Cell, Engine, cold, warm
from proxy.bench.stream import Client, Failed
from proxy.bench.text import Texts
from proxy.probe import models_of

CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (0, 16384, 32768, 65536, 131072)
PROMPTS = (8192, 16384, 32768, 65536, 131072)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. tokens: of each stream, counted. rounds: of each point; medians are kept."""

    concurrency: tuple[int, ...] = CONCURRENCY
    contexts: tuple[int, ...] = CONTEXTS
    prompts: tuple[int, ...] = PROMPTS
    tokens: int = 400
    rounds: int = 3

    @property
    def points(self) -> int:
        return len(self.concurrency) * len(self.contexts) + len(self.prompts)


@dataclass(slots=True)
class Found:
    """What came of it. prefill: (prompt tokens, seconds). notes: what was not measured, and why."""

    window: int | None = None
    kv_tokens: int | None = None
    cells: list[Cell] = field(default_factory=list)
    prefill: list[tuple[int, float]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Enough for a profile."""
        return bool(self.cells and self.prefill)


Told = Callable[[str, int], None]
"""(what was found, points that are left)."""


async def run(client: Client, plan: Plan, seed: int | str, told: Told = lambda text, left: None) -> Found:
    """Raises `Failed` where the server answers nothing at all, `Unreachable` where it is not there."""
    found, engine, texts = Found(), Engine(client), Texts(seed)
    await client.settle()
    await texts.learn(client)
    numbers = await engine.numbers()
    found.kv_tokens = numbers.kv_tokens
    listed = models_of((await client.asker.ask("GET", "/v1/models")).body)
    found.window = listed.get(client.model) or (
        next(iter(listed.values()), None) if len(listed) == 1 else None
    )
    found.notes += _untold(client, engine, texts, found)
    left = plan.points
    for context in sorted(plan.contexts):
        for streams in sorted(plan.concurrency):
            left -= 1
            name = f"decode, {streams} x {context} tokens"
            if why := _too_large(found, context, streams, plan.tokens):
                found.notes.append(f"{name}: left out: {why}")
                continue
            try:
                cell = await warm(client, engine, texts, streams, context, plan.tokens, plan.rounds)
            except Failed as error:
                found.notes.append(f"{name}: {error}")
                told(f"{name}: {error}", left)
                continue
            found.cells.append(cell)
            told(f"{name}: {cell.rate:.1f} tokens/s, first token warm {cell.ttft * 1e3:.0f} ms", left)
    for tokens in sorted(plan.prompts):
        left -= 1
        name = f"prefill, {tokens} tokens"
        if why := _too_large(found, tokens, 1, 1):
            found.notes.append(f"{name}: left out: {why}")
            continue
        try:
            row = await cold(client, engine, texts, tokens, plan.rounds)
        except Failed as error:
            found.notes.append(f"{name}: {error}")
            told(f"{name}: {error}", left)
            continue
        found.prefill.append(row)
        told(f"{name}: first token cold {row[1]:.2f} s", left)
    return found


def _untold(client: Client, engine: Engine, texts: Texts, found: Found) -> Iterator[str]:
    if client.counts == "usage":
        yield "usage comes at an answer's end only: a delta counts for the mean of its answer"
    elif client.counts == "deltas":
        yield "no usage is reported: a delta is counted as one token, which is wrong where it speculates"
    if not texts.known:
        yield "prompts are not counted by the server: their lengths are guesses"
    if "ignore_eos" in client.without:
        yield "it knows no ignore_eos: answers that end early leave cells out"
    if not engine.speaks:
        yield "it has no engine metrics: acceptance, KV cache and whether it is idle are not known"
    if found.window is None:
        yield "the window is not reported"
    if found.kv_tokens is None:
        yield "the KV cache is not reported: the profile says what the cells have shown to fit"


def _too_large(found: Found, context: int, streams: int, tokens: int) -> str:
    """Why a cell cannot be measured; streams share their prompt. Empty: it can."""
    alone = max(context, SHORT) + 3 * tokens + 200
    if found.window is not None and alone > found.window:
        return f"the window has {found.window} tokens"
    if found.kv_tokens is not None and context + streams * (3 * tokens + 200) > found.kv_tokens:
        return f"the KV cache has {found.kv_tokens} tokens"
    return ""


def measured(found: Found, name: str, source: str, like: Profile | None) -> Measured:
    """The profile. like: whom the server is said to be, for what cannot be measured. found: `whole`."""
    known = like.measured if like is not None else None
    most = max(cell.context + cell.streams for cell in found.cells)
    window = found.window or (like.window_tokens if like is not None else most)
    return Measured(
        name=name,
        title=source,
        quality=known.quality if known is not None else Quality(method="not measured"),
        weights=known.weights if known is not None else "unknown",
        image=known.image if known is not None else "",
        tensor_parallel=known.tensor_parallel if known is not None else None,
        speculation=_speculation(found, like),
        window_tokens=window,
        kv_tokens=found.kv_tokens or (like.kv_tokens if like is not None else max(window, most)),
        max_num_seqs=known.max_num_seqs if known is not None else 128,
        batched_tokens=known.batched_tokens if known is not None else 8192,
        decode=tuple((cell.streams, cell.context, _short(cell.rate)) for cell in found.cells),
        decode_source=source,
        latency=tuple(_latency(cell) for cell in found.cells),
        latency_source=source,
        prefill=tuple(sorted({tokens: _short(seconds) for tokens, seconds in found.prefill}.items())),
        prefill_source=source,
        limits=known.limits if known is not None else (),
        disqualified=known.disqualified if known is not None else False,
    )


def _latency(cell: Cell) -> LatencyRow:
    accepted = None if cell.acceptance is None else _short(cell.acceptance)
    ttft, worst, tpot = (_short(value * 1e3) for value in (cell.ttft, cell.worst, cell.tpot))
    return cell.streams, cell.context, ttft, worst, tpot, accepted


def _speculation(found: Found, like: Profile | None) -> Speculation:
    """As the engine's own counters say; where it has none, as the other profile."""
    drafts = [cell.draft_tokens for cell in found.cells if cell.draft_tokens is not None]
    if not drafts:
        return like.measured.speculation if like is not None else Speculation()
    if fmean(drafts) < 0.5:
        return Speculation()
    points = []
    for context in sorted({cell.context for cell in found.cells}):
        shares = [c.acceptance for c in found.cells if c.context == context and c.acceptance is not None]
        if shares:
            points.append((context, _short(fmean(shares))))
    kind = like.measured.speculation.kind if like is not None else SpecKind.OTHER
    kind = SpecKind.OTHER if kind is SpecKind.NONE else kind
    return Speculation(kind, round(fmean(drafts)), tuple(points))


def _short(value: float) -> float:
    """Five digits say all that was measured."""
    return float(f"{value:.5g}")
