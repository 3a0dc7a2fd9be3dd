// The backends as they are now, and what they did in the last minutes.
import { drain, get } from "./api.js";
import { Table, card, el, gauge, kind, parts, text } from "./dom.js";
import { count, percent, seconds } from "./words.js";

const STATES = { healthy: "good", draining: "warn", suspect: "warn", returning: "warn", leaving: "warn" };

export function view(page) {
  const numbers = {};
  const number = (name, words) => {
    numbers[name] = el("b", {}, "–");
    return el("div", {}, numbers[name], el("span", {}, words));
  };
  // Two lines: what is, and below it what belongs to it.
  const two = (cell, above, below, how = "") => {
    const p = parts(cell, () => ({ above: el("span"), below: el("small", { class: "below" }) }));
    text(p.above, above);
    text(p.below, below);
    kind(p.above, how);
  };
  const columns = [
    { title: "Backend", head: true, fill: (cell, row) => {
      two(cell, row.name, row.reference ? "reference" : row.remote ? "remote" : row.kl_bits === null ? "quality unknown" : `${row.kl_bits} bits`);
      cell.title = `${row.model ?? ""} ${row.url}`;
    } },
    { title: "State", fill: (cell, row) => {
      text(cell, row.state);
      kind(cell, `dot ${STATES[row.state] ?? "bad"}`);
    } },
    { title: "In flight", note: "engine: run + wait", fill: (cell, row) => {
      const p = parts(cell, () => ({ gauge: el("span"), below: el("small", { class: "below" }) }));
      gauge(p.gauge, row.in_flight / row.max_in_flight, `${row.in_flight} / ${row.max_in_flight}`);
      text(p.below, row.running === null ? "not polled" : `${row.running} + ${row.waiting ?? 0}`);
    } },
    { title: "KV cache", note: "live conversations", fill: (cell, row) => {
      const p = parts(cell, () => ({ gauge: el("span"), below: el("small", { class: "below" }) }));
      gauge(p.gauge, row.kv_usage, percent(row.kv_usage));
      text(p.below, count(row.live_conversations));
    } },
    { title: "Acceptance", note: "of drafts", n: true, fill: (cell, row) => {
      text(cell, row.speculation_acceptance < 0 ? null : percent(row.speculation_acceptance));
      kind(cell, row.speculation_collapsed ? "n bad" : "n");
    } },
    { title: "Cached", note: "of prompts", n: true, fill: (cell, row) => text(cell, percent(row.measured?.cached)) },
    { title: "First token", note: "predicted", n: true, fill: (cell, row) =>
      two(cell, seconds(row.measured?.ttft), seconds(row.measured?.predicted_ttft)) },
    { title: "p95", n: true, fill: (cell, row) => text(cell, seconds(row.measured?.ttft95)) },
    { title: "Per token", note: "predicted", n: true, fill: (cell, row) =>
      two(cell, seconds(row.measured?.tpot), seconds(row.measured?.predicted_tpot)) },
    { title: "Now", note: "first, per token", n: true, fill: (cell, row) =>
      two(cell, seconds(row.predicted_ttft_seconds), seconds(row.predicted_tpot_seconds)) },
    { title: "Tool calls", note: "sound", n: true, fill: (cell, row) => {
      text(cell, percent(row.tool_integrity));
      kind(cell, row.tool_integrity < 0.9 ? "n bad" : row.tool_integrity < 0.98 ? "n warn" : "n");
    } },
    { title: "Requests", note: "failed", n: true, fill: (cell, row) =>
      two(cell, count(row.measured?.requests), count(row.measured?.failed), "") },
    { title: "", fill: (cell, row) => {
      const p = parts(cell, () => ({ button: el("button", { type: "button" }) }));
      text(p.button, row.draining ? "Undrain" : "Drain");
      p.button.setAttribute("aria-label", `${row.draining ? "Undrain" : "Drain"} ${row.name}`);
      p.button.onclick = () => ask(row);
    } },
  ];
  const table = new Table(columns, { caption: "Backends", empty: "no backends", key: (row) => row.name });
  const waiting = new Table(
    [
      { title: "Tier", head: true, fill: (cell, row) => text(cell, row.tier) },
      { title: "Priority", n: true, fill: (cell, row) => text(cell, row.priority) },
      { title: "Waiting", n: true, fill: (cell, row) => text(cell, row.count) },
    ],
    { caption: "Requests that wait", empty: "nobody waits", key: (row) => `${row.tier} ${row.priority}` },
  );
  const note = el("p", { class: "note" });

  async function ask(row) {
    const on = !row.draining;
    const words = on
      ? `${row.name} gets no new requests; its ${row.in_flight} in flight go on to their end.`
      : `${row.name} gets requests again.`;
    if (!(await page.confirm(`${on ? "Drain" : "Undrain"} ${row.name}?`, words, on ? "Drain" : "Undrain"))) return;
    try {
      const done = await drain(row.name, on);
      page.toast(`${done.name}: ${done.state}, ${done.in_flight} in flight`);
    } catch (error) {
      page.toast(`${row.name}: ${error.message}`, true);
    }
    page.refresh();
  }

  return {
    title: "Fleet",
    every: 2,
    node: [
      el("div", { class: "numbers" }, number("healthy", "backends healthy"), number("flight", "in flight"),
        number("queue", "waiting in the gate"), number("talks", "live conversations"), number("rate", "requests a minute"),
        number("failed", "failed of them")),
      card("Backends", null, table.node, note),
      card("Queue", null, waiting.node),
    ],
    load: (signal) => get("fleet", {}, signal),
    show(data) {
      const sum = (of) => data.backends.reduce((all, row) => all + (of(row) || 0), 0);
      text(numbers.healthy, `${data.backends.filter((row) => row.state === "healthy").length} / ${data.backends.length}`);
      text(numbers.flight, sum((row) => row.in_flight));
      text(numbers.queue, data.waiting.reduce((all, row) => all + row.count, 0));
      text(numbers.talks, sum((row) => row.live_conversations));
      const asked = sum((row) => row.measured?.requests);
      text(numbers.rate, data.records ? null : count(Math.round((asked * 600) / data.measured_seconds) / 10));
      text(numbers.failed, data.records || !asked ? null : percent(sum((row) => row.measured?.failed) / asked));
      table.update(data.backends);
      waiting.update(data.waiting.filter((row) => row.count));
      const span = Math.round(data.measured_seconds / 60);
      text(note, data.records
        ? `Nothing measured: ${data.records}.`
        : `Measured: medians of the last ${span} minutes, beside what had been predicted for the same requests; the first token counts from being let in. `
          + "Now: predicted for a short prompt that came this moment.");
      page.identity(data.version, data.policy);
    },
  };
}
