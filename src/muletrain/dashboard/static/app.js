// The page: which run is shown, when it is drawn, light and dark.

import { axisButtons, draw, legend, redraw } from "./charts.js";
import { $, el, fill } from "./dom.js";
import { drawLine, wire } from "./line.js";
import * as panels from "./panels.js";
import { confirm, drawPeers } from "./peers.js";
import { drawPipeline } from "./pipeline.js";
import { act, connect, showNow, store, view } from "./store.js";

let current = 0; // -1: all runs side by side
let waiting = false;
let chosen = false;

function render() {
  waiting = false;
  if (!store.loaded) return;
  if (!store.runs.length) return void panels.drawHealth({ health: { word: "starting", tone: "note", why: "the command prepares the run" } });
  if (!chosen && store.runs.length > 1) current = -1;
  chosen = true;
  const many = current < 0;
  const runs = store.runs.map((run, k) => ({ run: view(k), k, name: run.run.name ?? `run ${k + 1}` }));
  tabs(runs);
  $("single").hidden = many;
  $("compare").hidden = !many;
  $("health").hidden = $("tiles").hidden = many;
  const drawn = many ? runs : [runs[current] ?? runs[0]];
  draw(drawn);
  fill($("legend"), [drawn.map((r) => r.name), drawn.some((r) => r.run.heldout.length), document.documentElement.dataset.theme], () => legend(drawn));
  if (many) return void panels.drawCompare(runs);
  const { run, k, name } = drawn[0];
  document.title = `${run.health.word ?? ""} · step ${run.head.step ?? 0} · ${name}`;
  for (const part of [panels.drawHealth, panels.drawTiles, panels.drawTimes, panels.drawTraffic, panels.drawClients, panels.drawCheckpoints, panels.drawSamples, panels.drawAbout]) part(run);
  drawLine(run, store.runs[k], k);
  drawPipeline(run, k);
  drawPeers(run, k, soon);
  $("stop").hidden = !(run.run.stops && store.steers);
}

function soon() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(render);
}

function tabs(runs) {
  const choose = (k) => {
    current = k;
    showNow();
  };
  const names = runs.length > 1 ? [["All", -1], ...runs.map(({ name, k }) => [name, k])] : [[runs[0].name, 0]];
  fill($("tabs"), [names, current], () => names.map(([name, k]) => (runs.length > 1
    ? el("button", { type: "button", class: "tab", "aria-current": k === current ? "page" : undefined, onclick: () => choose(k) }, name)
    : el("span", { class: "only" }, name))));
}

function theme() {
  const wanted = stored() ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.documentElement.dataset.theme = wanted;
  redraw();
  soon();
}

function stored() {
  try {
    return localStorage.getItem("theme");
  } catch {
    return null;
  }
}

$("theme").addEventListener("click", () => {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try {
    localStorage.setItem("theme", next);
  } catch {
    // a browser that keeps nothing switches for this page only
  }
  document.documentElement.dataset.theme = next;
  redraw();
  soon();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", theme);
$("stop").addEventListener("click", () => confirm("Stop the run?", "It ends after the current step, for all machines, and writes a checkpoint.", "Stop", () => act(Math.max(0, current), "stop")));
$("find-peer").addEventListener("input", soon);
new ResizeObserver(soon).observe($("main"));
axisButtons(() => {
  redraw();
  soon();
});
wire(() => Math.max(0, current), soon);
theme();
connect(soon);
