// The frame: views by the address's fragment, one clock for updates, the key, shortcuts, light and dark.
// A view is {title, every: seconds, make(main), load(signal) → data, show(data), leave()}; see fleet.js for the smallest.
import * as api from "./api.js";
import { text, kind } from "./dom.js";

const VIEWS = {
  fleet: () => import("./fleet.js"),
  latency: () => import("./latency.js"),
  requests: () => import("./requests.js"),
  heat: () => import("./heat.js"),
  conversations: () => import("./conversations.js"),
  whatif: () => import("./whatif.js"),
  limits: () => import("./limits.js"),
};
const NAMES = Object.keys(VIEWS);
const main = document.getElementById("main");
const status = document.getElementById("status");
const state = { view: null, name: "", timer: 0, paused: false, loading: null };

export const page = {
  toast(message, bad = false) {
    const node = document.getElementById("toast");
    text(node, message);
    kind(node, bad ? "shown bad" : "shown");
    clearTimeout(node.timer);
    node.timer = setTimeout(() => kind(node, ""), 4000);
  },
  confirm(title, words, yes) {
    const dialog = document.getElementById("confirm");
    text(document.getElementById("confirm-title"), title);
    text(document.getElementById("confirm-text"), words);
    const button = document.getElementById("confirm-yes");
    text(button, yes);
    return new Promise((resolve) => {
      const end = (answer) => {
        button.onclick = document.getElementById("confirm-no").onclick = dialog.onclose = null;
        dialog.close();
        resolve(answer);
      };
      button.onclick = () => end(true);
      document.getElementById("confirm-no").onclick = () => end(false);
      dialog.onclose = () => end(false);
      dialog.showModal();
      button.focus();
    });
  },
  refresh: () => load(),
  identity(version, policy) {
    text(document.getElementById("version"), `Tierline ${version}`);
    text(document.getElementById("policy"), `policy ${policy}`);
  },
  dark: () => getComputedStyle(document.documentElement).colorScheme === "dark",
};

// -- which view

async function open() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  const wanted = VIEWS[name] ? name : "fleet";
  leave();
  state.name = wanted;
  for (const link of document.querySelectorAll("#tabs a")) {
    if (link.dataset.view === wanted) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const module = await VIEWS[wanted]();
  if (state.name !== wanted) return;
  const view = module.view(page, rest.map(decodeURIComponent));
  document.title = `${view.title} · Tierline`;
  main.replaceChildren(...[view.node].flat());
  main.removeAttribute("data-ready");
  state.view = view;
  await load();
}

function leave() {
  clearTimeout(state.timer);
  state.loading?.abort();
  state.view?.leave?.();
  state.view = null;
}

// -- its data: asked for again when the last answer is there, and only while somebody looks

async function load() {
  clearTimeout(state.timer);
  state.loading?.abort();
  const view = state.view;
  if (!view) return;
  const loading = (state.loading = new AbortController());
  try {
    const data = await view.load(loading.signal);
    if (state.view !== view || loading.signal.aborted) return;
    view.show(data);
    main.setAttribute("data-ready", state.name);
    said(state.paused ? "paused" : "live", state.paused ? "paused" : `live · ${new Date().toLocaleTimeString([], { hour12: false })}`);
  } catch (error) {
    if (error.name === "AbortError" || state.view !== view) return;
    if (error.status === 401) return login(api.hasKey() ? "That is not the admin key." : "");
    if (error instanceof api.Problem) {
      if (error.status) view.problem?.(error);
      said("lost", error.status ? "not answered" : "no connection");
      main.setAttribute("data-ready", state.name);
    } else throw error;
  }
  if (!state.paused && !document.hidden && view.every) state.timer = setTimeout(load, view.every * 1000);
}

function said(how, words) {
  kind(status, how);
  text(status, words);
}

document.addEventListener("visibilitychange", () => {
  clearTimeout(state.timer);
  if (!document.hidden && !state.paused) load();
});

function pause() {
  state.paused = !state.paused;
  document.getElementById("pause").setAttribute("aria-pressed", String(state.paused));
  if (state.paused) {
    clearTimeout(state.timer);
    said("paused", "paused");
  } else load();
}

// -- the key

function login(wrong) {
  const dialog = document.getElementById("login");
  api.dropKey();
  said("lost", "key wanted");
  text(document.getElementById("login-wrong"), wrong || " ");
  if (!dialog.open) dialog.showModal();
  document.getElementById("login-key").focus();
}

function enter() {
  const field = document.getElementById("login-key");
  if (!field.value) return;
  api.setKey(field.value);
  field.value = "";
  document.getElementById("login").close();
  load();
}
document.getElementById("login-ok").addEventListener("click", enter);
document.getElementById("login-key").addEventListener("keydown", (event) => event.key === "Enter" && enter());

// -- light and dark

const root = document.documentElement;
const chosen = localStorage.getItem("tierline-theme");
if (chosen) root.dataset.theme = chosen;

function theme() {
  root.dataset.theme = page.dark() ? "light" : "dark";
  localStorage.setItem("tierline-theme", root.dataset.theme);
  state.view?.restyle?.();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => state.view?.restyle?.());

// -- buttons and shortcuts

const help = document.getElementById("keys");
document.getElementById("pause").addEventListener("click", pause);
document.getElementById("theme").addEventListener("click", theme);
document.getElementById("help").addEventListener("click", () => help.showModal());
for (const button of document.querySelectorAll("[data-close]")) button.addEventListener("click", () => button.closest("dialog").close());

function step(by) {
  const rows = [...main.querySelectorAll("tbody tr[tabindex]")];
  const at = rows.indexOf(document.activeElement?.closest("tr"));
  const row = rows[Math.min(rows.length - 1, Math.max(0, at + by))];
  row?.focus();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.target.closest("input, textarea, select") && event.key !== "Escape") return;
  const { key } = event;
  if (key >= "1" && key <= String(NAMES.length)) location.hash = NAMES[Number(key) - 1];
  else if (key === "j") step(1);
  else if (key === "k") step(-1);
  else if (key === "p") pause();
  else if (key === "t") theme();
  else if (key === "?") help.showModal();
  else if (key === "/") main.querySelector("select, input")?.focus();
  else if (key === "Escape") event.target.closest("input, textarea, select") ? event.target.blur() : state.view?.escape?.();
  else return;
  event.preventDefault();
});

addEventListener("hashchange", open);
open();
