// The blocks of a conversation: while it is answered, its table; between two turns, where its blocks lie.

import { getJson } from "./api.js";
import { count, el } from "./dom.js";
import { Strip } from "./tables.js";

const MOST_EVENTS = 8;
const LOOK_MS = 1500;
const TIERS = { device: "cached in the KV pool", host: "swapped to host memory", disk: "swapped to disk" };

/** Returns what has happened to a table's entries between two pictures, in words. */
export function whatHappened(before, now) {
  const found = [];
  now.frames.forEach((frames, group) => {
    const old = before.frames[group] || [];
    frames.forEach((frame, at) => {
      const entry = at + now.first_entry;
      const was = old[entry - before.first_entry];
      if (was === undefined || was < 0 || frame < 0 || was === frame) return;
      const shared = before.holders[group][entry - before.first_entry] > 1;
      found.push(
        shared ? `Entry ${entry} copied on write: block ${was} stays with the others, block ${frame} is its own`
          : `Entry ${entry} moved from block ${was} to ${frame}`,
      );
    });
  });
  const more = now.num_entries - before.num_entries;
  if (more > 0) found.push(`${count(more, "block")} taken: ${count(now.num_entries, "entry", "entries")} now`);
  return found;
}

export class ChatBlocks {
  constructor() {
    this.words = el("p", { class: "readout", "aria-live": "polite" });
    this.place = el("div");
    this.events = el("ol", { class: "events" });
    this.strips = new Map();
    this.element = el(
      "aside", { class: "card blocks", "aria-labelledby": "blocks-title" },
      el("h2", { id: "blocks-title" }, "Blocks of this conversation"), this.place, this.words,
      el("h3", {}, "What happened"), this.events,
    );
    this.forget();
  }

  forget() {
    this.before = null;
    this.lookedAt = 0;
    this.events.replaceChildren();
    this.put(el("p", { class: "empty" }, "Write something: its blocks appear here as they are taken, shared and copied."));
  }

  /** Shows these in place of what was shown, and no longer tells of what was pointed at there. */
  put(...elements) {
    this.strips.clear();
    this.words.textContent = "";
    this.place.replaceChildren(...elements);
  }

  tell(text) {
    this.events.prepend(el("li", { text }));
    while (this.events.children.length > MOST_EVENTS) this.events.lastChild.remove();
  }

  update(picture, conversation) {
    const table = picture.tables.find((one) => one.kind === "request" && one.name === conversation.requestId);
    if (!table) {
      this.look(conversation);
      return;
    }
    if (!this.strips.has(table.name)) {
      const strip = new Strip((_, words) => (this.words.textContent = words));
      this.put(strip.element);
      this.strips.set(table.name, strip);
      const shared = table.holders[0]?.filter((holders) => holders > 1).length;
      if (table.running) this.tell(`Begun with ${count(table.num_entries, "block")}${shared ? `, ${shared} of them shared` : ""}`);
    } else if (this.before?.name === table.name) {
      for (const words of whatHappened(this.before, table)) this.tell(words);
    }
    this.before = table;
    this.strips.get(table.name).update(table, picture.block_size);
    this.lookedAt = 0;
  }

  /** Shows where a conversation's blocks lie that nobody holds now. */
  async look(conversation) {
    if (conversation.running || !conversation.synced || performance.now() - this.lookedAt < LOOK_MS) return;
    this.lookedAt = performance.now();
    let card;
    try {
      card = await getJson(`/v1/sessions/${encodeURIComponent(conversation.id)}`);
    } catch {
      return;
    }
    if (conversation.running) return;
    const rows = Object.entries(card.kv_blocks).map(([tier, blocks]) =>
      el("li", {}, el("b", { text: blocks.toLocaleString("en") }), ` ${TIERS[tier] || tier}`),
    );
    const now = Object.entries(card.kv_blocks).map(([tier, blocks]) => `${blocks} ${tier}`).join(", ");
    if (this.resting && this.resting !== `${conversation.id} ${now}` && this.resting.startsWith(`${conversation.id} `)) {
      this.tell(`Between two turns: ${now}`);
    }
    this.resting = `${conversation.id} ${now}`;
    this.put(
      el("p", { class: "hint" }, `${count(card.num_tokens, "token")}, held by nobody until the next turn finds them:`),
      el("ul", { class: "places" }, ...rows),
    );
  }
}
