// A tour of five steps on the live system: each step runs what it tells of.

import { ApiError, events, send } from "./api.js";
import { el, find } from "./dom.js";

const STORY = "Long ago, in a harbour town by a grey sea, there lived a clockmaker who repaired the clocks of ships. ".repeat(5);
const ENDS = ["One morning a captain came and", "In winter, when the sea froze,", "Her best apprentice, a quiet girl,"];
const TOKENS = 200;

const STEPS = [
  {
    title: "Memory in equal blocks",
    text: "While a model writes, it keeps notes on every token: keys and values. pagemill cuts that memory into equal blocks, as an operating system does with pages. Each square is one block.",
    target: "map-card",
  },
  {
    title: "A table for each request",
    text: "A request has just been started. Its table says which block holds which part of its text. Blocks may lie anywhere, and the next is taken only when the last is full. Point at one to see where it lies.",
    target: "requests-card",
    run: (tour) => tour.complete(STORY + ENDS[0]),
  },
  {
    title: "Equal beginnings are kept once",
    text: "Three requests begin with the same story and go on differently. The beginning is computed once: its blocks have several holders, and each request takes only the blocks of its own end.",
    target: "requests-card",
    run: (tour) => ENDS.forEach((end) => tour.complete(STORY + end)),
  },
  {
    title: "Fork, and copy on write",
    text: "One request has forked into three answers. A fork copies nothing: all share every block. Only when they write different words into the same block is that one block copied.",
    target: "requests-card",
    run: (tour) => tour.complete(STORY + ENDS[1], 3),
  },
  {
    title: "What is done is kept",
    text: "Finished requests leave their blocks cached. Whoever begins alike finds them; when room is needed, the least used go first, to host memory or disk if you gave some. Pinned ones stay. Now try it yourself under Chat.",
    target: "tree-card",
  },
];

export class Tour {
  constructor(element, showTab) {
    this.element = element;
    this.showTab = showTab;
    this.step = -1;
    this.abort = null;
    element.addEventListener("keydown", (event) => this.key(event));
  }

  start() {
    this.back = document.activeElement;
    this.show(0);
  }

  key(event) {
    if (event.key === "Escape") this.end();
    else if (event.key === "ArrowRight" && this.step < STEPS.length - 1) this.show(this.step + 1);
    else if (event.key === "ArrowLeft" && this.step > 0) this.show(this.step - 1);
    else return;
    event.preventDefault();
  }

  show(step) {
    this.leave();
    this.step = step;
    this.showTab("memory");
    const { title, text, target, run } = STEPS[step];
    const last = step === STEPS.length - 1;
    this.status = el("p", { class: "status", role: "status" });
    this.next = el("button", { class: "strong", type: "button", onclick: () => (last ? this.end() : this.show(step + 1)) }, last ? "Done" : "Next");
    this.element.replaceChildren(
      el("p", { class: "note" }, `Step ${step + 1} of ${STEPS.length}`),
      el("h2", { id: "tour-title", text: title }),
      el("p", { id: "tour-text", text }),
      this.status,
      el(
        "div", { class: "row" },
        el("button", { type: "button", class: "quiet", onclick: () => this.end() }, "Close"),
        el(
          "span", { class: "row" },
          el("button", { type: "button", disabled: step === 0, onclick: () => this.show(step - 1) }, "Back"),
          this.next,
        ),
      ),
    );
    this.element.hidden = false;
    this.next.focus({ preventScroll: true });
    this.target = find(target);
    this.target.classList.add("toured");
    this.target.scrollIntoView({ block: "center" });
    this.abort = new AbortController();
    run?.(this);
  }

  leave() {
    this.abort?.abort();
    this.target?.classList.remove("toured");
  }

  end() {
    this.leave();
    this.step = -1;
    this.element.hidden = true;
    this.back?.focus();
  }

  /** Shows what the step's requests are doing. */
  update({ stats }) {
    if (this.step < 0 || !STEPS[this.step].run || this.failed) return;
    const now = `${stats.running} running, ${stats.frames_active} blocks in use, ${stats.copies} copied so far`;
    if (this.status.textContent !== now) this.status.textContent = now;
  }

  /** Runs a completion, whose text nobody reads, until it ends or the step is left. */
  async complete(prompt, n = 1) {
    this.failed = false;
    const body = { prompt, n, max_tokens: TOKENS, temperature: 0.9, ignore_eos: true, stream: true };
    const { signal } = this.abort;
    try {
      for await (const _ of events(await send("/v1/completions", { method: "POST", body, signal }))) if (signal.aborted) return;
    } catch (error) {
      if (signal.aborted) return;
      this.failed = true;
      this.status.textContent = error instanceof ApiError ? error.message : "The server did not answer.";
    }
  }
}
