// The table of peers, with search, and one peer in a dialog.

import { $, bytes, count, el, fill, int, percent, plural, rate, say } from "./dom.js";
import { label } from "./pipeline.js";
import { act, store, view } from "./store.js";

const SHOWN = 100;
let order = ["stage", 1];

const COLUMNS = [
  ["stage", "stage", (p) => String(p.stage)],
  ["name", "peer", (p) => p.name],
  ["state", "state", (p) => el("span", { class: "state", "data-state": p.state }, label(p))],
  ["device", "device", (p) => [p.device, p.precision].filter(Boolean).join(" ") || "–"],
  ["step", "step", (p) => int(p.step)],
  ["per_s", "microbatches/s", (p) => rate(p.per_s, "")],
  ["busy", "busy", (p) => percent(p.busy)],
  ["send", "sends", (p) => perSecond(p.send)],
  ["microbatches", "microbatches", (p) => int(p.microbatches)],
  ["recomputed", "recomputed", (p) => int(p.recomputed)],
];
const NUMERIC = new Set(["stage", "step", "per_s", "busy", "send", "microbatches", "recomputed"]);
const perSecond = (n) => (n === null || n === undefined ? "–" : `${bytes(n)}/s`);

export function drawPeers(run, k, again) {
  const all = Object.entries(run.peers);
  const words = $("find-peer").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = all.filter(([, p]) => words.every((w) => `${p.name} ${p.device} ${label(p)} stage ${p.stage} stage${p.stage}`.toLowerCase().includes(w)));
  const [by, sign] = order;
  found.sort(([, a], [, b]) => sign * compare(a[by], b[by]) || a.name.localeCompare(b.name, "en", { numeric: true }));
  $("peers-about").textContent = all.length ? (words.length ? `${int(found.length)} of ${plural(all.length, "peer")}` : plural(all.length, "peer")) + (found.length > SHOWN ? `; the first ${SHOWN} are shown` : "") : "";
  const rows = found.slice(0, SHOWN);
  fill($("peers"), [k, order, rows], () => {
    if (!rows.length) return el("p", { class: "empty" }, all.length ? "No peer matches." : "No peer yet.");
    const head = COLUMNS.map(([key, name]) => el("th", { scope: "col", class: NUMERIC.has(key) ? "n" : "", "aria-sort": key === by ? (sign > 0 ? "ascending" : "descending") : undefined },
      el("button", { type: "button", class: "sort", onclick: () => { order = [key, key === by ? -sign : 1]; again(); } }, name)));
    return el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows.map(([key, p]) =>
      el("tr", { "data-state": p.state }, ...COLUMNS.map(([c, , text]) => (c === "name"
        ? el("th", { scope: "row" }, el("button", { type: "button", class: "plain clip", onclick: () => openPeer(k, key) }, p.name))
        : el("td", { class: NUMERIC.has(c) ? "n" : "" }, text(p))))))));
  });
}

const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : (a ?? -1) - (b ?? -1));

export function openPeer(k, key) {
  const run = view(k), p = run?.peers[key];
  if (!p) return;
  const facts = [["stage", p.stage], ["state", label(p)], ["device", [p.device, p.precision].filter(Boolean).join(" ")], ["builds microbatches (trainer)", p.trainer ? "yes" : "no"],
    ["memory in use", p.used ? bytes(p.used) : "unknown"], ["memory that its stage needs, by estimate", p.memory ? bytes(p.memory) : "unknown"], ["parameters", count(p.params)], ["step", int(p.step)], ["speed", rate(p.per_s, "microbatches/s")], ["busy (share of the time in which it is not idle)", percent(p.busy)],
    ["microbatches accumulated", int(p.microbatches)], ["microbatches recomputed", int(p.recomputed)], ["id", p.id || "unknown"], ...Object.entries(p.to ?? {}).map(([to, n]) => [`sends to ${to}`, perSecond(n)])];
  const parts = [el("h2", { id: "dialog-title" }, p.name), el("dl", {}, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))]))];
  const close = el("button", { type: "button", onclick: () => $("dialog").close() }, "Close");
  const kick = run.run.owned && store.steers && p.id && p.state !== "gone"
    ? el("button", { type: "button", class: "danger", onclick: () => confirm(`Remove ${p.name} for good?`, "The run replaces its ticket: the old one is void.", "Remove", () => act(k, "kick", p.id)) }, "Remove from the run …") : null;
  $("dialog").replaceChildren(...parts, el("div", { class: "buttons" }, kick ?? "", close));
  $("dialog").showModal();
  close.focus();
}

/** Ask before something that cannot be undone; then do it, and show the answer. */
export function confirm(question, about, verb, doIt) {
  const dialog = $("dialog");
  const no = el("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
  const yes = el("button", { type: "button", class: "danger", onclick: async () => {
    yes.disabled = true;
    yes.textContent = "…";
    const done = await act2(doIt);
    dialog.replaceChildren(el("h2", { id: "dialog-title" }, done.ok ? "Done" : "Not done"), el("pre", {}, done.text), el("div", { class: "buttons" }, el("button", { type: "button", onclick: () => dialog.close() }, "Close")));
    say(done.ok ? "Done" : "Not done");
  } }, verb);
  dialog.replaceChildren(el("h2", { id: "dialog-title" }, question), el("p", {}, about), el("div", { class: "buttons" }, no, yes));
  if (!dialog.open) dialog.showModal();
  no.focus();
}

async function act2(doIt) {
  try {
    return await doIt();
  } catch (e) {
    return { ok: false, text: `no answer: ${e.message}` };
  }
}
