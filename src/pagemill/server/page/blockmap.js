// The block map of one tier: a cell per block, or per so many blocks, drawn anew where something has changed.

import { canvasContext, count, cssColour, el } from "./dom.js";
import { STATES, drawFree, fill, sharingLook, tenantLook } from "./palette.js";

const GAP = 1;
const LARGEST = 26;
const FLASH_MS = 700;
const MOST_FLASHES = 300;
const calm = matchMedia("(prefers-reduced-motion: reduce)");

export class BlockMap {
  constructor(name, onPoint) {
    this.title = el("h3");
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.over = el("canvas", { class: "over", tabindex: "0", role: "application" });
    this.element = el("div", { class: "tier" }, this.title, el("div", { class: "map" }, this.canvas, this.over));
    this.name = name;
    this.onPoint = onPoint;
    this.cell = -1;
    this.lit = [];
    this.flashes = new Map();
    this.drawing = false;
    this.over.addEventListener("pointermove", (event) => this.point(this.cellAt(event)));
    this.over.addEventListener("pointerdown", (event) => this.point(this.cellAt(event)));
    this.over.addEventListener("pointerleave", () => this.point(-1));
    this.over.addEventListener("blur", () => this.point(-1));
    this.over.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.redraw()).observe(this.element);
  }

  /** Takes a new picture. Only cells that have changed are drawn, unless what they show is another thing now. */
  update(picture, tier, mode) {
    const same = this.tier && this.mode === mode && this.tier.num_frames === tier.num_frames &&
      this.tier.frames_per_cell === tier.frames_per_cell;
    [this.picture, this.tier, this.mode] = [picture, tier, mode];
    this.width = picture.columns.length;
    this.numCells = tier.cells.length / this.width;
    if (!same) {
      this.describe();
      this.redraw();
    } else if (tier.changed === null) {
      this.draw(null);
    } else {
      this.draw(tier.changed);
      if (tier.changed.length <= MOST_FLASHES && !calm.matches) {
        tier.changed.forEach((cell) => this.flashes.set(cell, picture.at));
        this.animate();
      }
    }
    if (this.cell >= 0) this.onPoint(this, this.cell);
  }

  describe() {
    const { num_frames, frames_per_cell } = this.tier;
    const where = { device: "KV pool", host: "Host memory, streamed", disk: "Disk, streamed" }[this.name] || this.name;
    const each = frames_per_cell > 1 ? `, ${frames_per_cell} to a square` : "";
    this.title.textContent = `${where}: ${count(num_frames, "block")}${each}`;
    this.over.setAttribute("aria-label", `${this.title.textContent}. Arrow keys move from block to block.`);
  }

  redraw() {
    if (!this.tier || !this.element.clientWidth) return;
    const width = this.element.clientWidth;
    const area = (width * Math.min(420, 0.62 * width)) / Math.max(1, this.numCells);
    this.size = Math.max(4, Math.min(LARGEST, Math.floor(Math.sqrt(area))));
    this.perRow = Math.max(1, Math.floor((width + GAP) / this.size));
    const height = Math.ceil(this.numCells / this.perRow) * this.size;
    this.context = canvasContext(this.canvas, width, height);
    this.overContext = canvasContext(this.over, width, height);
    this.draw(null);
    this.drawOver();
  }

  draw(cells) {
    if (!this.context) return;
    if (cells) cells.forEach((cell) => this.drawCell(cell));
    else for (let cell = 0; cell < this.numCells; cell++) this.drawCell(cell);
  }

  corner(cell) {
    return [(cell % this.perRow) * this.size, Math.floor(cell / this.perRow) * this.size];
  }

  framesIn(cell) {
    const { num_frames, frames_per_cell } = this.tier;
    return Math.min(frames_per_cell, num_frames - cell * frames_per_cell);
  }

  /** Returns a cell's numbers: blocks by state, its owner, and the most holders of one of its blocks. */
  read(cell) {
    const row = this.tier.cells.subarray(cell * this.width, (cell + 1) * this.width);
    const states = row.subarray(0, this.width - 2);
    return { states, used: states.reduce((a, b) => a + b, 0), owner: row[this.width - 2], holders: row[this.width - 1] };
  }

  drawCell(cell) {
    const [x, y] = this.corner(cell);
    const size = this.size - GAP;
    drawFree(this.context, x, y, size);
    const { states, used, owner, holders } = this.read(cell);
    if (!used) return;
    const whole = this.framesIn(cell);
    const full = Math.max(1, Math.round((size * used) / whole));
    if (this.mode === "tenant") {
      fill(this.context, x, y + size - full, size, full, tenantLook(owner, this.picture.owners));
    } else if (this.mode === "sharing") {
      fill(this.context, x, y + size - full, size, full, sharingLook(holders));
    } else {
      let [bottom, seen] = [y + size, 0];
      for (let state = states.length - 1; state >= 0; state--) {
        if (!states[state]) continue;
        seen += states[state];
        const top = y + size - Math.max(1, Math.round((size * seen) / whole));
        if (top < bottom) fill(this.context, x, top, size, bottom - top, STATES[state + 1]);
        bottom = Math.min(bottom, top);
      }
    }
  }

  /** Marks the frames of a block table, or none. */
  light(frames) {
    const { first_frame, num_frames, frames_per_cell } = this.tier;
    const cells = frames
      .filter((frame) => frame >= first_frame && frame < first_frame + num_frames)
      .map((frame) => Math.floor((frame - first_frame) / frames_per_cell));
    this.lit = [...new Set(cells)];
    this.drawOver();
  }

  animate() {
    if (this.drawing) return;
    this.drawing = true;
    requestAnimationFrame(() => {
      this.drawing = false;
      this.drawOver();
      if (this.flashes.size) this.animate();
    });
  }

  drawOver() {
    const context = this.overContext;
    if (!context) return;
    context.clearRect(0, 0, this.over.width, this.over.height);
    const [now, size] = [performance.now(), this.size - GAP];
    context.fillStyle = cssColour("--flash");
    for (const [cell, since] of this.flashes) {
      const left = 1 - (now - since) / FLASH_MS;
      if (left <= 0 || cell >= this.numCells) {
        this.flashes.delete(cell);
        continue;
      }
      context.globalAlpha = 0.45 * left;
      context.fillRect(...this.corner(cell), size, size);
    }
    context.globalAlpha = 1;
    if (this.lit.length) {
      context.lineWidth = 2;
      context.strokeStyle = cssColour("--flash");
      for (const cell of this.lit) {
        const [x, y] = this.corner(cell);
        context.strokeRect(x, y, size, size);
      }
    }
    if (this.cell >= 0) {
      const [x, y] = this.corner(this.cell);
      context.lineWidth = 3;
      context.strokeStyle = cssColour("--focus");
      context.strokeRect(x - 0.5, y - 0.5, size + 1, size + 1);
    }
  }

  cellAt(event) {
    const box = this.over.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.size);
    const cell = Math.floor((event.clientY - box.top) / this.size) * this.perRow + column;
    return column >= 0 && column < this.perRow && cell >= 0 && cell < this.numCells ? cell : -1;
  }

  point(cell) {
    if (cell === this.cell) return;
    this.cell = cell;
    this.drawOver();
    this.onPoint(this, cell);
  }

  key(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.perRow, ArrowDown: this.perRow };
    const ends = { Home: 0, End: this.numCells - 1 };
    let cell = this.cell;
    if (event.key in steps) cell = cell < 0 ? 0 : cell + steps[event.key];
    else if (event.key in ends) cell = ends[event.key];
    else return;
    event.preventDefault();
    if (cell >= 0 && cell < this.numCells) this.point(cell);
  }
}
