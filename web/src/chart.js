import uPlot from "uplot";
import { getSeries } from "./api.js";
import { append, positionOf, plotted, stacked, stepAt, xOf } from "./columns.js";
import { element } from "./element.js";
import { compact, duration, number } from "./format.js";
import { lineLabel } from "./groups.js";
import { change, hiddenRuns, state } from "./state.js";
import { say } from "./words.js";

export const COLOURS = ["#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#ec4899", "#14b8a6", "#a16207",
  "#64748b", "#84cc16"];
const DASHES = [undefined, [6, 4], [2, 3], [10, 3, 2, 3]];
const QUIET = new Set(["checkpoint", "evaluation"]);  // frequent: a tick at the bottom
const EVENT_COLOURS = { checkpoint: "#94a3b8", evaluation: "#8b5cf6", resume: "#3b82f6", start: "#3b82f6", spike: "#ef4444",
  rollback: "#ef4444", failure: "#ef4444", "not finite": "#ef4444", stage: "#10b981", done: "#10b981" };
const RELOAD_AFTER = 3000;  // rows added one by one before the chart is reloaded, downsampled
const HEIGHT = 240;
const sync = uPlot.sync("charts");

export class Chart {
  constructor(group, runs, onStep) {
    this.group = group;
    this.runs = runs;
    this.onStep = onStep;
    this.blocks = new Map();  // run -> blocks
    this.plot = null;
    this.visible = false;
    this.legend = element("div", { class: "legend" });
    this.canvas = element("div", { class: "canvas" });
    this.root = element("section", { class: "chart", "data-chart": group.id },
      element("h2", {}, say(group.title)), this.legend, this.canvas);
    this.resized = new ResizeObserver(() => this.plot?.setSize({ width: this.canvas.clientWidth, height: HEIGHT }));
    this.resized.observe(this.canvas);
    this.listen();
  }

  get shown() {
    const hidden = hiddenRuns();
    return this.runs.filter((run) => !hidden.has(run.id) && run.names.some((name) => this.group.names.includes(name)));
  }

  async show() {
    if (this.visible) return;
    this.visible = true;
    await this.reload();
  }

  async reload() {
    if (!this.visible) return;
    const points = Math.max(300, Math.min(1500, Math.round(this.canvas.clientWidth * 1.5)));
    const request = (this.request = {});
    this.late = [];  // rows that arrive before the responses
    const responses = await Promise.all(this.shown.map(async (run) => {
      const names = this.group.names.filter((name) => run.names.includes(name));
      try {
        return [run.id, await getSeries(run.id, names, state.from, state.to, points)];
      } catch {  // a remote run that cannot be read keeps what is drawn
        return [run.id, this.blocks.get(run.id) ?? []];
      }
    }));
    if (request !== this.request) return;  // a later request overtook this one
    this.blocks = new Map(responses);
    this.added = 0;
    const late = this.late;
    this.late = null;
    for (const [run, rows] of late) this.append(run, rows);
    this.draw();
  }

  // Rows that a run has just written.
  add(run, rows) {
    this.late?.push([run, rows]);
    if (!this.append(run, rows)) return;
    if (this.added > RELOAD_AFTER) this.reload();
    else this.update();
  }

  append(run, rows) {
    const block = this.blocks.get(run.id)?.find((one) => Object.keys(one.mean).some((name) => !name.includes("@")));
    if (!this.visible || !block || state.to !== "") return false;
    for (const row of rows) append(block, row, row.tokens ?? (row.step + 1) * (run.batch_tokens ?? 0));
    this.added += rows.length;
    return true;
  }

  // Updates have only the rows of rank 0.
  get ofRanks() {
    return this.group.names.some((name) => name.includes("@"));
  }

  lines() {
    const shown = this.shown, byRun = this.group.names.length === 1 || shown.length === 0;
    return shown.flatMap((run) => (this.blocks.get(run.id) ?? []).flatMap((block) =>
      Object.keys(block.mean).map((name) => ({
        run, name, block,
        begun: run.begun,
        label: [shown.length > 1 ? run.status.name : null, byRun ? null : lineLabel(name)].filter(Boolean).join(" · "),
        colour: COLOURS[(byRun ? run.id : this.group.names.indexOf(name)) % COLOURS.length],
        dash: byRun ? undefined : DASHES[run.id % DASHES.length],
      }))));
  }

