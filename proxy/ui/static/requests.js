// The last requests, and what became of one of them.
import { get } from "./api.js";
import { Table, card, choose, el, kind, parts, select, text } from "./dom.js";
import { clock, count, outcome, seconds } from "./words.js";
import { explain } from "./explain.js";

const FILTERS = ["backend", "tier", "outcome", "model"];

export function view(page, [id, row] = []) {
  return id === undefined ? list(page) : explain(id, row);
}

function list(page) {
  const asked = JSON.parse(sessionStorage.getItem("tierline-requests") ?? "{}");
  const open = (one) => { location.hash = `requests/${encodeURIComponent(one.request_id)}/${one.row}`; };
  const fields = Object.fromEntries(FILTERS.map((name) => [name, select(name, [["", "all"]], "", (value) => {
    asked[name] = value;
    sessionStorage.setItem("tierline-requests", JSON.stringify(asked));
    page.refresh();
  })]));
  const table = new Table(
    [
      { title: "Time", fill: (cell, one) => text(cell, clock(one.time)) },
      { title: "Request", head: true, fill: (cell, one) => {
        const p = parts(cell, () => ({ id: el("span", { class: "cut" }) }));
        text(p.id, one.request_id);
        p.id.title = one.request_id;
      } },
      { title: "Model", fill: (cell, one) => {
        const p = parts(cell, () => ({ name: el("span", { class: "cut" }) }));
        text(p.name, one.model);
      } },
      { title: "Tier", fill: (cell, one) => text(cell, one.tier ?? one.tier_asked) },
      { title: "Backend", fill: (cell, one) => text(cell, one.backend) },
      { title: "Why", fill: (cell, one) => text(cell, one.limit ?? one.reason) },
      { title: "Outcome", fill: (cell, one) => {
        text(cell, one.outcome === "ok" ? "ok" : one.error && one.error !== one.outcome ? `${one.outcome}: ${one.error}` : one.outcome);
        kind(cell, `dot ${outcome(one.outcome)}`);
      } },
      { title: "Tries", n: true, fill: (cell, one) => { text(cell, one.attempts); kind(cell, one.attempts > 1 ? "n warn" : "n"); } },
      { title: "Prompt", note: "cached", n: true, fill: (cell, one) => {
        const p = parts(cell, () => ({ all: el("span"), cached: el("small") }));
        text(p.all, count(one.prompt_tokens ?? one.prompt_tokens_estimate));
        text(p.cached, ` ${count(one.cached_tokens)}`);
      } },
      { title: "Answer", note: "tokens", n: true, fill: (cell, one) => text(cell, count(one.completion_tokens)) },
      { title: "Queue", n: true, fill: (cell, one) => text(cell, seconds(one.queue_wait_seconds)) },
      { title: "First token", n: true, fill: (cell, one) => text(cell, seconds(one.ttft_seconds)) },
      { title: "Per token", n: true, fill: (cell, one) => text(cell, seconds(one.tpot_seconds)) },
      { title: "All", n: true, fill: (cell, one) => text(cell, seconds(one.e2e_seconds)) },
    ],
    { caption: "Last requests", empty: "no such request", key: (one) => one.row, open },
  );
  const note = el("p", { class: "note" }, "A row opens by click or Enter and says why the request went where it went.");
  return {
    title: "Requests",
    every: 2,
    node: [card("Last requests", el("div", { class: "bar" }, FILTERS.map((name) => fields[name])), note, table.node)],
    load: (signal) => get("requests", { limit: 100, ...asked }, signal),
    show(data) {
      for (const name of FILTERS) {
        const found = [["", "all"], ...(name === "outcome" ? [["failed", "all failures"]] : []),
          ...[...new Set([...data.choices[name], ...(asked[name] && asked[name] !== "failed" ? [asked[name]] : [])])].sort().map((one) => [one, one])];
        choose(fields[name].field, found, asked[name] ?? "");
      }
      table.update(data.requests);
    },
    problem: (error) => text(note, `${error.message}.`),
  };
}
