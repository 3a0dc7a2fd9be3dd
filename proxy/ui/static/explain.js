// One request: what was decided from what, what was forecast, what happened.
import { get } from "./api.js";
import { card, el, kind, text } from "./dom.js";
import { clock, count, outcome, seconds } from "./words.js";

const PHASES = [
  ["reading the body", "--faint"], ["waiting in the queue", "--warn"], ["earlier attempts, preparing", "--bad"],
  ["until the first token", "--accent"], ["the answer", "--good"],
];

export function explain(id, row) {
  const place = el("div", {});
  let drawn = "";
  return {
    title: `Request ${id}`,
    every: 0,
    node: [el("p", { class: "bar" }, el("a", { href: "#requests" }, "← Requests"), el("span", { class: "note" }, "Esc goes back")), place],
    load: (signal) => get("explain", { request_id: id, row }, signal),
    show(data) {
      const now = JSON.stringify(data);
      if (now === drawn) return;
      drawn = now;
      place.replaceChildren(...made(id, data));
      document.querySelector("main").focus({ preventScroll: true });
    },
    problem: (error) => place.replaceChildren(el("p", { class: "card empty" }, error.message)),
    escape: () => { location.hash = "requests"; },
  };
}

function made(id, { story, record, records }) {
  return [
    record ? head(id, record) : el("p", { class: "card empty" }, `No record: ${records ?? "it is not written yet, or is gone"}.`),
    record ? beside(record) : null,
    ...(story ? story.attempts.map((attempt, number) => decision(attempt, number, story)) : [
      el("p", { class: "card empty" }, "The decision is not known any more: the last 256 are remembered, older ones if telemetry.decisions is on."),
    ]),
    record ? card("The record", null, el("details", { class: "body" }, el("summary", {}, "as JSON"), el("pre", {}, JSON.stringify(record, null, 1)))) : null,
  ].filter(Boolean);
}

const fact = (name, value, how) => {
  const dd = el("dd", how ? { class: how } : {});
  text(dd, value);
  return el("div", {}, el("dt", {}, name), dd);
};

function head(id, r) {
  const failures = (r.failures ?? []).map((one) => `${one.backend}: ${one.failure}`).join(", ");
  return card(`Request ${id}`, null, el("dl", { class: "facts body" },
    fact("came", `${new Date(r.time).toLocaleDateString()} ${clock(r.time)}`),
    fact("outcome", r.error && r.error !== r.outcome ? `${r.outcome}: ${r.error}` : r.outcome, outcome(r.outcome)),
    fact("status", r.status), fact("model", r.target && r.target !== r.model ? `${r.model} → ${r.target}` : r.model),
    fact("tier", r.tier_asked === r.tier ? r.tier : `${r.tier_asked} → ${r.tier}`),
    fact("backend", r.backend), fact("why", r.limit ?? r.reason),
    fact("attempts", failures ? `${r.attempts}; ${failures}` : r.attempts, failures ? "warn" : null),
    fact("tenant, key", r.key ? `${r.tenant}, ${r.key}` : null),
    fact("conversation", r.conversation), fact("finish", r.finish_reason), fact("endpoint", r.path),
    r.hedge ? fact("hedge", `${r.hedge.outcome} ${r.hedge.backend ?? ""}`) : null,
    r.continuation ? fact("continuation", r.continuation.ending) : null,
  ), el("div", { class: "body" }, timeline(r)));
}

// The time from accept to the end, in phases.
function timeline(r) {
  const all = r.e2e_seconds || 0;
  const marks = [r.body_read_seconds, r.queue_wait_seconds, r.dispatch_seconds, r.ttft_seconds, all];
  const bar = el("div", { class: "time", role: "img", "aria-label": "Phases of the request" });
  const words = [];
  let from = 0;
  marks.forEach((mark, index) => {
    if (mark === null || mark === undefined || mark < from) return;
    const [name, colour] = PHASES[index];
    const piece = el("i", { title: `${name}: ${seconds(mark - from)}` });
    piece.style.left = `${all ? (from / all) * 100 : 0}%`;
    piece.style.width = `${all ? ((mark - from) / all) * 100 : 0}%`;
    piece.style.background = `var(${colour})`;
    bar.append(piece);
    const dot = el("i");
    dot.style.background = `var(${colour})`;
    words.push(el("span", {}, dot, `${index === 4 && r.ttft_seconds === null ? "until the end" : name} ${seconds(mark - from)}`));
    from = mark;
  });
  return el("div", {}, el("h3", {}, `${seconds(all)} from accept to the end`), bar, el("div", { class: "legend" }, words));
}