  // Several runs are lines: their stacks would hide each other.
  table() {
    const lines = this.lines(), stacks = this.stacks = this.group.stacked && lines.length > 0 && lines.every((line) => line.block === lines[0].block);
    if (stacks) lines.sort((a, b) => this.group.names.indexOf(a.name) - this.group.names.indexOf(b.name));
    return (stacks ? stacked : plotted)(lines, this.options());
  }

  options() {
    return { axis: state.x, smooth: this.group.exact || this.group.stacked ? 0 : Number(state.smooth), scale: this.group.percent ? 100 : 1, logx: Boolean(state.logx), logy: Boolean(state.logy) };
  }

  update() {
    if (!this.plot) return this.draw();
    const { data, series } = this.table();
    if (series.length !== this.plot.series.length) return this.draw();
    series.forEach(({ own }, column) => { this.plot.series[column].own = own; });
    this.plot.setData(data);
    this.readOut(this.plot);
  }

  draw() {
    this.plot?.destroy();
    const { data, series, bands } = this.table();
    this.root.classList.toggle("empty", data[0].length === 0);
    const style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue("--ink-soft").trim(), grid = style.getPropertyValue("--grid").trim();
    const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "11px system-ui" };
    const shown = { step: compact, tokens: compact, time: duration }[state.x];
    this.plot = new uPlot({
      width: this.canvas.clientWidth,
      height: HEIGHT,
      series, bands,
      padding: [10, 10, 0, 0],
      scales: { x: { time: false, distr: state.logx ? 3 : 1, ...this.rangeOfPoint(data[0]) }, y: this.scaleY(data) },
      axes: [
        { ...axis, size: 28, values: (_, splits) => splits.map((value) => (value == null ? "" : shown(value))) },
        { ...axis, size: 52, values: (_, splits) => splits.map((value) => (value == null ? "" : compact(value))) },
      ],
      legend: { show: false },
      cursor: {
        sync: { key: sync.key, scales: ["x", null] },
        drag: { x: true, y: false, setScale: false },
        points: { size: 6 },
        focus: { prox: 24 },
      },
      hooks: {
        setSelect: [(plot) => this.zoom(plot)],
        setCursor: [(plot) => this.readOut(plot)],
        drawClear: [(plot) => this.drawEvents(plot)],
      },
    }, data, this.canvas);
    this.readOut(this.plot);
    performance.mark(`drawn ${this.group.id}`);  // for benchmarks
  }

  // A single point has no range of its own: the axis of steps is that of the run.
  rangeOfPoint(x) {
    if (state.logx || x.length !== 1) return {};
    const last = state.x === "step" ? Math.max(...this.shown.map((run) => run.status.step ?? 0)) : 0;
    return { range: () => (last >= x[0] ? [0, last || 1] : around(x[0], x[0])) };
  }

  scaleY(data) {
    if (this.stacks) return { range: (_, low, high) => [0, 1.05 * high] };
    if (state.logy) return { distr: 3 };
    if (this.group.percent) return { range: (_, low, high) => [0, high == null ? 100 : Math.min(100, 1.1 * high) || 1] };
    return data.slice(1).some((column) => new Set(column.filter((value) => value != null)).size > 1) ? {} : { range: (_, low, high) => around(low, high) };
  }

  // On the container, which outlives the plots.
  listen() {
    let downAt = 0, moved = false, waiting = 0;
    this.canvas.addEventListener("mousedown", (event) => { downAt = event.clientX; });
    this.canvas.addEventListener("mouseup", (event) => { moved = Math.abs(event.clientX - downAt) > 3; });
    this.canvas.addEventListener("click", (event) => {
      clearTimeout(waiting);
      if (!moved) waiting = setTimeout(() => this.open(event.clientX), 300);  // unless it becomes a double click
    });
    this.canvas.addEventListener("dblclick", () => {
      clearTimeout(waiting);
      change({ from: "", to: "" });
    });
  }

  zoom(plot) {
    if (plot.select.width < 4) return;
    const first = plot.posToVal(plot.select.left, "x"), last = plot.posToVal(plot.select.left + plot.select.width, "x");
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    const [line] = this.lines();
    if (!line) return;
    const x = xOf(line.block, state.x, line.begun);
    const from = stepAt(first, line.block, x), to = stepAt(last, line.block, x);
    if (to > from) change({ from: String(from), to: String(to) });
  }

  // The step under the pointer; where rows are downsampled, the one with the largest value.
  async open(clientX) {
    const [line] = this.lines();
    const { left, width } = this.plot.over.getBoundingClientRect();
    if (!line || clientX < left || clientX > left + width) return;
    const x = xOf(line.block, state.x, line.begun);
    const step = stepAt(this.plot.posToVal(clientX - left, "x"), line.block, x);
    if (!line.block.low) return this.onStep(line.run, step);
    const row = line.block.steps.findIndex((one) => one >= step);
    const around = [line.block.steps[Math.max(0, row - 1)], line.block.steps[Math.min(x.length - 1, row + 1)]];
    const [raw] = await getSeries(line.run.id, [line.name], Math.floor(around[0]), Math.ceil(around[1]), 20000);
    const values = raw.mean[line.name].map((value) => value ?? -Infinity);
    this.onStep(line.run, raw.steps[values.indexOf(Math.max(...values))], true);
  }

  readOut(plot) {
    const over = plot.cursor.idx != null, idx = plot.cursor.idx ?? plot.data[0].length - 1;
    const reach = over ? 200 : Infinity, total = near(plot.data.at(-1), idx, reach);
    const shareOf = (value) => (this.stacks && total ? ` (${Math.round((100 * value) / total)}%)` : "");
    // What was recorded; the line is smoothed.
    const valuesOf = (series, column) => series.own ?? plot.data[plot.series[column + 1]?.raw ? column + 1 : column];
    const items = plot.series.map((series, column) => [series.line, near(valuesOf(series, column), idx, reach)])
      .filter(([line]) => line).map(([line, value]) => element("span", {},
        element("i", { style: `background:${line.colour}` }), line.label, " ", element("b", {}, number(value)), shareOf(value)));
    const where = { step: (x) => say("step {}").replace("{}", Math.round(x)), tokens: compact, time: duration }[state.x];
    const x = plot.data[0][idx];
    const event = !over ? null : this.eventNear(plot, plot.cursor.left);
    if (event) items.push(element("span", { class: "event" }, `${say(event.event)} ${event.step ?? ""}`));
    this.legend.replaceChildren(element("span", { class: "where" }, x == null ? "" : where(x)), ...items);
  }

  // [event, place on the axis] of the runs that are shown.
  marks() {
    return this.shown.flatMap((run) => {
      const block = this.blocks.get(run.id)?.[0];
      if (!block || !block.steps.length) return [];
      const x = xOf(block, state.x, run.begun);
      const place = (event) => (state.x === "time" && event.time ? event.time - run.begun : positionOf(event.step, block, x));
      return run.events.filter((event) => event.step != null && event.step >= block.steps[0] - 1)
        .map((event) => [event, place(event)]);
    });
  }

  eventNear(plot, left) {
    return this.marks().find(([, place]) => Math.abs(plot.valToPos(place, "x") - left) < 5)?.[0];
  }

  drawEvents(plot) {
    const { ctx, bbox } = plot, ratio = devicePixelRatio;
    ctx.save();
    for (const [event, place] of this.marks()) {
      const at = Math.round(plot.valToPos(place, "x", true));
      if (!(at >= bbox.left && at <= bbox.left + bbox.width)) continue;
      ctx.strokeStyle = ctx.fillStyle = EVENT_COLOURS[event.event] ?? "#a855f7";
      ctx.lineWidth = ratio;
      if (QUIET.has(event.event)) {
        ctx.fillRect(at - ratio, bbox.top + bbox.height - 6 * ratio, 2 * ratio, 6 * ratio);
        continue;
      }
      ctx.globalAlpha = 0.55;
      ctx.setLineDash([4 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(at, bbox.top);
      ctx.lineTo(at, bbox.top + bbox.height);
      ctx.stroke();
      ctx.globalAlpha = 1;
      ctx.beginPath();
      ctx.arc(at, bbox.top + 4 * ratio, 3 * ratio, 0, 7);
      ctx.fill();
    }
    ctx.restore();
  }

  remove() {
    this.resized.disconnect();
    this.plot?.destroy();
    this.root.remove();
  }
}

// A tenth more on both sides, for values that hardly differ.
function around(low, high) {
  if (low == null) return [0, 1];
  const margin = 0.1 * Math.max(Math.abs(low), Math.abs(high)) || 1;
  return [low < 0 ? low - margin : Math.max(0, low - margin), high + margin];
}

// The value at a row, or the last one before it: columns of several runs have gaps.
function near(values, idx, reach) {
  for (let row = Math.min(idx, values.length - 1); row >= 0 && row > idx - reach; row--)
    if (values[row] != null) return values[row];
  return null;
}
