// Loss and speed, drawn by uPlot.

import { $, count, duration, el, fill, int, loss } from "./dom.js";

const AXES = { step: "Steps", time: "Time", tokens: "Tokens" };
const RUNS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6"];
export const color = (k) => css(RUNS[k % RUNS.length]);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
let axis = "step";
let plots = {};
let key = "";

export function axisButtons(onchange) {
  const choose = (name) => {
    axis = name;
    for (const b of $("axis").children) b.setAttribute("aria-pressed", String(b.dataset.axis === name));
    onchange();
  };
  $("axis").append(...Object.entries(AXES).map(([name, text]) => el("button", { type: "button", "data-axis": name, "aria-pressed": String(name === axis), onclick: () => choose(name) }, text)));
}

export function redraw() {
  key = "";
}

const x = (row, run) => (axis === "step" ? row[0] : axis === "tokens" ? row[2] : row[1] - (run.head.first_t ?? 0));
const short = (v) => count(v).replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");
const shownX = (v) => (axis === "step" ? `step ${int(v)}` : axis === "tokens" ? `${count(v)} tokens` : duration(v));

/** Exponential mean with a window of a fiftieth of the points: the eye sees the trend through the noise. */
function smooth(rows, column) {
  const past = Math.max(0.5, 1 - 50 / Math.max(rows.length, 100));
  let sum = 0, weight = 0;
  return rows.map((row) => {
    if (row[column] !== null) {
      sum = past * sum + (1 - past) * row[column];
      weight = past * weight + (1 - past);
    }
    return weight ? sum / weight : null;
  });
}

/** Draw the curves of `runs`: [{run, k, name}]. */
export function draw(runs) {
  const charts = [
    { id: "loss", title: "Training loss [nats/token]", column: 3, text: loss, heldout: true },
    { id: "speed", title: "Throughput [tokens/s]", column: 4, text: (v) => (v === null || v === undefined ? "–" : `${count(v)} tokens/s`) },
  ];
  const now = [axis, runs.map((r) => r.k), document.documentElement.dataset.theme, charts.map((c) => $(c.id).clientWidth)].join();
  for (const chart of charts) {
    const nothing = runs.every(({ run }) => run.curve.every((row) => row[chart.column] === null));
    if (nothing) {
      plots[chart.id]?.plot.destroy();
      delete plots[chart.id];
      const steps = runs.some(({ run }) => run.curve.length);
      fill($(chart.id), [chart.title, steps], () => [el("h3", {}, chart.title), el("p", { class: "empty" }, steps ? "No figures: a simulated run learns nothing." : "The curve begins with the first step.")]);
      continue;
    }
    fill($(chart.id), [chart.title, "drawn"], () => null);
    const data = tables(chart, runs);
    if (now !== key || !plots[chart.id]) build(chart, runs, data);
    else if (plots[chart.id].stamp !== stamp(data)) plots[chart.id].plot.setData(data);
    plots[chart.id].stamp = stamp(data);
    label(chart, runs);
  }
  key = now;
}

const stamp = (data) => data.map((c) => `${c.length}:${c.at(-1)}:${c[0]}`).join();

function tables(chart, runs) {
  const parts = runs.map(({ run }) => {
    const rows = run.curve;
    const xs = rows.map((row) => x(row, run));
    const held = chart.heldout ? run.heldout.filter((h) => h[2] !== null).map((h) => [h[0], h[1], h[3]]) : null;
    const series = [[xs, rows.map((row) => row[chart.column]), smooth(rows, chart.column)]];
    if (held) series.push([held.map((h) => x([h[0], h[1], h[2]], run)), run.heldout.filter((h) => h[2] !== null).map((h) => h[2])]);
    return series;
  });
  return parts.length ? uPlot.join(parts.flat().map(sorted)) : [[], [], []];
}

function sorted([xs, ...ys]) {
  const order = xs.map((_, k) => k).sort((a, b) => xs[a] - xs[b]).filter((k, n, all) => n === 0 || xs[k] !== xs[all[n - 1]]);
  return [xs, ...ys].map((c) => order.map((k) => c[k]));
}

function build(chart, runs, data) {
  const host = $(chart.id);
  plots[chart.id]?.plot.destroy();
  const readout = el("output", { class: "readout" });
  host.replaceChildren(el("div", { class: "chart-head" }, el("h3", {}, chart.title), readout));
  const plot = el("div", { role: "img" });
  host.append(plot);
  const series = [{}];
  for (const { k } of runs) {
    const ink = color(k);
    series.push({ stroke: ink + "55", width: 1, points: { show: false }, spanGaps: true }, { stroke: ink, width: 2, points: { show: false }, spanGaps: true });
    if (chart.heldout) series.push({ stroke: css("--held"), width: 0, spanGaps: false, points: { show: true, size: 7, fill: css("--held"), stroke: css("--panel"), width: 1.5 }, paths: () => null });
  }
  const grid = { stroke: css("--grid"), width: 1 };
  const font = "12px system-ui, sans-serif";
  const tick = { ...grid, size: 4 };
  const options = {
    width: Math.max(240, host.clientWidth), height: 200, legend: { show: false },
    padding: [10, 14, 0, 0],
    scales: { x: { time: false }, y: { range: (u, low, high) => (low === null ? [0, 1] : uPlot.rangeNum(chart.heldout ? low : 0, high, 0.08, true)) } },
    series,
    axes: [
      { stroke: css("--muted"), grid: { show: false }, ticks: tick, font, size: 30, values: (u, vs) => vs.map((v) => (axis === "time" ? duration(v).replace(/^0 ms$/, "0") : Number.isInteger(v) || axis !== "step" ? short(v) : "")), space: 80 },
      { stroke: css("--muted"), grid, ticks: { show: false }, font, size: 54, values: (u, vs) => vs.map((v) => (chart.heldout ? String(+v.toFixed(3)) : short(v))) },
    ],
    cursor: { drag: { x: true, y: false }, points: { size: 6 } },
    hooks: {
      setCursor: [(u) => {
        const at = u.cursor.idx;
        if (at === null || at === undefined) return void (readout.textContent = "");
        const step = chart.heldout ? 3 : 2;
        const values = runs.map((r, n) => `${runs.length > 1 ? r.name + " " : ""}${chart.text(u.data[1 + step * n]?.[at])}`);
        readout.textContent = `${shownX(u.data[0][at])}: ${values.join("  ")}`;
      }],
    },
  };
  plots[chart.id] = { plot: new uPlot(options, data, plot), node: plot };
}

function label(chart, runs) {
  const said = runs.map(({ run, name }) => {
    const last = run.curve.at(-1);
    return last ? `${name}: ${chart.text(last[chart.column])} at step ${last[0]}` : `${name}: no step yet`;
  });
  const text = `${chart.title}. ${said.join("; ")}`;
  if (plots[chart.id].node.getAttribute("aria-label") !== text) plots[chart.id].node.setAttribute("aria-label", text);
}

export function legend(runs) {
  const parts = runs.length > 1
    ? runs.map(({ name, k }) => el("span", { class: "key" }, el("i", { style: { background: color(k) } }), name))
    : [el("span", { class: "key" }, el("i", { style: { background: color(runs[0].k) } }), "mean"), el("span", { class: "key" }, el("i", { class: "thin", style: { background: color(runs[0].k) } }), "each step")];
  if (runs.some(({ run }) => run.heldout.length)) parts.push(el("span", { class: "key" }, el("i", { class: "dot" }), "held-out loss"));
  return parts;
}
