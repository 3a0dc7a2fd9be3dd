// What is used of each limit.
import { get } from "./api.js";
import { Table, card, el, gauge, text } from "./dom.js";
import { count, seconds } from "./words.js";

const WORDS = {
  requests_per_minute: "requests a minute", tokens_per_minute: "tokens a minute", concurrent_requests: "requests at once",
  tokens_per_day: "tokens a day", tokens_per_month: "tokens a month", cost_per_day: "cost a day", cost_per_month: "cost a month",
};

export function view() {
  const table = new Table(
    [
      { title: "Of", head: true, fill: (cell, row) => text(cell, `${row.scope} ${row.name}`) },
      { title: "Limit", fill: (cell, row) => text(cell, WORDS[row.limit] ?? row.limit) },
      { title: "Used", fill: (cell, row) => gauge(cell, row.used / row.of, `${count(row.used)} / ${count(row.of)}`, 1, 0.8) },
      { title: "All of it again in", n: true, fill: (cell, row) => text(cell, row.renewed_seconds === 0 ? "now" : seconds(row.renewed_seconds)) },
    ],
    { caption: "Limits", empty: "Nothing is limited, or nobody who is has asked yet.", key: (row) => `${row.scope} ${row.name} ${row.limit}` },
  );
  const note = el("p", { class: "note" });
  return {
    title: "Limits",
    every: 2,
    node: [card("Limits and budgets", null, table.node, note)],
    load: (signal) => get("limits", {}, signal),
    show(data) {
      table.update(data.limits);
      text(note, data.shared ? "Limits are kept by a server that several gateways share; ask it, or tierline keys list." : "");
    },
  };
}
