// Elements and rows. Text only ever becomes a text node: nothing here, and nobody who uses it, parses markup.

export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

export const text = (node, value) => {
  const next = value === null || value === undefined ? "–" : String(value);
  if (node.textContent !== next) node.textContent = next;
};

export const kind = (node, value) => {
  if (node.className !== value) node.className = value;
};

// A table whose rows are kept by key: what did not change is not touched, so that focus, selection and scroll stay.
// columns: {title, note, n: numeric, head: row header, fill: (td, row) => void}
export class Table {
  constructor(columns, { caption, empty, key, open }) {
    this.columns = columns;
    this.key = key;
    this.open = open;
    this.rows = new Map();
    this.body = el("tbody");
    this.empty = el("p", { class: "empty", hidden: true }, empty);
    this.node = el("div", {},
      el("div", { class: "scroll" },
        el("table", { "aria-label": caption },
          el("thead", {}, el("tr", {}, columns.map((column) =>
            el("th", { scope: "col", class: column.n ? "n" : null }, column.title,
              column.note ? el("small", {}, column.note) : null)))),
          this.body)),
      this.empty);
  }

  update(data) {
    const seen = new Set();
    let place = this.body.firstElementChild;
    for (const one of data) {
      const key = String(this.key(one));
      seen.add(key);
      let row = this.rows.get(key);
      if (!row) {
        row = this.make(key);
        this.rows.set(key, row);
      }
      row.data = one;
      if (row.node !== place) this.body.insertBefore(row.node, place);
      else place = place.nextElementSibling;
      this.columns.forEach((column, index) => column.fill(row.cells[index], one, row));
    }
    for (const [key, row] of this.rows) {
      if (!seen.has(key)) {
        row.node.remove();
        this.rows.delete(key);
      }
    }
    this.empty.hidden = data.length > 0;
  }

  make(key) {
    const cells = this.columns.map((column) =>
      el(column.head ? "th" : "td", { class: column.n ? "n" : null, scope: column.head ? "row" : null }));
    const row = { node: el("tr", { "data-key": key }, cells), cells, data: null };
    if (this.open) {
      row.node.tabIndex = 0;
      row.node.classList.add("open");
      row.node.addEventListener("click", (event) => event.target.closest("button") || this.open(row.data));
      row.node.addEventListener("keydown", (event) => {
        if (event.key === "Enter" && event.target === row.node) this.open(row.data);
      });
    }
    return row;
  }
}

// A cell's parts, made once.
export function parts(cell, make) {
  if (!cell.parts) {
    cell.parts = make();
    cell.append(...Object.values(cell.parts));
  }
  return cell.parts;
}

export function gauge(cell, share, label, bad = 0.97, warn = 0.85) {
  const p = parts(cell, () => {
    const fill = el("i");
    return { bar: Object.assign(el("span", { class: "gauge", "aria-hidden": "true" }, fill), { fill }), label: el("span") };
  });
  text(p.label, label);
  p.bar.hidden = share === null || share === undefined;
  if (p.bar.hidden) return;
  kind(p.bar, share >= bad ? "gauge bad" : share >= warn ? "gauge warn" : "gauge");
  const width = `${Math.min(100, Math.max(0, share * 100)).toFixed(1)}%`;
  if (p.bar.fill.style.width !== width) p.bar.fill.style.width = width;
}

export const card = (title, tools, ...children) =>
  el("section", { class: "card", "aria-label": title },
    el("div", { class: "head" }, el("h2", {}, title), tools), children);

export function select(label, options, value, change) {
  const node = el("select", { "aria-label": label, onchange: () => change(node.value) });
  choose(node, options, value);
  return Object.assign(el("label", {}, label, " ", node), { field: node });
}

// Options are [value, words]; those that are there already stay.
export function choose(node, options, value) {
  const wanted = options.map((option) => option[0]).join("\0");
  if (node.dataset.options !== wanted) {
    node.replaceChildren(...options.map(([one, words]) => el("option", { value: one }, words)));
    node.dataset.options = wanted;
  }
  if (node.value !== value) node.value = value;
}
