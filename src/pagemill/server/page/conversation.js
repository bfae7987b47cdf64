// A conversation: its messages, and the session under which the server keeps it.

import { ApiError, events, getJson, send } from "./api.js";

export const newName = () => `page-${crypto.getRandomValues(new Uint32Array(2)).reduce((name, part) => name + part.toString(36), "")}`;

/** Returns what a message says, which may be a text, a list of parts, or nothing beside calls of tools. */
export function wordsOf({ content }) {
  if (Array.isArray(content)) return content.map((part) => part.text || "").join("");
  return content || "";
}

/** Returns the arguments of a tool's call as text; sessions keep them as an object. */
export const argumentsOf = (call) =>
  typeof call.function.arguments === "string" ? call.function.arguments : JSON.stringify(call.function.arguments);

/** Returns a message as the API takes it. */
function sendable(message) {
  if (!message.tool_calls) return message;
  const calls = message.tool_calls.map((call, at) => ({
    id: call.id || `call-${at}`, type: "function", function: { name: call.function.name, arguments: argumentsOf(call) },
  }));
  return { ...message, tool_calls: calls };
}

export class Conversation {
  /** synced: whether the server's session has exactly these messages; else the next turn sends all of them. */
  constructor({ id = newName(), messages = [], synced = false, from = "" } = {}) {
    Object.assign(this, { id, messages, synced, from, requestId: null, error: "", usage: null });
    this.abort = null;
    this.outdated = null; // a session that this conversation replaces
  }

  get running() {
    return this.abort !== null;
  }

  get title() {
    const first = this.messages.find((message) => message.role === "user");
    return first ? wordsOf(first).slice(0, 60) : "New conversation";
  }

  static async resume(id) {
    const card = await getJson(`/v1/sessions/${encodeURIComponent(id)}`);
    if (card.messages === null) throw new ApiError(0, `${id} is a session of plain prompts, which a chat cannot go on with.`);
    return new Conversation({ id, messages: card.messages, synced: true });
  }

  /** Says something, and takes in the answer as it comes. */
  async say(text, settings, onChange) {
    const turn = { role: "user", content: text };
    const system = !this.messages.length && settings.system ? [{ role: "system", content: settings.system }] : [];
    const news = this.synced ? [turn] : [...system, ...this.messages.map(sendable), turn];
    this.messages.push(...system, turn);
    await this.take({ messages: news, session_id: this.id, ...settings.sampling }, onChange);
  }

  /** Goes on from the running answer of another conversation, which shares all its blocks. */
  async forkRunning(origin, settings, onChange) {
    this.messages = origin.messages.slice(0, -1);
    await this.take({ messages: [], fork_of: origin.requestId, ...settings.sampling }, onChange);
    this.synced = false;
  }

  async take(body, onChange) {
    const answer = { role: "assistant", content: "" };
    this.messages.push(answer);
    this.abort = new AbortController();
    this.error = "";
    this.requestId = null;
    onChange();
    try {
      const response = await send("/v1/chat/completions", {
        method: "POST", signal: this.abort.signal,
        body: { ...body, stream: true, stream_options: { include_usage: true } },
      });
      for await (const chunk of events(response)) {
        this.requestId = chunk.id;
        this.usage = chunk.usage || this.usage;
        const delta = chunk.choices[0]?.delta || {};
        answer.content += delta.content || "";
        if (delta.reasoning_content) answer.reasoning_content = (answer.reasoning_content || "") + delta.reasoning_content;
        onChange();
      }
      this.synced = true;
      if (this.outdated) send(`/v1/sessions/${encodeURIComponent(this.outdated)}`, { method: "DELETE" }).catch(() => {});
      this.outdated = null;
    } catch (error) {
      this.lose(answer);
      if (!this.abort.signal.aborted) this.error = error instanceof ApiError ? error.message : "The connection broke off.";
    } finally {
      this.abort = null;
      this.requestId = null;
      onChange();
    }
  }

  /** A turn that did not end leaves no trace on the server: the next one goes on under another name, with all messages. */
  lose(answer) {
    if (!answer.content) this.messages.splice(this.messages.indexOf(answer), 1);
    if (this.synced) this.outdated = this.id;
    this.id = newName();
    this.synced = false;
  }

  stop() {
    this.abort?.abort();
  }

  /** Returns a conversation that goes on from the first `count` messages. */
  async fork(count) {
    const messages = this.messages.slice(0, count).map((message) => ({ ...message }));
    const child = new Conversation({ messages, from: this.title });
    if (this.synced && !this.running && count === this.messages.length) {
      await send(`/v1/sessions/${encodeURIComponent(this.id)}/fork`, { method: "POST", body: { session_id: child.id } });
      child.synced = true;
    }
    return child;
  }
}
