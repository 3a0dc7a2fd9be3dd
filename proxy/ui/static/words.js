// Numbers as people read them. `–` is what there is not.
const none = (value) => value === null || value === undefined || Number.isNaN(value);

export function seconds(value) {
  if (none(value)) return "–";
  if (value === 0) return "0";
  if (value < 0.0095) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 9.995) return `${value.toFixed(2)} s`;
  if (value < 120) return `${value.toFixed(1)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  if (value < 172800) return `${Math.round(value / 3600)} h`;
  return `${Math.round(value / 86400)} d`;
}

export function count(value) {
  if (none(value)) return "–";
  if (value < 10000) return String(Math.round(value * 100) / 100);
  if (value < 999500) return `${Math.round(value / 1000)}k`;
  return `${(value / 1e6).toFixed(1)}M`;
}

export const percent = (value) => (none(value) ? "–" : `${(value * 100).toFixed(value > 0.0995 || value === 0 ? 0 : 1)} %`);
export const times = (value) => (none(value) ? "–" : `×${value.toFixed(2)}`);
export const clock = (iso) => (none(iso) ? "–" : new Date(iso).toLocaleTimeString([], { hour12: false }));

export function outcome(value) {
  if (value === "ok") return "good";
  return value === "cancelled" || value === "bad_request" || value === "shed" || value === "limited" ? "warn" : "bad";
}
