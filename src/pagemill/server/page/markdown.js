// Shows Markdown as elements. The text of a model becomes text nodes and nothing else: no HTML, no image, and links only
// to http, https and mailto. One pass over the lines, and one over the characters of each.

import { el } from "./dom.js";

const BULLET = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const FENCE = /^\s*(```|~~~)\s*([\w+#.-]*)/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const TABLE_RULE = /^\s*\|?(\s*:?-+:?\s*\|)+\s*:?-*:?\s*$/;
const MARKS = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "del" };
const SAFE = new Set(["http:", "https:", "mailto:"]);
const WORD = /[\p{L}\p{N}]/u;

/** Returns a link's address if it may be followed, else null. */
export function safeAddress(text) {
  try {
    const address = new URL(text);
    return SAFE.has(address.protocol) ? address.href : null;
  } catch {
    return null;
  }
}

/** Returns the nodes of a line: code, links, strong and emphasised parts; everything else as it stands. */
export function inline(text, depth = 0) {
  const nodes = [];
  let plain = "";
  const add = (node) => {
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
    if (node) nodes.push(node);
  };
  const missing = new Set();
  const closing = (mark, from) => {
    if (missing.has(mark)) return -1;
    const at = text.indexOf(mark, from);
    if (at < 0) missing.add(mark);
    return at;
  };
  for (let at = 0; at < text.length; ) {
    const rest2 = text.slice(at, at + 2);
    if (text[at] === "\\" && /[\\`*_~[\]()#+.!-]/.test(text[at + 1] || "")) {
      plain += text[at + 1];
      at += 2;
      continue;
    }
    if (text[at] === "`") {
      const end = closing("`", at + 1);
      if (end > 0) {
        add(el("code", { text: text.slice(at + 1, end) }));
        at = end + 1;
        continue;
      }
    }
    if (text[at] === "[") {
      const middle = closing("](", at + 1);
      const end = middle < 0 ? -1 : closing(")", middle);
      if (end > 0 && middle - at < 1000) {
        const [words, address] = [text.slice(at + 1, middle), safeAddress(text.slice(middle + 2, end).trim())];
        if (address !== null) {
          add(el("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow", text: words }));
          at = end + 1;
          continue;
        }
      }
    }
    const mark = rest2 in MARKS ? rest2 : text[at] in MARKS ? text[at] : null;
    const inWord = mark?.[0] === "_" && WORD.test(text[at - 1] || "");
    if (mark && depth < 4 && !inWord && /\S/.test(text[at + mark.length] || "")) {
      const end = closing(mark, at + mark.length + 1);
      if (end > 0 && /\S/.test(text[end - 1])) {
        add(el(MARKS[mark], {}, ...inline(text.slice(at + mark.length, end), depth + 1)));
        at = end + mark.length;
        continue;
      }
    }
    plain += text[at];
    at += 1;
  }
  add(null);
  return nodes;
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

class Reader {
  constructor(text) {
    this.lines = text.replace(/\r\n?/g, "\n").split("\n");
    this.at = 0;
  }

  get line() {
    return this.lines[this.at];
  }

  get left() {
    return this.at < this.lines.length;
  }

  /** Takes lines while they fit. */
  while(fits) {
    const begin = this.at;
    while (this.left && fits(this.line)) this.at += 1;
    return this.lines.slice(begin, this.at);
  }

  blocks() {
    const found = [];
    while (this.left) {
      if (!this.line.trim()) this.at += 1;
      else found.push(this.block());
    }
    return found;
  }

  block() {
    const line = this.line;
    let match;
    if ((match = FENCE.exec(line))) return this.code(match[1], match[2]);
    if ((match = HEADING.exec(line))) {
      this.at += 1;
      return el(`h${Math.min(6, match[1].length + 2)}`, {}, ...inline(match[2]));
    }
    if (RULE.test(line)) {
      this.at += 1;
      return el("hr");
    }
    if (BULLET.test(line)) return this.list();
    if (line.startsWith(">")) {
      const quoted = this.while((one) => one.startsWith(">")).map((one) => one.replace(/^> ?/, "").replace(/^>+/, ""));
      return el("blockquote", {}, ...new Reader(quoted.join("\n")).blocks());
    }
    if (line.includes("|") && TABLE_RULE.test(this.lines[this.at + 1] || "")) return this.table();
    return this.paragraph();
  }

  code(mark, language) {
    this.at += 1;
    const lines = this.while((one) => !one.trim().startsWith(mark));
    this.at += 1;
    return el("pre", {}, el("code", { "data-language": language || null, text: lines.join("\n") }));
  }

  list() {
    const [, indent, sign] = BULLET.exec(this.line);
    const ordered = /\d/.test(sign);
    const list = el(ordered ? "ol" : "ul", ordered ? { start: parseInt(sign, 10) } : {});
    while (this.left) {
      const match = BULLET.exec(this.line);
      if (!match || match[1].length < indent.length) break;
      if (match[1].length > indent.length && list.lastChild) {
        list.lastChild.append(this.list());
        continue;
      }
      this.at += 1;
      list.append(el("li", {}, ...inline(match[3])));
    }
    return list;
  }

  table() {
    const row = (name, line) => el("tr", {}, ...cells(line).map((cell) => el(name, {}, ...inline(cell))));
    const head = row("th", this.line);
    this.at += 2;
    const body = this.while((line) => line.includes("|")).map((line) => row("td", line));
    return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...body)));
  }

  paragraph() {
    const begin = this.at;
    const ends = (line) =>
      !line.trim() || FENCE.test(line) || HEADING.test(line) || BULLET.test(line) || line.startsWith(">");
    const lines = this.while((line) => this.at === begin || !ends(line));
    const paragraph = el("p");
    lines.forEach((line, at) => paragraph.append(...(at ? [el("br")] : []), ...inline(line)));
    return paragraph;
  }
}

export const render = (text) => new Reader(text).blocks();
