// The prefix tree: runs of blocks that texts have in common, and who holds them.

import { count, el, find } from "./dom.js";

const MOST = 60;

export function showTree(picture) {
  const place = find("tree");
  const nodes = picture.tree || [];
  find("tree-count").textContent = picture.published_blocks
    ? `${count(picture.published_blocks, "block")} can be found again`
    : "";
  if (!nodes.length) {
    place.replaceChildren(el("p", { class: "empty" }, "No text is remembered yet."));
    return;
  }
  const depths = [];
  nodes.forEach((node) => depths.push(node.parent < 0 ? 0 : depths[node.parent] + 1));
  const longest = Math.max(...nodes.map((node) => node.num_blocks));
  const rows = nodes.slice(0, MOST).map((node, at) => {
    const kind = node.tables.length > 1 ? "shared" : node.tables.length ? "active" : "cached";
    const bar = el("i", { class: kind });
    bar.style.width = `${Math.max(3, (120 * node.num_blocks) / longest)}px`;
    const held = { shared: `held by ${node.tables.length}`, active: "held by 1", cached: "cached" }[kind];
    const tenant = Object.keys(picture.owners).length > 1 ? `, ${node.tenant}` : "";
    const words = `${count(node.num_blocks, "block")}, ${held}${tenant}`;
    const row = el("div", { class: "branch", role: "treeitem", "aria-level": depths[at] + 1 }, bar, el("span", { text: words }));
    row.style.paddingLeft = `${Math.min(depths[at], 12) * 18}px`;
    return row;
  });
  if (nodes.length > MOST) rows.push(el("p", { class: "note" }, `and ${nodes.length - MOST} more runs`));
  place.replaceChildren(el("div", { role: "tree", "aria-labelledby": "tree-title" }, ...rows));
}
