// The chat: conversations that stream, fork at any turn, and resume; beside each, its blocks.

import { ApiError, getJson, send } from "./api.js";
import { ChatBlocks } from "./chatblocks.js";
import { Conversation, argumentsOf, wordsOf } from "./conversation.js";
import { count, el } from "./dom.js";
import { render } from "./markdown.js";

const WHO = { user: "You", assistant: "Model", system: "System prompt", tool: "Tool" };
const field = (label, input) => el("label", { class: "field" }, el("span", { text: label }), input);
const button = (text, onclick, more = {}) => el("button", { type: "button", onclick, ...more }, text);

/** Returns a message as elements: its reasoning folded, its words, and its calls of tools as code. */
function contentOf(message) {
  const { reasoning_content: reasoning, tool_calls: calls } = message;
  return [
    ...(reasoning ? [el("details", { open: !message.content }, el("summary", {}, "Reasoning"), ...render(reasoning))] : []),
    ...render(wordsOf(message)),
    ...(calls || []).map((call) => el("pre", {}, el("code", { text: `${call.function.name}(${argumentsOf(call)})` }))),
  ];
}

export class Chat {
  constructor(place, picture) {
    this.picture = picture;
    this.model = "";
    this.open = [new Conversation()];
    this.current = this.open[0];
    this.sessions = [];
    this.blocks = new ChatBlocks();
    this.build(place);
    this.showAll();
  }

