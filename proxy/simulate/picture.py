"""Results as one HTML file that needs nothing else: curves drawn as SVG.

Rules: no script, no font, no address. A source at several loads gets a curve over load for each figure, at a single
load a curve over time. Colours differ in lightness, too; every curve is named beside its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite, log10

from policies.simulation import Outcome

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 118, 14, 34
COLOURS = ("#0b6e99", "#d9730d", "#4d6461", "#ad1a72", "#6940a5", "#0f7b6c", "#937264", "#e03e3e")

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    x: str
    y: str
    curves: tuple[tuple[str, tuple[Point, ...]], ...]
    log: bool = False


def page(outcomes: Sequence[Outcome], title: str) -> str:
    """The whole file."""
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>",
    ]
    for source in dict.fromkeys(o.source for o in outcomes):
        mine = [o for o in outcomes if o.source == source]
        parts.append(f"<h2>{escape(source)}</h2><div>")
        parts += [svg(chart) for chart in charts(mine)]
        parts.append("</div>")
    parts.append("</body></html>")
    return "\n".join(parts)


def charts(outcomes: Sequence[Outcome]) -> list[Chart]:
    """Of one source."""
    if len({o.rate for o in outcomes}) > 1:
        return [
            _over_load("goodput", "met ÷ offered", outcomes, lambda o: o.score.goodput),
            _over_load("met per second", "1/s", outcomes, lambda o: o.score.met_per_second),
            _over_load("TTFT, 95th percentile", "s", outcomes, lambda o: o.score.ttft95, log=True),
            _over_load("prompt tokens from the cache", "share", outcomes, lambda o: o.score.cached),
        ]
    return [
        Chart(
            "goodput over time",
            "s",
            "met ÷ offered",
            tuple((o.policy, tuple((at, met / n) for at, n, met, _ in o.steps if n)) for o in outcomes),
        ),
        Chart(
            "TTFT over time, 95th percentile",
            "s",
            "s",
            tuple((o.policy, tuple((at, ttft) for at, _, _, ttft in o.steps)) for o in outcomes),
            log=True,
        ),
    ]


def _over_load(
    title: str, y: str, outcomes: Sequence[Outcome], figure: Callable[[Outcome], float], log: bool = False
) -> Chart:
    by_load = all(o.load is not None for o in outcomes)
    curves: dict[str, list[Point]] = {}
    for o in sorted(outcomes, key=lambda o: o.rate):
        curves.setdefault(o.policy, []).append(((o.load or 0) * 100 if by_load else o.rate, figure(o)))
    return Chart(
        title,
        "% of capacity" if by_load else "requests/s",
        y,
        tuple((name, tuple(points)) for name, points in curves.items()),
        log,
    )


def svg(chart: Chart) -> str:
    """One chart."""
    points = [p for _, curve in chart.curves for p in curve if _drawable(p, chart.log)]
    if not points:
        return ""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_low, x_high = min(0.0, *xs), max(xs) or 1.0
    if chart.log:
        y_low, y_high = 10 ** (_floor(log10(min(ys)))), 10 ** (_floor(log10(max(ys))) + 1)
    else:
        y_low, y_high = 0.0, max(ys) * 1.05 or 1.0

    def place(x: float, y: float) -> Point:
        across = (x - x_low) / (x_high - x_low)
        up = (
            (log10(y) - log10(y_low)) / (log10(y_high) - log10(y_low))
            if chart.log
            else (y - y_low) / (y_high - y_low)
        )
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    out = [
        f"<figure><figcaption>{escape(chart.title)}</figcaption>"
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}' role='img'>"
    ]
    for y in _decades(y_low, y_high) if chart.log else _ticks(y_low, y_high):
        _, v = place(x_low, y)
        out.append(f"<line class='grid' x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{v:.1f}' y2='{v:.1f}'/>")
        out.append(f"<text x='{LEFT - 6}' y='{v + 4:.1f}' text-anchor='end'>{y:g}</text>")
    for x in _ticks(x_low, x_high):
        h, _ = place(x, y_low)
        out.append(f"<text x='{h:.1f}' y='{HEIGHT - BOTTOM + 16}' text-anchor='middle'>{x:g}</text>")
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    out.append(f"<text x='{middle}' y='{HEIGHT - 3}' text-anchor='middle'>{escape(chart.x)}</text>")
    out.append(f"<text x='4' y='{TOP - 2}'>{escape(chart.y)}</text>")
    out += _curves(chart, place)
    out.append("</svg></figure>")
    return "".join(out)


def _curves(chart: Chart, place: Callable[[float, float], Point]) -> Iterable[str]:
    taken: list[float] = []
    for number, (name, curve) in enumerate(chart.curves):
        drawn = [place(*point) for point in curve if _drawable(point, chart.log)]
        if not drawn:
            continue
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{h:.1f},{v:.1f}" for h, v in drawn)
        yield f"<polyline points='{path}' stroke='{colour}'/>"
        if len(drawn) < 15:
            yield from (f"<circle cx='{h:.1f}' cy='{v:.1f}' r='2.5' fill='{colour}'/>" for h, v in drawn)
        v = _free(drawn[-1][1], taken)
        taken.append(v)
        yield f"<text x='{WIDTH - RIGHT + 6}' y='{v + 4:.1f}' fill='{colour}'>{escape(name)}</text>"


def _free(wanted: float, taken: Sequence[float]) -> float:
    """The nearest height at which no other name stands."""
    for away in range(0, HEIGHT, 2):
        for v in (wanted - away, wanted + away):
            if TOP <= v <= HEIGHT - BOTTOM and all(abs(v - other) >= 12 for other in taken):
                return v
    return wanted


def _drawable(point: Point, log: bool) -> bool:
    return isfinite(point[1]) and (point[1] > 0 or not log)


def _floor(value: float) -> int:
    return int(value // 1)


def _decades(low: float, high: float) -> list[float]:
    return [10.0**e for e in range(_floor(log10(low)), _floor(log10(high)) + 1)]


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers."""
    raw = (high - low) / 5
    size = 10 ** _floor(log10(raw))
    step = next(size * f for f in (1, 2, 5, 10) if size * f >= raw)
    first = -(-low // step)
    return [round((first + i) * step, 10) for i in range(int((high - first * step) / step) + 1)]


STYLE = (
    "body{font:15px system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}"
    "h2{margin:1.5em 0 .3em}div{display:flex;flex-wrap:wrap}figure{margin:0 1em 1em 0}"
    "figcaption{font-weight:600}svg text{font-size:11px}svg text:not([fill]){fill:#555}"
    "polyline{fill:none;stroke-width:1.8}.grid{stroke:#ddd}"
)
