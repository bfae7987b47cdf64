// Follows /v1/kv_map: keeps the whole picture up to date from events that say what has changed.

import { ApiError, events, send } from "./api.js";

const RETRY_MS = [500, 1000, 2000, 5000];
const INTERVAL_S = 0.25;

const bytesOf = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
const uint16s = (text) => new Uint16Array(bytesOf(text).buffer);
const int32s = (text) => new Int32Array(bytesOf(text).buffer);

/** A tier's cells as rows of numbers; `changed` lists the rows that the last event brought, null for all. */
function readTier(news, before, width) {
  const tier = { ...news, name: news.name, changed: null };
  if (news.changed === undefined) {
    tier.cells = uint16s(news.cells);
    return tier;
  }
  tier.changed = uint16s(news.changed);
  tier.cells = before.cells;
  const rows = uint16s(news.cells);
  tier.changed.forEach((cell, at) => tier.cells.set(rows.subarray(at * width, (at + 1) * width), cell * width));
  return tier;
}

const readTable = (table) => ({ ...table, frames: table.frames.map(int32s), holders: table.holders.map(int32s) });

/** Returns the picture after an event. */
export function apply(picture, event) {
  const next = { ...picture, ...event, at: performance.now() };
  const width = next.columns.length;
  const before = Object.fromEntries((picture?.tiers || []).map((tier) => [tier.name, tier]));
  next.tiers = event.tiers
    ? event.tiers.map((tier) => readTier(tier, before[tier.name], width))
    : picture.tiers.map((tier) => ({ ...tier, changed: new Uint16Array(0) }));
  if (event.tables) next.tables = event.tables.map(readTable);
  return next;
}

export class Feed {
  constructor({ onPicture, onState, onRefused }) {
    this.onPicture = onPicture;
    this.onState = onState;
    this.onRefused = onRefused;
    this.abort = null;
    this.failures = 0;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.start()));
  }

  start() {
    if (this.abort === null && !document.hidden) this.follow();
  }

  stop() {
    this.abort?.abort();
    this.abort = null;
  }

  async follow() {
    const abort = (this.abort = new AbortController());
    let picture = null;
    try {
      const response = await send(`/v1/kv_map?interval_s=${INTERVAL_S}`, { signal: abort.signal });
      for await (const event of events(response)) {
        picture = apply(picture, event);
        this.failures = 0;
        this.onState("live");
        this.onPicture(picture);
      }
      throw new Error("the stream has ended");
    } catch (error) {
      if (this.abort !== abort) return;
      this.abort = null;
      if (error instanceof ApiError && [401, 403].includes(error.status)) {
        this.onState("lost", "No key");
        this.onRefused(error.message);
        return;
      }
      this.onState("lost", error instanceof ApiError ? error.message : "Not connected");
      setTimeout(() => this.start(), RETRY_MS[Math.min(this.failures++, RETRY_MS.length - 1)]);
    }
  }
}
