// Builds elements. Text only ever becomes text nodes: nothing that a model or a server says is read as HTML.

export const find = (id) => document.getElementById(id);

/** Returns an element with properties (`class`, `text`, `on…`, attributes) and children. */
export function el(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class") element.className = value;
    else if (key === "text") element.textContent = value;
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** Sizes a canvas to its place on the screen, and returns its context in CSS pixels. */
export function canvasContext(canvas, width, height) {
  const scale = Math.min(window.devicePixelRatio || 1, 2);
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  return context;
}

/** Returns a colour of the style sheet. */
export const cssColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export const count = (number, one, many = `${one}s`) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(number) {
  const power = Math.min(UNITS.length - 1, Math.floor(Math.log2(Math.max(1, number)) / 10));
  return `${(number / 1024 ** power).toLocaleString("en", { maximumFractionDigits: 1 })} ${UNITS[power]}`;
}

export const percent = (part, whole) => (whole > 0 ? `${Math.round((100 * part) / whole)} %` : "–");
