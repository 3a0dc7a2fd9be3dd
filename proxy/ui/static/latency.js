// Percentiles over time, from the records.
import uPlot from "./vendor/uPlot.js";
import { get } from "./api.js";
import { card, el, select, text } from "./dom.js";
import { count, seconds } from "./words.js";

const LIGHT = ["#2460a7", "#c2571a", "#2b8a57", "#a02c74", "#6a4bb0", "#8a6d1d", "#3f6f75", "#b3261e"];
const DARK = ["#7ab2ee", "#f0985c", "#6fcf9a", "#e58abf", "#b39be8", "#dcc06a", "#86bfc6", "#f0857c"];
const SHARES = ["p50", "p95", "p99"];
const CHARTS = [
  { id: "ttft", title: "Time to the first token", words: seconds },
  { id: "gap", title: "Gap between chunks", words: seconds },
  { id: "tpot", title: "Time per output token", words: seconds },
  { id: "count", title: "Requests a minute", words: count },
  { id: "failed", title: "Failed or turned away a minute", words: count },
  { id: "tokens", title: "Output tokens a second", words: count },
];

export function view(page) {
  const kept = JSON.parse(sessionStorage.getItem("tierline-latency") ?? "{}");
  const asked = { window: kept.window ?? "10m", by: kept.by ?? "none", share: kept.share ?? "p95" };
  const charts = CHARTS.map((chart) => new Chart(chart, page));
  const share = select("Percentile", SHARES.map((one) => [one, one]), asked.share, (value) => change({ share: value }));
  const note = el("span", { class: "note" });
  let last = null;

  function change(what) {
    Object.assign(asked, what);
    sessionStorage.setItem("tierline-latency", JSON.stringify(asked));
    share.hidden = asked.by === "none";
    if (what.share && last) draw(last);
    else page.refresh();
  }
  function draw(data) {
    last = data;
    for (const chart of charts) chart.draw(data, asked);
  }
  const observer = new ResizeObserver(() => charts.forEach((chart) => chart.resize()));
  const grid = el("div", { class: "charts" }, charts.map((chart) => chart.node));
  observer.observe(grid);
  share.hidden = asked.by === "none";

  return {
    title: "Latency",
    every: 10,
    node: [
      el("section", { class: "card", "aria-label": "What is shown" }, el("div", { class: "head bar" },
        select("Window", [["10m", "10 minutes"], ["1h", "1 hour"], ["24h", "24 hours"]], asked.window, (value) => change({ window: value })),
        select("By", [["none", "all together"], ["backend", "backend"], ["tier", "tier"]], asked.by, (value) => change({ by: value })),
        share, note)),
      grid,
    ],
    load: (signal) => get("latency", { window: asked.window, by: asked.by }, signal),
    show(data) {
      text(note, [data.cut ? "More than 200,000 records: the latest of them are shown." : "",
        data.every > 1 ? `Percentiles are of one record in ${data.every}.` : ""].join(" ").trim());
      draw(data);
    },
    problem: (error) => text(note, `${error.message}.`),
    restyle: () => last && charts.forEach((chart) => chart.forget()) === undefined && draw(last),
    leave: () => { observer.disconnect(); charts.forEach((chart) => chart.forget()); },
  };
}

class Chart {
  constructor({ id, title, words }, page) {
    Object.assign(this, { id, words, page, plot: null, shape: "" });
    this.place = el("div", { class: "plot", role: "img", "aria-label": title });
    this.legend = el("div", { class: "legend" });
    this.node = card(title, null, this.legend, this.place);
    this.node.dataset.chart = id;
  }

  // Names and values of the curves: a curve is an array as long as there are steps.
  curves(data, { by, share }) {
    const out = [];
    const place = (name, label, found, key, factor) => {
      const values = new Array(data.steps).fill(this.id === "count" || this.id === "failed" || this.id === "tokens" ? 0 : null);
      found.step.forEach((at, index) => { if (at < data.steps) values[at] = found[key][index] * factor; });
      out.push({ name: label, values });
    };
    for (const name of data.names) {
      const label = by === "none" ? null : name;
      if (this.id === "count" || this.id === "failed") place(name, label ?? (this.id === "count" ? "requests" : "failed"), data.requests[name], this.id, 60 / data.step);
      else if (this.id === "tokens") place(name, label ?? "tokens", data.requests[name], "tokens", 1 / data.step);
      else if (by === "none") for (const one of SHARES) place(name, one, data[this.id][name], one, 1);
      else place(name, label, data[this.id][name], share, 1);
    }
    return out;
  }

  draw(data, asked) {
    const curves = this.curves(data, asked);
    const x = Array.from({ length: data.steps }, (_, step) => data.start + step * data.step);
    const shape = JSON.stringify([curves.map((curve) => curve.name), asked.window]);
    const values = [x, ...curves.map((curve) => curve.values)];
    this.node.dataset.points = values.slice(1).reduce((all, line) => all + line.filter((value) => value !== null && value !== 0).length, 0);
    if (this.plot && this.shape === shape) this.plot.setData(values);
    else this.make(curves, values, shape);
    this.tell(null);
  }

  make(curves, values, shape) {
    this.forget();
    this.shape = shape;
    const dark = this.page.dark();
    const style = getComputedStyle(document.documentElement);
    const [soft, line] = [style.getPropertyValue("--soft").trim(), style.getPropertyValue("--line").trim()];
    const axis = { stroke: soft, font: "11px system-ui, sans-serif", grid: { stroke: line, width: 1 }, ticks: { show: false } };
    this.colours = curves.map((_, index) => (dark ? DARK : LIGHT)[index % LIGHT.length]);
    this.items = curves.map((curve, index) => {
      const mark = el("i");
      mark.style.background = this.colours[index];
      const value = el("span");
      return { node: el("span", {}, mark, `${curve.name} `, value), value };
    });
    this.legend.replaceChildren(...this.items.map((item) => item.node));
    const points = { show: (u, index) => u.data[index].filter((value) => value !== null).length < 40, size: 4 };
    this.plot = new uPlot({
      width: Math.max(200, this.place.clientWidth - 12),
      height: 204,
      legend: { show: false },
      cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false } },
      scales: { y: { range: (u, low, high) => [0, high > 0 ? high * 1.08 : 1] } },
      axes: [
        { ...axis, size: 26, space: 70, values: (u, ticks) => ticks.map((at) => new Date(at * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false })) },
        { ...axis, size: 58, space: 34, values: (u, ticks) => ticks.map((value) => (value === 0 ? "0" : this.words(value))) },
      ],
      series: [{}, ...curves.map((curve, index) => ({
        label: curve.name, stroke: this.colours[index], width: 1.5, points, spanGaps: false,
      }))],
      hooks: { setCursor: [(u) => this.tell(u.cursor.idx)] },
    }, values, this.place);
  }

  // The legend shows the values under the cursor, else the last ones there are.
  tell(index) {
    if (!this.plot) return;
    this.items.forEach((item, number) => {
      const line = this.plot.data[number + 1];
      const at = index ?? line.findLastIndex((value) => value !== null);
      text(item.value, this.words(line[at]));
    });
  }

  resize() {
    const width = this.place.clientWidth - 12;
    if (this.plot && width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: 204 });
  }

  forget() {
    this.plot?.destroy();
    this.plot = null;
  }
}
