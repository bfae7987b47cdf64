// Figures now, and small charts of the last two minutes, from the counters of successive pictures.

import { canvasContext, count, cssColour, el, find, percent } from "./dom.js";

const POINTS = 120;
const PERIOD_MS = 1000;

const per = (counter) => (a, b, seconds) => (b.stats[counter] - a.stats[counter]) / seconds;
const number = (digits, unit) => (value) =>
  value === null ? "–" : `${value.toLocaleString("en", { maximumFractionDigits: digits })}${unit}`;

/** Each chart's value is computed from two pictures, a second apart; null where there is nothing to state. */
const CHARTS = [
  { title: "Tokens", show: number(0, " /s"), value: per("generated_tokens") },
  {
    title: "Time per token", show: number(1, " ms"),
    value: (a, b, seconds) => {
      const tokens = b.stats.generated_tokens - a.stats.generated_tokens;
      const running = (a.stats.running + b.stats.running) / 2;
      return tokens > 0 && running > 0 ? (1000 * seconds * running) / tokens : null;
    },
  },
  {
    title: "Time to first token", show: number(0, " ms"),
    value: (a, b) => {
      const requests = b.first_token.requests - a.first_token.requests;
      return requests > 0 ? (1000 * (b.first_token.seconds - a.first_token.seconds)) / requests : null;
    },
  },
  {
    title: "Prefix hit rate", show: number(0, " %"), most: 100,
    value: (a, b) => {
      const asked = b.stats.prefix_queried_tokens - a.stats.prefix_queried_tokens;
      return asked > 0 ? (100 * (b.stats.prefix_hit_tokens - a.stats.prefix_hit_tokens)) / asked : null;
    },
  },
  {
    title: "Waste in blocks", show: number(1, " %"), most: 100,
    value: (a, b) => waste(b.stats),
  },
  {
    title: "Between tiers", show: number(0, " blocks/s"),
    value: (a, b, seconds) => per("blocks_saved")(a, b, seconds) + per("blocks_loaded")(a, b, seconds),
  },
];

const waste = (stats) =>
  stats.slots_reserved ? (100 * (stats.slots_reserved - stats.slots_written)) / stats.slots_reserved : null;

class Chart {
  constructor({ title, show, value, most }) {
    Object.assign(this, { title, show, value, most, points: new Array(POINTS).fill(null) });
    this.now = el("span", { text: "–" });
    this.canvas = el("canvas", { role: "img" });
    this.element = el("div", { class: "chart" }, el("h3", {}, title, this.now), this.canvas);
  }

  add(point) {
    this.points = [...this.points.slice(1), point];
    const last = this.points.findLast((one) => one !== null) ?? null;
    this.now.textContent = this.show(point ?? last);
    this.canvas.setAttribute("aria-label", `${this.title}: ${this.now.textContent}`);
    this.draw();
  }

  draw() {
    const [width, height] = [this.canvas.clientWidth, 52];
    if (!width) return;
    const context = canvasContext(this.canvas, width, height);
    const most = Math.max(this.most || 0, ...this.points, 1e-9) * 1.08;
    const x = (at) => (at * width) / (POINTS - 1);
    const y = (value) => height - 2 - ((height - 6) * value) / most;
    context.strokeStyle = cssColour("--line");
    context.strokeRect(0, height - 0.5, width, 0);
    context.strokeStyle = context.fillStyle = cssColour("--focus");
    context.lineWidth = 2;
    let begun = null;
    for (let at = 0; at <= POINTS; at++) {
      const value = at < POINTS ? this.points[at] : null;
      if (value === null) {
        if (begun !== null) this.line(context, begun, at, x, y, height);
        begun = null;
      } else if (begun === null) begun = at;
    }
  }

  line(context, begin, end, x, y, height) {
    if (end - begin === 1) {
      context.fillRect(x(begin) - 2, y(this.points[begin]) - 2, 4, 4);
      return;
    }
    context.beginPath();
    for (let at = begin; at < end; at++) context.lineTo(x(at), y(this.points[at]));
    context.stroke();
    context.lineTo(x(end - 1), height);
    context.lineTo(x(begin), height);
    context.globalAlpha = 0.14;
    context.fill();
    context.globalAlpha = 1;
  }
}

export class Figures {
  constructor() {
    this.charts = CHARTS.map((chart) => new Chart(chart));
    find("charts").replaceChildren(...this.charts.map((chart) => chart.element));
    this.before = null;
    this.values = new Map();
    addEventListener("resize", () => this.charts.forEach((chart) => chart.draw()));
  }

  update(picture) {
    this.showNow(picture);
    if (this.before === null) this.before = picture;
    const seconds = (picture.at - this.before.at) / 1000;
    if (1000 * seconds < PERIOD_MS) return;
    const restarted = picture.stats.steps < this.before.stats.steps;
    for (const chart of this.charts) chart.add(restarted ? null : chart.value(this.before, picture, seconds));
    this.before = picture;
  }

  showNow({ stats }) {
    const hits = percent(stats.prefix_hit_tokens, stats.prefix_queried_tokens);
    const below = Object.values(stats.tier_blocks).reduce((sum, blocks) => sum + blocks, 0);
    this.show("Running", `${stats.running}`);
    this.show("Waiting", `${stats.waiting}`);
    this.show("Pool in use", percent(stats.frames_active, stats.frames));
    this.show("Pool cached", percent(stats.frames_cached, stats.frames));
    this.show("Prompt tokens found", hits);
    this.show("Blocks copied on write", stats.copies.toLocaleString("en"));
    if (below || stats.blocks_saved) this.show("In lower tiers", count(below, "block"));
  }

  show(name, text) {
    if (!this.values.has(name)) {
      const value = el("dd");
      this.values.set(name, value);
      find("figures").append(el("div", {}, el("dt", { text: name }), value));
    }
    const value = this.values.get(name);
    if (value.textContent !== text) value.textContent = text;
  }
}