// What was forecast, beside what came.
function beside(r) {
  const first = r.ttft_seconds === null ? null : r.ttft_seconds - (r.queue_wait_seconds ?? 0);
  const rows = [
    ["wait in the queue", r.predicted_wait_seconds, r.queue_wait_seconds, seconds],
    ["first token, from being let in", r.predicted_ttft_seconds, first, seconds],
    ["per output token", r.predicted_tpot_seconds, r.tpot_seconds, seconds],
    ["prompt tokens", r.prompt_tokens_estimate, r.prompt_tokens, count],
    ["of them cached", r.cached_tokens_estimate, r.cached_tokens, count],
    ["gap between chunks: median, longest", null, r.chunk_gap_p50_seconds === null ? null : `${seconds(r.chunk_gap_p50_seconds)}, ${seconds(r.chunk_gap_max_seconds)}`, String],
    ["added by the gateway", null, r.overhead_seconds, seconds],
  ];
  return card("Forecast and outcome", null, el("div", { class: "scroll" }, el("table", { "aria-label": "Forecast and outcome" },
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, ""), ...["forecast", "came", "came ÷ forecast"].map((one) => el("th", { scope: "col", class: "n" }, one)))),
    el("tbody", {}, rows.map(([name, forecast, came, words]) => el("tr", {},
      el("th", { scope: "row" }, name),
      el("td", { class: "n" }, forecast === null || forecast === undefined ? "–" : words(forecast)),
      el("td", { class: "n" }, came === null || came === undefined ? "–" : words(came)),
      el("td", { class: "n" }, forecast > 0 && typeof came === "number" ? `×${(came / forecast).toFixed(2)}` : "–")))))));
}

function decision(attempt, number, story) {
  const names = [...new Set(attempt.backends.flatMap((one) => Object.keys(one.terms ?? {})))];
  const title = `Attempt ${number + 1}: ${attempt.backend ?? "no backend"}${attempt.reason ? `, ${attempt.reason}` : ""}`;
  const scored = names.length > 0;
  const heads = ["Backend", scored ? `Score, ${attempt.unit}` : "Score", ...names, "Cached", "In flight", "First token", "Per token"];
  return card(title, el("span", { class: "note" }, `tier ${attempt.tier}, about ${count(attempt.prompt_tokens)} prompt tokens, at least ${count(attempt.prompt_tokens_low)}; policy ${story.policy}`),
    el("div", { class: "scroll" }, el("table", { "aria-label": title },
      el("thead", {}, el("tr", {}, heads.map((one, index) => el("th", { scope: "col", class: index ? "n" : null }, one)))),
      el("tbody", {}, attempt.backends.map((one) => {
        const row = el("tr", {},
          el("th", { scope: "row" }, one.backend),
          one.dropped
            ? el("td", { class: "n warn", colspan: 1 + names.length }, `left out: ${one.dropped}`)
            : [el("td", { class: "n" }, one.total ?? "–"), names.map((name) => el("td", { class: "n" }, String(one.terms?.[name] ?? "–")))],
          el("td", { class: "n" }, count(one.cached_tokens)), el("td", { class: "n" }, String(one.in_flight)),
          el("td", { class: "n" }, seconds(one.predicted_ttft_seconds)), el("td", { class: "n" }, seconds(one.predicted_tpot_seconds)));
        kind(row, one.backend === attempt.backend ? "chosen" : "");
        return row;
      })))));
}
