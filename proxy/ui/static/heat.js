// Concurrency × context of one backend: measured beside its profile.
import { get } from "./api.js";
import { card, choose, el, select, text } from "./dom.js";
import { count, seconds, times } from "./words.js";

const STEPS = [0.5, 0.7, 0.85, 0.95, 1.05, 1.2, 1.5, 2];

export function view(page) {
  const asked = { backend: sessionStorage.getItem("tierline-heat") ?? "", what: "rate" };
  const place = el("div", { class: "scroll" });
  const note = el("p", { class: "note" });
  const backend = select("Backend", [["", "…"]], "", (value) => {
    asked.backend = value;
    sessionStorage.setItem("tierline-heat", value);
    page.refresh();
  });
  const what = select("Shown", [["rate", "tokens a second of a stream"], ["ttft", "time to the first token"]], "rate", (value) => {
    asked.what = value;
    if (last) draw(last);
  });
  let last = null;
  let table = null;

  function draw(data) {
    last = data;
    if (table?.dataset.backend !== data.backend) place.replaceChildren((table = grid(data)));
    const found = new Map(data.cells.map((cell) => [`${cell.concurrency} ${cell.context}`, cell]));
    for (const cell of table.querySelectorAll("td")) fill(cell, found.get(cell.dataset.cell), asked.what);
    text(note, data.profile
      ? `Last 24 hours, against ${data.profile}. In each cell what was measured, what the profile says of the same streams, and the ratio. `
        + "Blue is better than the profile, red is worse."
      : `Last 24 hours. ${data.backend} has no profile to compare with; tierline bench makes one.`);
  }

  return {
    title: "Heat map",
    every: 10,
    node: [card("Measured against the profile", el("div", { class: "bar" }, backend, what, scale()), note, place)],
    load: (signal) => get("heat", { backend: asked.backend }, signal),
    show(data) {
      choose(backend.field, data.backends.map((one) => [one, one]), data.backend);
      draw(data);
    },
    problem: (error) => {
      text(note, `${error.message}.`);
      if (error.status === 400) { sessionStorage.removeItem("tierline-heat"); asked.backend = ""; }
    },
    restyle: () => last && draw(last),
  };
}

const range = (bounds, index, words) => {
  const from = index ? bounds[index - 1] : 0;
  return index && bounds[index] - from === 1 ? words(bounds[index]) : index ? `${words(from)} – ${words(bounds[index])}` : `up to ${words(bounds[index])}`;
};
const short = (tokens) => (tokens < 1024 ? String(tokens) : `${tokens / 1024}k`);

function grid(data) {
  const table = el("table", { class: "heat", "aria-label": "Concurrency by context" },
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "context \\ streams"),
      data.concurrency.map((_, x) => el("th", { scope: "col" }, x ? range(data.concurrency.map((n, i) => (i ? n : 1)), x, String).replace(/^(\d+) – /, (all, n) => `${Number(n) + 1} – `) : "1")))),
    el("tbody", {}, data.context.map((_, y) => el("tr", {}, el("th", { scope: "row" }, range(data.context, y, short)),
      data.concurrency.map((__, x) => el("td", { "data-cell": `${x} ${y}` }))))));
  table.dataset.backend = data.backend;
  return table;
}

function fill(cell, found, what) {
  const value = found && (what === "rate" ? found.rate : found.ttft);
  if (value === null || value === undefined) {
    cell.replaceChildren();
    cell.style.background = "";
    cell.title = "";
    return;
  }
  const profile = what === "rate" ? found.profile_rate : found.profile_ttft;
  const ratio = profile ? value / profile : null;
  const words = what === "rate" ? (one) => `${one.toFixed(one < 10 ? 1 : 0)}/s` : seconds;
  cell.replaceChildren(words(value), el("small", {}, profile ? `${words(profile)} · ${times(ratio)}` : ""), el("small", {}, `${count(found.requests)} req`));
  cell.style.background = ratio ? colour(what === "rate" ? ratio : 1 / ratio) : "";
  cell.title = `${count(found.requests)} requests; on average ${found.mean_streams.toFixed(1)} streams of ${count(found.mean_context)} tokens`;
}

// Above 1 is better.
function colour(good) {
  const distance = Math.min(1, Math.abs(Math.log2(good)));
  const name = good >= 1 ? "--heat-fast" : "--heat-slow";
  return distance < 0.07 ? "transparent" : `rgb(var(${name}) / ${(0.1 + distance * 0.5).toFixed(2)})`;
}

function scale() {
  return el("span", { class: "scale", "aria-hidden": "true" }, "half", STEPS.map((step) => {
    const one = el("i");
    one.style.background = colour(step);
    return one;
  }), "twice");
}
