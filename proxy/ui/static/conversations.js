// The working set: which conversations live where, by hash.
import { get } from "./api.js";
import { Table, card, el, gauge, kind, text } from "./dom.js";
import { count, percent, seconds } from "./words.js";

const KINDS = { running: "dot good", live: "dot warn", idle: "dot" };

export function view() {
  const backends = new Table(
    [
      { title: "Backend", head: true, fill: (cell, row) => text(cell, row.backend) },
      { title: "Live", n: true, fill: (cell, row) => text(cell, row.live) },
      { title: "Expected tokens", note: "of the budget", fill: (cell, row) =>
        gauge(cell, row.budget ? row.tokens / row.budget : null, `${count(row.tokens)} / ${count(row.budget)}`) },
      { title: "KV cache", note: "tokens", n: true, fill: (cell, row) => text(cell, count(row.kv_tokens)) },
      { title: "Share in use", note: "as learned", n: true, fill: (cell, row) => text(cell, percent(row.share)) },
      { title: "Busy", n: true, fill: (cell, row) => text(cell, percent(row.busy)) },
    ],
    { caption: "Working set by backend", empty: "no backends", key: (row) => row.backend },
  );
  const talks = new Table(
    [
      { title: "Conversation", head: true, fill: (cell, row) => text(cell, row.conversation) },
      { title: "Backend", fill: (cell, row) => text(cell, row.backend) },
      { title: "State", fill: (cell, row) => { text(cell, row.state); kind(cell, KINDS[row.state]); } },
      { title: "Turns", n: true, fill: (cell, row) => text(cell, row.turns) },
      { title: "Context", note: "tokens", n: true, fill: (cell, row) => text(cell, count(row.tokens)) },
      { title: "Counted", note: "tokens", n: true, fill: (cell, row) => text(cell, count(row.counted)) },
      { title: "Last turn", note: "ended before", n: true, fill: (cell, row) => text(cell, row.running ? "runs" : seconds(row.age_seconds)) },
      { title: "Waited for", note: "at most", n: true, fill: (cell, row) => text(cell, seconds(row.patience_seconds)) },
    ],
    { caption: "Conversations", empty: "no conversation yet", key: (row) => row.conversation },
  );
  const known = el("span", { class: "note" });
  return {
    title: "Conversations",
    every: 2,
    node: [
      card("Working set", null, backends.node,
        el("p", { class: "note" }, "A conversation counts with what it is expected to hold of the cache, times its chance to come back. "
          + "A new one is held back where the budget is spent.")),
      card("Latest conversations", known, talks.node),
    ],
    load: (signal) => get("conversations", {}, signal),
    show(data) {
      backends.update(data.backends);
      talks.update(data.talks);
      text(known, `${data.talks.length} of ${count(data.known)} that are remembered; hashes, never text`);
    },
  };
}
