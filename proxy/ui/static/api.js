// What the page asks the gateway. The key lies in sessionStorage: it ends with the tab.
const KEY = "tierline-admin-key";

export class Problem extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const setKey = (key) => sessionStorage.setItem(KEY, key);
export const hasKey = () => sessionStorage.getItem(KEY) !== null;
export const dropKey = () => sessionStorage.removeItem(KEY);

async function send(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, credentials: "omit", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "the gateway does not answer");
  }
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new Problem(response.status, body.error?.message ?? `status ${response.status}`, body.error?.code);
  return body;
}

export function get(name, query = {}, signal = undefined) {
  const asked = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined));
  return send(`api/${name}${asked.size ? `?${asked}` : ""}`, { signal });
}

export const whatIf = (policy) =>
  send("api/whatif", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ policy }) });

// The admin API itself: one folder above.
export const drain = (name, on) =>
  send(`../admin/backends/${encodeURIComponent(name)}/${on ? "drain" : "undrain"}`, { method: "POST" });
