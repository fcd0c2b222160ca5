// The event line: marks over time, a handle that goes back, and the list of events.

import { $, clock, el, fill, int, plural } from "./dom.js";
import { showNow, showPast, store } from "./store.js";

export const KINDS = { joined: "joined", lost: "lost", left: "left", moved: "moved", checkpoint: "checkpoint", refused: "refused", kicked: "kicked", back: "stepped back", fault: "fault injected", heldout: "held-out loss", run: "run", warning: "warning", note: "note" };
const LANES = { lost: 0, fault: 0, kicked: 0, back: 0, refused: 1, warning: 1, joined: 2, left: 2, moved: 2, checkpoint: 3, heldout: 3, run: 3, note: 4 };
const hidden = new Set(["note"]);
let timer, span = [0, 1], again = () => {};

export function wire(current, onchange) {
  again = onchange;
  $("scrub").addEventListener("input", () => {
    const part = Number($("scrub").value) / 1000;
    clearTimeout(timer);
    if (part >= 1) return showNow();
    timer = setTimeout(() => showPast(current(), span[0] + part * (span[1] - span[0])), 80);
  });
  $("live").addEventListener("click", () => {
    showNow();
    $("scrub").focus();
  });
  $("find-event").addEventListener("input", again);
}

export function drawLine(run, whole, k) {
  const past = store.past?.run === k ? store.past : null;
  span = [whole.head.first_t || 0, Math.max(whole.head.t ?? 1, (whole.head.first_t ?? 0) + 1)];
  const scrub = $("scrub");
  if (!past && document.activeElement !== scrub) scrub.value = 1000;
  if (!past) scrub.value = 1000;
  else if (document.activeElement !== scrub) scrub.value = String(Math.round((1000 * (past.asked - span[0])) / (span[1] - span[0])));
  const at = past ? past.t : span[1];
  const text = `${clock(at)}, step ${int(run.head.step ?? 0)}`;
  scrub.setAttribute("aria-valuetext", past ? text : `now, ${text}`);
  $("when").textContent = past ? text : whole.marks.length ? `${clock(span[0])} to ${clock(span[1])}` : "no event yet";
  $("live").disabled = !past;
  $("past").hidden = !past;
  if (past) $("past").textContent = `The page shows the run as it was at ${text}. Press Live for the present.`;
  kinds(whole);
  marks(whole, past);
  events(run, k);
}

function kinds(run) {
  const counts = {};
  for (const mark of run.marks) counts[mark.kind] = (counts[mark.kind] ?? 0) + 1;
  const present = Object.keys(KINDS).filter((kind) => counts[kind]);
  fill($("kinds"), [present.map((kind) => [kind, counts[kind]]), [...hidden]], () => present.map((kind) => el("button", { type: "button", class: "kind", "data-kind": kind, "aria-pressed": String(!hidden.has(kind)), onclick: () => {
    if (!hidden.delete(kind)) hidden.add(kind);
    again();
  } }, el("i"), KINDS[kind], el("b", {}, int(counts[kind])))));
}

function marks(run, past) {
  const canvas = $("marks"), scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  pen.scale(scale, scale);
  const x = (t) => 8 + ((width - 16) * (t - span[0])) / (span[1] - span[0]);
  pen.fillStyle = style.getPropertyValue("--grid");
  for (let lane = 0; lane < 5; lane++) pen.fillRect(8, 6 + lane * 10, width - 16, 1);
  for (const mark of run.marks) {
    if (hidden.has(mark.kind)) continue;
    pen.fillStyle = style.getPropertyValue(`--k-${mark.kind}`) || "#888";
    pen.globalAlpha = past && mark.t > past.t ? 0.25 : 1;
    pen.fillRect(x(mark.t) - 1.5, 2 + LANES[mark.kind] * 10, 3, 9);
  }
  pen.globalAlpha = 1;
  if (past) {
    pen.fillStyle = style.getPropertyValue("--ink");
    pen.fillRect(x(past.t) - 0.75, 0, 1.5, height);
  }
}

function events(run, k) {
  const words = $("find-event").value.toLowerCase();
  const found = run.marks.filter((m) => !hidden.has(m.kind) && (!words || `${m.text} ${m.peer} ${KINDS[m.kind]}`.toLowerCase().includes(words)));
  const shown = found.slice(-200).reverse();
  fill($("events"), [k, shown.map((m) => m.n), found.length], () => (shown.length
    ? [el("ul", { class: "events" }, ...shown.map((m) => el("li", { "data-kind": m.kind },
        el("button", { type: "button", class: "plain time", title: "Show the run at this time", onclick: () => showPast(k, m.t, true) }, clock(m.t)),
        el("span", { class: "what" }, el("i"), KINDS[m.kind]), el("span", { class: "text" }, m.text)))),
      found.length > shown.length ? el("p", { class: "muted small" }, `${plural(found.length - shown.length, "older event")} not listed`) : null]
    : el("p", { class: "empty" }, "No such event.")));
}
