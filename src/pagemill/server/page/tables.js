// Block tables: for each request or pin, its blocks in the order of its text, and where each lies.

import { canvasContext, count, cssColour, el, find } from "./dom.js";
import { STATES, drawFree, fill } from "./palette.js";

const SIZE = 13;
const GAP = 1;
const LONGEST = 26;
const look = Object.fromEntries(STATES.map((state) => [state.key, state]));

/** Returns how an entry of a table looks: whether others hold it too, and whether it is a pin's. */
export function entryLook(table, group, entry) {
  if (table.kind === "pin") return look.pinned;
  return table.holders[group][entry] > 1 ? look.shared : look.active;
}

/** One table as a strip of squares. */
export class Strip {
  /** onPoint(frames, words): called with what is pointed at; no frames for nothing. */
  constructor(onPoint) {
    this.title = el("b");
    this.note = el("span", { class: "note" });
    this.canvas = el("canvas", { tabindex: "0", role: "img" });
    this.element = el("div", { class: "request" }, el("div", { class: "row" }, this.title, this.note), this.canvas);
    this.at = -1;
    this.onPoint = onPoint;
    this.canvas.addEventListener("pointermove", (event) => this.point(this.entryAt(event)));
    this.canvas.addEventListener("pointerdown", (event) => this.point(this.entryAt(event)));
    this.canvas.addEventListener("pointerleave", () => this.point(-1));
    this.canvas.addEventListener("focus", () => this.point(0));
    this.canvas.addEventListener("blur", () => this.point(-1));
    this.canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      this.point(Math.max(0, Math.min(this.length - 1, this.at + step)));
    });
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  get length() {
    return this.table.frames.length ? this.table.frames[0].length * this.table.frames.length : 0;
  }

  update(table, blockSize) {
    [this.table, this.blockSize] = [table, blockSize];
    const shared = table.holders.reduce((sum, group) => sum + group.filter((holders) => holders > 1).length, 0);
    const suffix = table.index ? ` · ${table.index}` : "";
    const what = `${table.kind === "pin" ? "Pin " : ""}${table.name}${suffix}`;
    this.title.textContent = what.length > LONGEST ? `${what.slice(0, LONGEST - 2)}…${suffix}` : what;
    this.title.title = what;
    this.note.textContent = table.running
      ? `${count(table.num_tokens, "token")}, ${count(this.length + table.first_entry * table.frames.length, "block")}` +
        (shared ? `, ${shared} shared` : "")
      : `${count(table.num_tokens, "token")}, waiting`;
    this.canvas.hidden = !this.length;
    this.canvas.setAttribute("aria-label", `Block table of ${what}: ${this.note.textContent}`);
    this.draw();
    if (this.at >= 0) this.tell();
  }

  draw() {
    if (!this.table || !this.length || !this.element.clientWidth) return;
    this.perRow = Math.max(1, Math.floor(this.element.clientWidth / SIZE));
    const context = canvasContext(this.canvas, this.element.clientWidth, Math.ceil(this.length / this.perRow) * SIZE);
    for (let at = 0; at < this.length; at++) {
      const [x, y] = [(at % this.perRow) * SIZE, Math.floor(at / this.perRow) * SIZE];
      const [group, entry] = this.place(at);
      if (this.table.frames[group][entry] < 0) drawFree(context, x, y, SIZE - GAP);
      else fill(context, x, y, SIZE - GAP, SIZE - GAP, entryLook(this.table, group, entry));
      if (at !== this.at) continue;
      context.lineWidth = 2;
      context.strokeStyle = cssColour("--focus");
      context.strokeRect(x + 1, y + 1, SIZE - 3, SIZE - 3);
    }
  }

  place(at) {
    const length = this.table.frames[0].length;
    return [Math.floor(at / length), at % length];
  }

  entryAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / SIZE);
    const at = Math.floor((event.clientY - box.top) / SIZE) * this.perRow + column;
    return column < this.perRow && at < this.length ? at : -1;
  }

  point(at) {
    if (at === this.at) return;
    this.at = at;
    this.draw();
    this.tell();
  }

  tell() {
    if (this.at < 0 || this.at >= this.length) {
      this.onPoint([], "");
      return;
    }
    const [group, entry] = this.place(this.at);
    const [frame, holders] = [this.table.frames[group][entry], this.table.holders[group][entry]];
    const [number, groups] = [entry + this.table.first_entry, this.table.frames.length];
    const last = Math.min((number + 1) * this.blockSize, this.table.num_tokens);
    const layers = groups > 1 ? ` of layer group ${group}` : "";
    const tokens = `tokens ${number * this.blockSize + 1} to ${last}`;
    if (frame < 0) this.onPoint([], `Entry ${number}${layers} (${tokens}) is out of the window: nothing is held.`);
    else {
      const shared = holders > 1 ? `, held by ${holders} at once` : "";
      this.onPoint([frame], `Entry ${number}${layers} (${tokens}) lies in block ${frame}${shared}.`);
    }
  }
}

export class Tables {
  constructor(onPoint) {
    this.onPoint = onPoint;
    this.strips = new Map();
    this.empty = el("p", { class: "empty" }, "Nothing runs now. Start the tour, or write something under Chat.");
  }

  update(picture) {
    const place = find("requests");
    const names = picture.tables.map((table) => `${table.kind} ${table.name} ${table.index}`);
    for (const [name, strip] of this.strips) {
      if (names.includes(name)) continue;
      strip.point(-1);
      this.strips.delete(name);
    }
    picture.tables.forEach((table, at) => {
      if (!this.strips.has(names[at])) this.strips.set(names[at], new Strip(this.onPoint));
    });
    const elements = names.length ? names.map((name) => this.strips.get(name).element) : [this.empty];
    if (elements.length !== place.children.length || elements.some((one, at) => place.children[at] !== one)) {
      place.replaceChildren(...elements);
    }
    picture.tables.forEach((table, at) => this.strips.get(names[at]).update(table, picture.block_size));
    const more = picture.num_tables - picture.tables.length;
    find("requests-count").textContent = more ? `and ${more} more` : "";
  }
}
