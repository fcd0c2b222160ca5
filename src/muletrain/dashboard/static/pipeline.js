// The pipeline as it is: stages as columns, peers as cards or, in large stages, as dots.

import { $, bytes, count, el, fill, int, percent, plural } from "./dom.js";
import { openPeer } from "./peers.js";

const FEW = 4, MANY = 16; // peers of the largest stage up to which they are drawn as cards, and as lines; more are dots
const LINES = 24; // links between two stages that are drawn, those with the most bytes
const LABELS = { training: "training", ready: "ready", joining: "joining", silent: "suspected", gone: "gone", finished: "finished" };
const ORDER = ["training", "ready", "joining", "silent", "gone", "finished"];
export const label = (peer) => (peer.state === "gone" && peer.why !== "gone" ? peer.why : LABELS[peer.state] ?? peer.state);

export function drawPipeline(run, k) {
  const host = $("pipe");
  const stages = run.stages;
  const of = new Map(stages.map((s) => [s.stage, []]));
  for (const [key, peer] of Object.entries(run.peers)) of.get(peer.stage)?.push({ key, ...peer });
  for (const peers of of.values()) peers.sort((a, b) => ORDER.indexOf(a.state) - ORDER.indexOf(b.state) || a.name.localeCompare(b.name, "en", { numeric: true }));
  $("pipe-about").textContent = stages.length ? `${plural(Object.keys(run.peers).length, "peer")} in ${plural(stages.length, "stage")}` : "";
  if (!stages.length) return void fill(host, "none", () => el("p", { class: "empty" }, "No stage yet. Peers appear here when they have loaded the model."));
  const largest = Math.max(...[...of.values()].map((peers) => peers.length));
  const form = largest > MANY ? "dots" : largest > FEW ? "lines" : "cards";
  const shape = [form, stages.map((s) => [s.stage, form === "dots" || of.get(s.stage).map((p) => p.key)])];
  $("pipe-about").textContent += form === "dots" ? "; a square is a peer, and a strong colour a busy one" : "";
  host.classList.toggle("few", stages.length <= 4);
  fill(host, [k, shape], () => [svg(), ...stages.map((s) => column(s, of.get(s.stage), k, form))]);
  const [first, second] = stages.map(computing).sort((a, b) => b - a);
  const clearly = stages.length > 1 && first > 0 && first >= 1.1 * second; // as in health.py
  for (const s of stages) update(s, of.get(s.stage), k, form, clearly && computing(s) === first);
  if (form !== "dots") drawLinks(host, of, k);
}

const computing = (s) => {
  const total = s.seconds.reduce((a, b) => a + (b ?? 0), 0);
  return total ? (s.seconds[0] + s.seconds[1]) / total : 0;
};

const perSecond = (n) => (n === null || n === undefined ? "–" : `${count(n)}/s`);

function svg() {
  const node = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  node.setAttribute("class", "links");
  node.setAttribute("aria-hidden", "true");
  return node;
}

function column(s, peers, k, form) {
  const body = form === "dots" ? [el("div", { class: "dots", id: `dots-${s.stage}`, role: "img" }), el("ul", { class: "states", id: `states-${s.stage}` }), el("div", { id: `notable-${s.stage}` })] : peers.map((p) => (form === "lines" ? slim(p, k) : card(p, k)));
  return el("section", { class: "stage", "aria-label": `Stage ${s.stage}` },
    el("h3", {}, `Stage ${s.stage}`, el("span", { class: "tag", id: `busiest-${s.stage}`, hidden: true }, "busiest")),
    el("p", { class: "muted small", id: `stage-${s.stage}` }), ...body,
    peers.length ? null : el("p", { class: "empty small" }, "no peer"));
}

const cards = new Map();

function card(peer, k) {
  const parts = { state: el("span", { class: "state" }), device: el("span", { class: "device" }), speed: el("b"), busy: el("b"), meter: el("i"), sends: el("b"), way: el("b"), wayname: el("span") };
  const row = (name, value) => el("span", { class: "row" }, el("span", {}, name), value);
  const node = el("button", { type: "button", class: "card", onclick: () => openPeer(k, peer.key) },
    el("span", { class: "name" }, el("span", { class: "clip" }, peer.name), parts.state), parts.device,
    row("busy", parts.busy), el("span", { class: "meter" }, parts.meter), row("microbatches", parts.speed), row("sends", parts.sends), el("span", { class: "row" }, parts.wayname, parts.way));
  node.parts = parts;
  cards.set(`${k}/${peer.key}`, node);
  return node;
}

/** A peer as one line, for stages with more than a few. */
function slim(peer, k) {
  const node = card(peer, k), { parts } = node;
  node.classList.add("slim");
  node.replaceChildren(el("span", { class: "name" }, el("span", { class: "clip" }, peer.name)), el("span", { class: "meter" }, parts.meter), parts.busy, parts.speed, parts.state);
  return node;
}

