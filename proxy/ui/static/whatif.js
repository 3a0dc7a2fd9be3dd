// Another policy for the last hour: edit, replay, compare.
import { get, whatIf } from "./api.js";
import { card, choose, el, select, text } from "./dom.js";
import { count, percent, seconds } from "./words.js";

export function view(page) {
  let policy = null;
  const field = el("textarea", { "aria-label": "Policy and tiers, TOML", spellcheck: "false" });
  const base = select("Policy", [["", "…"]], "", (value) => {
    field.value = field.value.replace(/^name = ".*"$/m, `name = "${value}"`);
  });
  const run = el("button", { type: "button", class: "primary" }, "Replay the last hour");
  const reset = el("button", { type: "button" }, "As in force");
  const note = el("p", { class: "note" });
  const results = el("div", {}, el("p", { class: "card empty" },
    "Choose a policy, change numbers, and replay: the requests of the last hour are decided again, and modelled on simulated engines."));

  reset.onclick = () => {
    field.value = policy.toml;
    choose(base.field, policy.built_in.map((one) => [one, one]), policy.name);
  };
  run.onclick = async () => {
    run.disabled = true;
    text(run, "Replaying …");
    try {
      results.replaceChildren(...shown(await whatIf(field.value)));
    } catch (error) {
      results.replaceChildren(el("p", { class: "card empty bad", role: "alert" }, error.message));
    }
    run.disabled = false;
    text(run, "Replay the last hour");
    results.dataset.ready = "1";
  };

  return {
    title: "What if",
    every: 0,
    node: [el("div", { class: "split" },
      card("Policy to try", base, el("div", { class: "body" }, field, el("p", { class: "actions" }, reset, run)), note), results)],
    load: (signal) => get("policy", {}, signal),
    show(data) {
      const first = policy === null;
      policy = data;
      if (first) reset.onclick();
      text(note, data.own ? "A policy of one's own is in force (policy.file): here it is replaced by the built-in one that is chosen." : "Nothing is changed by a replay.");
    },
    problem: (error) => text(note, `${error.message}.`),
  };
}

function shown(found) {
  if (found.problems) {
    return [card("Not a policy", null, el("ul", { class: "bad", role: "alert" }, found.problems.map((one) => el("li", {}, one))))];
  }
  const all = `${count(found.records)} requests${found.cut ? ", the latest ones" : ""}`;
  return [
    found.model ? modelled(found.model, all) : card("Outcomes", null, el("p", { class: "empty" }, `Not modelled: ${found.not_modelled}.`)),
    found.decisions ? decided(found.decisions) : card("Decisions", null, el("p", { class: "empty" }, "Not recorded: telemetry.decisions is off.")),
  ];
}

const table = (label, heads, rows) => el("div", { class: "scroll" }, el("table", { "aria-label": label },
  el("thead", {}, el("tr", {}, heads.map((head, index) => el("th", { scope: "col", class: index ? "n" : null }, head)))),
  el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, index) =>
    index ? (cell instanceof Node ? cell : el("td", { class: "n" }, cell)) : el("th", { scope: "row" }, cell)))))));

// Lower is better but for some; within a twentieth is the same.
function change(before, after, more = false) {
  if (before === null || after === null || before === after) return el("td", { class: "n" }, "same");
  if (!before) return el("td", { class: "n" }, "–");
  const share = after / before - 1;
  const how = Math.abs(share) < 0.05 ? "" : share > 0 === more ? " good" : " bad";
  return el("td", { class: `n${how}` }, `${share > 0 ? "+" : "−"}${Math.abs(share * 100).toFixed(0)} %`);
}

function modelled({ before, after }, all) {
  const rows = [
    ["goodput", "goodput", percent, true], ["first token, median", "ttft50", seconds], ["first token, p95", "ttft95", seconds],
    ["per token, p95", "tpot95", seconds], ["wait, p95", "waited95", seconds], ["prompts cached", "cached", percent, true],
    ["turned away", "shed", count],
  ].map(([name, key, words, more]) => [name, words(before[key]), words(after[key]), change(before[key], after[key], more)]);
  const moved = (one, other, words) => (words(one) === words(other) ? words(one) : `${words(one)} → ${words(other)}`);
  const each = before.backends.map((one, index) => [one, after.backends[index]]).map(([one, other]) => [
    one.backend, moved(one.requests, other.requests, count), moved(one.ttft50, other.ttft50, seconds), moved(one.ttft95, other.ttft95, seconds),
    moved(one.tpot50, other.tpot50, seconds), moved(one.waited95, other.waited95, seconds),
  ]);
  return card("Modelled outcomes", el("span", { class: "note" }, `${all}; in force → tried`),
    table("Modelled outcomes", ["", "in force", "tried", "change"], rows),
    table("Modelled outcomes by backend", ["Backend", "requests", "first token", "p95", "per token", "wait p95"], each),
    el("p", { class: "note" }, "Recorded arrivals on simulated engines, under both policies: two models that compare, and neither is what happened."));
}

function decided(d) {
  return card("Decisions made again", el("span", { class: "note" }, `${count(d.made)} decisions, ${count(d.same)} the same; predicted cost ${seconds(d.cost_before)} → ${seconds(d.cost_after)}`),
    table("Decisions by backend", ["Backend", "recorded", "tried", "change"],
      d.backends.map((one) => [one.backend ?? "none", count(one.before), count(one.after), el("td", { class: "n" }, `${one.after > one.before ? "+" : ""}${one.after - one.before}`)])),
    d.moved.length ? el("details", { class: "body" }, el("summary", {}, `${count(d.moved.length)} that would go elsewhere`),
      table("Moved requests", ["Request", "recorded", "tried", "first token", "→"],
        d.moved.map((one) => [el("a", { href: `#requests/${encodeURIComponent(one.request_id)}` }, one.request_id), one.before ?? "none", one.after ?? "none", seconds(one.ttft_before), seconds(one.ttft_after)]))) : null,
    el("p", { class: "note" }, "Exact for the state that the recorded policy brought about; its own would have differed."));
}
