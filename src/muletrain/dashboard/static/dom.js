// Elements and numbers. All text goes through textContent: names and messages come from other machines.

export const $ = (id) => document.getElementById(id);

/** An element. Properties are set as such; `data`, `aria` and `class` as attributes. Children are nodes or text. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "class") node.className = value;
    else if (key === "style") for (const [k, v] of Object.entries(value)) node.style.setProperty(k, v);
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key in node && !key.startsWith("aria")) node[key] = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((c) => c !== null && c !== undefined && c !== false));
  return node;
}

const shown = new WeakMap();

/** Fill `node` with `make()`, unless it was filled for the same `key` before: focus and selection stay. */
export function fill(node, key, make) {
  const text = JSON.stringify(key);
  if (shown.get(node) === text) return false;
  shown.set(node, text);
  node.replaceChildren(...[make()].flat().filter(Boolean));
  return true;
}

export const int = (n) => (n === null || n === undefined ? "–" : Math.round(n).toLocaleString("en-US"));

/** Three significant digits, with k, M, G, T. */
export function count(n) {
  if (n === null || n === undefined || !isFinite(n)) return "–";
  for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(n) >= size * 0.9995) return `${trim(n / size)} ${unit}`;
  return trim(n);
}

const trim = (n) => (Math.abs(n) >= 100 ? n.toFixed(0) : Math.abs(n) >= 10 ? n.toFixed(1) : n === 0 ? "0" : Math.abs(n) >= 0.01 ? n.toFixed(2) : n.toPrecision(2));
export const bytes = (n) => (n === null || n === undefined ? "–" : n < 1000 ? `${Math.round(n)} B` : `${count(n).replace("k", "kB").replace(/ ([MGT])$/, " $1B")}`);
export const rate = (n, unit) => (n === null || n === undefined ? "–" : `${count(n)}${/[kMGT]$/.test(count(n)) ? "" : " "}${unit}`);
export const percent = (x) => (x === null || x === undefined ? "–" : `${Math.round(100 * x)} %`);
export const loss = (x) => (x === null || x === undefined ? "–" : x.toFixed(3));

export function duration(s) {
  if (s === null || s === undefined || !isFinite(s) || s < 0) return "–";
  if (s < 1) return `${Math.round(1000 * s)} ms`;
  if (s < 59.95) return `${s.toFixed(1)} s`;
  const m = Math.round(s / 60);
  if (s < 3570) return `${Math.floor(Math.round(s) / 60)} min ${Math.round(s) % 60} s`;
  return m < 2880 ? `${Math.floor(m / 60)} h ${m % 60} min` : `${Math.floor(m / 1440)} d ${Math.floor((m % 1440) / 60)} h`;
}

/** A time of day; of a simulated run, the time since its beginning. */
export function clock(t) {
  if (t < 1e8) return `+${duration(t)}`;
  return new Date(1000 * t).toLocaleTimeString("en-GB");
}

export const plural = (n, noun) => `${int(n)} ${noun}${n === 1 ? "" : "s"}`;

let told;
/** Tell people, and screen readers. */
export function say(text) {
  $("said").textContent = text;
  clearTimeout(told);
  told = setTimeout(() => ($("said").textContent = ""), 6000);
}

/** A command with a button that copies it. */
export function command(text, label = "Copy") {
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      say(`Copied: ${text}`);
    } catch {
      say(`Copy this: ${text}`);
    }
  };
  return el("span", { class: "cmd" }, el("code", {}, text), el("button", { type: "button", class: "quiet", onclick: copy, "aria-label": `${label}: ${text}` }, label));
}