function update(s, peers, k, form, busiest) {
  const about = [s.microbatches_per_s === null ? "" : `${count(s.microbatches_per_s)} microbatches/s`, s.params ? `${count(s.params)} parameters` : ""];
  $(`stage-${s.stage}`).textContent = about.filter(Boolean).join(" · ") || "waiting for the first step";
  $(`busiest-${s.stage}`).hidden = !busiest;
  if (form === "dots") return dots(s, peers, k);
  for (const peer of peers) {
    const node = cards.get(`${k}/${peer.key}`);
    if (!node) continue;
    const { parts } = node;
    node.dataset.state = peer.state;
    parts.state.textContent = label(peer);
    parts.device.textContent = [peer.device, peer.precision, peer.trainer ? "trainer" : ""].filter(Boolean).join(" · ");
    const still = peer.state === "gone" || peer.state === "silent";
    parts.speed.textContent = still ? "–" : perSecond(peer.per_s);
    parts.busy.textContent = still ? "–" : percent(peer.busy);
    parts.meter.style.width = still ? "0" : `${100 * (peer.busy ?? 0)}%`;
    parts.sends.textContent = still ? "–" : `${bytes(peer.send)}/s`;
    const memory = peer.used || peer.memory;
    parts.wayname.textContent = memory ? "memory" : "parameters";
    parts.way.parentNode?.toggleAttribute("hidden", !memory && !peer.params);
    parts.way.textContent = memory ? bytes(memory) : peer.params ? count(peer.params) : "–";
    if (peer.under_way) parts.speed.textContent += ` · ${peer.under_way} under way`;
    node.title = form === "lines" ? `${peer.name}: ${label(peer)}, ${parts.device.textContent}` : "busy: share of the time in which the peer was not idle; memory: in use by its process, before the first step what its stage needs";
  }
}

function dots(s, peers, k) {
  const counts = ORDER.map((state) => [state, s.states[state] ?? 0]).filter(([, n]) => n);
  const words = counts.map(([state, n]) => `${int(n)} ${LABELS[state]}`).join(", ");
  const shades = peers.map((p) => p.state + Math.round(5 * (p.busy ?? 0)));
  if (fill($(`dots-${s.stage}`), shades, () => peers.map((p) => el("i", { "data-state": p.state, title: `${p.name}: ${label(p)}, busy ${percent(p.busy)}`, style: { "--load": String(p.busy ?? 0) } }))))
    $(`dots-${s.stage}`).setAttribute("aria-label", `Stage ${s.stage}: ${words}`);
  fill($(`states-${s.stage}`), counts, () => counts.map(([state, n]) => el("li", { "data-state": state }, el("b", {}, int(n)), ` ${LABELS[state]}`)));
  const working = peers.filter((p) => p.state === "training" && p.per_s !== null);
  const slow = [...working].sort((a, b) => a.per_s - b.per_s).slice(0, 2);
  const loaded = [...working].sort((a, b) => b.busy - a.busy).slice(0, 2);
  const entry = (p, text) => el("button", { type: "button", class: "entry", onclick: () => openPeer(k, p.key) }, el("span", { class: "clip" }, p.name), el("b", {}, text));
  fill($(`notable-${s.stage}`), [slow, loaded].map((l) => l.map((p) => [p.key, p.per_s, p.busy])), () => [
    slow.length ? el("p", { class: "muted small" }, "slowest") : null, ...slow.map((p) => entry(p, perSecond(p.per_s))),
    loaded.length ? el("p", { class: "muted small" }, "busiest") : null, ...loaded.map((p) => entry(p, percent(p.busy)))]);
}

/** A line for each link to the next stage; the dots on it move at a speed that follows the bytes. */
function drawLinks(host, of, k) {
  const root = host.querySelector("svg.links");
  const byName = new Map();
  for (const peers of of.values()) for (const p of peers) byName.set(p.name, p);
  const lines = [];
  for (const [stage, peers] of of) {
    const found = [];
    for (const p of peers) for (const [name, speed] of Object.entries(p.to ?? {})) {
      const q = byName.get(name);
      if (q && q.stage === stage + 1 && speed && p.state === "training" && q.state === "training") found.push([p, q, speed]);
    }
    lines.push(...found.sort((a, b) => b[2] - a[2]).slice(0, LINES));
  }
  const box = host.getBoundingClientRect();
  const spot = (node, right) => {
    const r = node.getBoundingClientRect();
    return [Math.round((right ? r.right : r.left) - box.left + host.scrollLeft), Math.round(r.top + r.height / 2 - box.top)];
  };
  const most = Math.max(1, ...lines.map((l) => l[2]));
  const drawn = lines.map(([p, q, speed]) => {
    const a = cards.get(`${k}/${p.key}`), b = cards.get(`${k}/${q.key}`);
    if (!a?.isConnected || !b?.isConnected) return null;
    const [x1, y1] = spot(a, true), [x2, y2] = spot(b, false);
    const middle = (x1 + x2) / 2;
    return [`M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`, 1 + Math.round((3 * speed) / most), [6, 3, 1.5, 0.8][Math.min(3, Math.floor((4 * speed) / most))]];
  }).filter(Boolean);
  root.setAttribute("width", host.scrollWidth);
  root.setAttribute("height", host.scrollHeight);
  fill(root, drawn, () => drawn.flatMap(([d, width, seconds]) => ["wire", "flow"].map((kind) => {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("d", d);
    path.setAttribute("class", kind);
    path.style.strokeWidth = kind === "wire" ? String(width) : String(width + (drawn.length > 24 ? 1 : 2));
    if (kind === "flow") path.style.animationDuration = `${seconds}s`;
    return path;
  })));
}
