// What the colours of the map mean, with how many blocks have each now.

import { canvasContext, count, el, find } from "./dom.js";
import { SHARING, STATES, drawFree, fill, tenantLook } from "./palette.js";

function swatch(look) {
  const canvas = el("canvas", { width: "16", height: "16", "aria-hidden": "true" });
  const context = canvasContext(canvas, 16, 16);
  if (look.key === "free") drawFree(context, 0, 0, 16);
  else fill(context, 0, 0, 16, 16, look);
  return canvas;
}

/** Returns how many blocks of all tiers are in each state, free first. */
export function countStates(picture) {
  const totals = new Array(STATES.length).fill(0);
  for (const tier of picture.tiers) {
    const width = picture.columns.length;
    let used = 0;
    for (let at = 0; at < tier.cells.length; at += width) {
      for (let state = 0; state < width - 2; state++) {
        totals[state + 1] += tier.cells[at + state];
        used += tier.cells[at + state];
      }
    }
    totals[0] += tier.num_frames - used;
  }
  return totals;
}

let shown = "";

export function showLegend(picture, mode) {
  const totals = countStates(picture);
  const looks =
    mode === "tenant"
      ? Object.keys(picture.owners).map((owner) => tenantLook(owner, picture.owners))
      : mode === "sharing"
        ? SHARING
        : STATES;
  const kind = `${mode} ${looks.map((look) => look.label)} ${matchMedia("(prefers-color-scheme: dark)").matches}`;
  if (kind !== shown) {
    shown = kind;
    find("legend").replaceChildren(
      ...looks.map((look) => el("li", { title: look.about }, swatch(look), look.label, el("span", { class: "count" }))),
    );
  }
  if (mode !== "state") return;
  find("legend").querySelectorAll(".count").forEach((place, state) => {
    place.textContent = totals[state].toLocaleString("en");
    place.title = count(totals[state], "block");
  });
}

/** Says in words what a cell holds. */
export function describeCell(map, cell) {
  const { states, used, owner, holders } = map.read(cell);
  const [first, whole] = [map.tier.first_frame + cell * map.tier.frames_per_cell, map.framesIn(cell)];
  const owned = owner ? `, of ${tenantLook(owner, map.picture.owners).label}` : "";
  if (whole === 1) {
    const state = STATES[used ? states.findIndex((number) => number > 0) + 1 : 0];
    const held = holders > 1 ? ` It has ${holders} holders.` : "";
    return `Block ${first}${owned}: ${state.label.toLowerCase()}, ${state.about}.${held}`;
  }
  const parts = [...states].map((number, at) => (number ? `${number} ${STATES[at + 1].label.toLowerCase()}` : ""));
  const most = holders > 1 ? ` One of them has ${holders} holders.` : "";
  return `Blocks ${first} to ${first + whole - 1}: ${[`${whole - used} free`, ...parts.filter(Boolean)].join(", ")}.${most}`;
}
