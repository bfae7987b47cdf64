// Colours that people with any colour vision tell apart (Okabe and Ito), each with a pattern of its own.

import { cssColour } from "./dom.js";

export const STATES = [
  { key: "free", label: "Free", about: "holds nothing" },
  { key: "cached", label: "Cached", about: "kept for whoever begins alike; makes room when it must", colour: "#56b4e9", pattern: "hatch" },
  { key: "active", label: "In use", about: "held by one request", colour: "#009e73", pattern: "plain" },
  { key: "shared", label: "Shared", about: "held by several requests at once, stored once", colour: "#e69f00", pattern: "dot" },
  { key: "pinned", label: "Pinned", about: "never makes room", colour: "#cc79a7", pattern: "cross" },
  { key: "loading", label: "Loading", about: "on its way from a lower tier", colour: "#d55e00", pattern: "bars" },
];
const TENANTS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"];
const PATTERNS = ["plain", "hatch", "dot", "cross", "bars"];
export const SHARING = [
  { key: 1, label: "1 holder", colour: "#8fcdf0", pattern: "plain" },
  { key: 2, label: "2", colour: "#3d97cc", pattern: "hatch" },
  { key: 3, label: "3 or 4", colour: "#e69f00", pattern: "dot" },
  { key: 5, label: "5 or more", colour: "#d55e00", pattern: "cross" },
];
const UNHELD = { label: "Held by nobody", colour: "#a9b4b1", pattern: "plain" };

/** Returns the look of an owner's blocks. Colours come round again with another pattern. */
export function tenantLook(owner, names) {
  const place = Object.keys(names).indexOf(String(owner));
  if (place < 0) return { label: "Another tenant", colour: "#8a9794", pattern: "bars" };
  return {
    label: names[owner],
    colour: TENANTS[place % TENANTS.length],
    pattern: PATTERNS[Math.floor(place / TENANTS.length) % PATTERNS.length],
  };
}

export function sharingLook(holders) {
  if (!holders) return UNHELD;
  return SHARING.findLast((look) => holders >= look.key);
}

/** Fills a square with a look. Patterns appear where there is room for them. */
export function fill(context, x, y, width, height, look) {
  context.fillStyle = look.colour;
  context.fillRect(x, y, width, height);
  if (width < 7 || height < 7 || look.pattern === "plain") return;
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = context.fillStyle = "rgba(0, 0, 0, 0.55)";
  context.lineWidth = 1.2;
  context.beginPath();
  if (look.pattern === "hatch") {
    context.strokeStyle = "rgba(255, 255, 255, 0.85)";
    for (let at = -height; at < width; at += 5) {
      context.moveTo(x + at, y + height);
      context.lineTo(x + at + height, y);
    }
  } else if (look.pattern === "dot") {
    context.arc(x + width / 2, y + height / 2, Math.min(width, height) / 5, 0, 7);
    context.fill();
    context.beginPath();
  } else if (look.pattern === "cross") {
    context.moveTo(x + 2, y + 2);
    context.lineTo(x + width - 2, y + height - 2);
    context.moveTo(x + width - 2, y + 2);
    context.lineTo(x + 2, y + height - 2);
  } else if (look.pattern === "bars") {
    for (let at = 2; at < height; at += 4) {
      context.moveTo(x, y + at);
      context.lineTo(x + width, y + at);
    }
  }
  context.stroke();
  context.restore();
}

/** Draws a place where nothing lies. */
export function drawFree(context, x, y, size) {
  context.clearRect(x, y, size, size);
  context.fillStyle = free.fill;
  context.fillRect(x, y, size, size);
  if (size >= 5) {
    context.strokeStyle = free.line;
    context.lineWidth = 1;
    context.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
  }
}

const free = {};

export function readTheme() {
  free.fill = cssColour("--free");
  free.line = cssColour("--free-line");
}