  build(place) {
    this.list = el("ul", { class: "talks", "aria-label": "Conversations" });
    this.log = el("div", { class: "log", role: "log", "aria-label": "Messages", tabindex: "0" });
    this.note = el("p", { class: "note", role: "status" });
    this.error = el("p", { class: "bad", role: "alert" });
    this.text = el("textarea", { rows: "3", placeholder: "Write a message", "aria-label": "Message" });
    this.sendButton = el("button", { type: "submit", class: "strong" }, "Send");
    this.stopButton = button("Stop", () => this.current.stop(), { hidden: true });
    this.forkButton = button("Fork this answer", () => this.forkRunning(), { hidden: true });
    this.form = el("form", { class: "composer" }, this.text, el("div", { class: "row end" }, this.note, this.forkButton, this.stopButton, this.sendButton));
    this.system = el("textarea", { rows: "3" });
    this.temperature = el("input", { type: "number", min: "0", max: "2", step: "0.1", value: "0.7" });
    this.maxTokens = el("input", { type: "number", min: "1", step: "1", value: "300" });
    this.pins = el("ul", { class: "pins" });
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    this.text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.submit();
    });
    place.append(
      el("nav", { class: "card side", "aria-label": "Conversations and settings" },
        button("New conversation", () => this.begin(new Conversation()), { class: "strong" }), this.list,
        el("details", {}, el("summary", {}, "System prompt and sampling"),
          field("System prompt (of a new conversation)", this.system),
          el("div", { class: "row" }, button("Pin it", () => this.pin())),
          this.pins, field("Temperature", this.temperature), field("Most tokens of an answer", this.maxTokens))),
      el("section", { class: "card talk", "aria-label": "Conversation" }, this.log, this.error, this.form),
      this.blocks.element,
    );
  }

  get settings() {
    return {
      system: this.system.value.trim(),
      sampling: { temperature: Number(this.temperature.value), max_tokens: Number(this.maxTokens.value) },
    };
  }

  // Conversations come, go on and fork

  begin(conversation, draft = "") {
    if (!this.open.includes(conversation)) this.open.unshift(conversation);
    this.open = this.open.filter((one) => one === conversation || one.messages.length || one.running);
    this.current = conversation;
    this.text.value = draft;
    this.blocks.forget();
    this.showAll();
    this.text.focus();
  }

  async submit() {
    const [text, talk] = [this.text.value.trim(), this.current];
    if (!text || talk.running) return;
    this.text.value = "";
    await talk.say(text, this.settings, () => this.changed(talk));
    await this.loadSessions();
  }

  async forkAt(number) {
    await this.attempt(async () => this.begin(await this.current.fork(number)));
    await this.loadSessions();
  }

  async edit(number) {
    const words = wordsOf(this.current.messages[number]);
    await this.attempt(async () => this.begin(await this.current.fork(number), words));
  }

  async forkRunning() {
    const [origin, child] = [this.current, new Conversation({ from: this.current.title })];
    const answered = child.forkRunning(origin, this.settings, () => this.changed(child));
    this.begin(child);
    await answered;
  }

  async resume(id) {
    await this.attempt(async () => {
      const known = this.open.find((one) => one.id === id);
      this.begin(known || (await Conversation.resume(id)));
    });
  }

  async forget(id) {
    await this.attempt(() => send(`/v1/sessions/${encodeURIComponent(id)}`, { method: "DELETE" }));
    const gone = this.open.find((one) => one.id === id);
    this.open = this.open.filter((one) => one !== gone);
    if (gone === this.current || !this.open.length) this.begin(new Conversation());
    await this.loadSessions();
  }

  async pin() {
    const { system } = this.settings;
    await this.attempt(async () => {
      if (!system) throw new ApiError(0, "Write a system prompt first; its blocks are then kept for all conversations that begin with it.");
      const name = `page: ${system.slice(0, 40).replaceAll("/", " ")}`;
      await send("/v1/pins", { method: "POST", body: { name, messages: [{ role: "system", content: system }] } });
      this.system.value = system;
    });
    await this.loadPins();
  }

  async attempt(work) {
    this.error.textContent = "";
    try {
      await work();
    } catch (error) {
      this.error.textContent = error instanceof ApiError ? error.message : "The server did not answer.";
    }
  }

  async loadSessions() {
    await this.attempt(async () => {
      const { data } = await getJson("/v1/sessions"); // responses are gone on from by another path
      this.sessions = data.filter((card) => card.num_messages !== null && !card.damaged && !card.id.startsWith("resp_"));
    });
    this.showList();
  }

  async loadPins() {
    const { data } = await getJson("/v1/pins").catch(() => ({ data: [] }));
    this.pins.replaceChildren(
      ...data.map((pin) =>
        el("li", {}, el("span", { text: `${pin.name} · ${count(pin.num_blocks, "block")}` }),
          button("Unpin", async () => {
            await this.attempt(() => send(`/v1/pins/${encodeURIComponent(pin.name)}`, { method: "DELETE" }));
            await this.loadPins();
          }, { class: "quiet" })),
      ),
    );
  }

  // What is shown

  show(picture) {
    this.loadPins();
    this.showAll();
    if (picture) this.update(picture);
  }

  update(picture) {
    this.blocks.update(picture, this.current);
  }

  changed(talk) {
    if (talk !== this.current || this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.showAll();
    });
  }

  showAll() {
    const talk = this.current;
    this.showMessages(talk);
    this.sendButton.hidden = talk.running;
    this.stopButton.hidden = !talk.running;
    this.forkButton.hidden = !talk.running || talk.requestId === null;
    this.error.textContent = talk.error;
    const cached = talk.usage?.prompt_tokens_details?.cached_tokens;
    this.note.textContent = talk.running || !talk.usage ? (talk.from && !talk.usage ? `Forked from “${talk.from}”` : "")
      : `${count(talk.usage.prompt_tokens, "prompt token")}, ${cached} of them found`;
    this.showList();
  }

  showMessages(talk) {
    const atEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 60;
    const same = this.shownTalk === talk && this.log.children.length === talk.messages.length;
    if (!same || !talk.running) {
      this.log.replaceChildren(...talk.messages.map((message, number) => this.message(talk, message, number)));
      if (!talk.messages.length) this.log.append(el("p", { class: "empty" }, "Ask something. You can fork at any turn: what came before is shared, not copied."));
    } else {
      this.log.lastChild.querySelector(".text").replaceChildren(...contentOf(talk.messages.at(-1)));
    }
    this.shownTalk = talk;
    if (atEnd || !same) this.log.scrollTop = this.log.scrollHeight;
  }

  message(talk, message, number) {
    const { role } = message;
    const writes = talk.running && number === talk.messages.length - 1;
    const tools = el("span", { class: "tools" });
    if (!writes && role === "user") tools.append(button("Edit", () => this.edit(number), { class: "quiet", title: "Change it in a fork of the conversation" }));
    if (!writes && role !== "system") tools.append(button("Fork", () => this.forkAt(number + 1), { class: "quiet", title: "Go on from here in another conversation" }));
    const text = el("div", { class: "text" }, ...contentOf(message));
    return el("article", { class: `message ${role}`, "aria-busy": writes ? "true" : null }, el("header", {}, el("b", { text: WHO[role] || role }), tools), text);
  }

  showList() {
    const known = new Set(this.open.map((one) => one.id));
    const entry = (title, note, current, open, forget) =>
      el("li", { class: current ? "current" : "" },
        el("button", { type: "button", class: "quiet name", onclick: open, "aria-current": current ? "true" : null, title }, el("span", { text: title }), el("small", { text: note })),
        forget ? button("×", forget, { class: "quiet", "aria-label": `Delete ${title}` }) : null);
    const saved = new Set(this.sessions.map((card) => card.id));
    this.list.replaceChildren(
      ...this.open.map((one) =>
        entry(one.title, one.running ? "answering" : one.from ? `fork of ${one.from}` : count(one.messages.length, "message"), one === this.current,
          () => this.begin(one), saved.has(one.id) ? () => this.forget(one.id) : null)),
      ...this.sessions.filter((card) => !known.has(card.id)).map((card) =>
        entry(card.id, count(card.num_messages, "message"), false, () => this.resume(card.id), () => this.forget(card.id))),
    );
  }
}
