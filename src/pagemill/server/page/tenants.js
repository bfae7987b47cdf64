// Tenants against their quotas.

import { count, el, find } from "./dom.js";

const MOST = 40;

function part(kind, blocks, whole) {
  const bar = el("span", { class: kind });
  bar.style.width = `${(100 * blocks) / whole}%`;
  return bar;
}

export function showTenants(picture) {
  const { tenants, frames } = picture.stats;
  const rows = Object.entries(tenants).slice(0, MOST).map(([name, one]) => {
    const whole = Math.max(1, Math.min(frames, one.max_blocks ?? frames), one.blocks_active + one.blocks_cached);
    const meter = el("div", { class: "meter", role: "img" }, part("active", one.blocks_active, whole), part("cached", one.blocks_cached, whole));
    if (one.guaranteed_blocks) {
      const line = el("span", { class: "guaranteed" });
      line.style.left = `${Math.min(99, (100 * one.guaranteed_blocks) / whole)}%`;
      meter.append(line);
    }
    const limits = [
      one.guaranteed_blocks ? `${one.guaranteed_blocks} guaranteed` : "",
      one.max_blocks === null ? "" : `${one.max_blocks} allowed`,
    ].filter(Boolean);
    const words = `${one.blocks_active} in use, ${one.blocks_cached} cached${limits.length ? `; ${limits.join(", ")}` : ""}`;
    meter.setAttribute("aria-label", `${name}: ${words}`);
    const runs = `${one.running} running${one.waiting ? `, ${one.waiting} waiting` : ""}`;
    return el(
      "div", { class: "tenant" },
      el("div", { class: "row" }, el("b", { text: name }), el("span", { class: "note", text: `${words}; ${runs}` })), meter,
    );
  });
  const more = Object.keys(tenants).length - MOST;
  if (more > 0) rows.push(el("p", { class: "note" }, `and ${count(more, "tenant")} more`));
  find("tenants").replaceChildren(...rows);
}
