// Node's openai over the endpoints that it uses: models, chat, responses, completions, embeddings, whole and streamed.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const model = "smollm2-135m";
const baseURL = `${process.env.PAGEMILL_URL}/v1`;
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const Person = z.object({ name: z.string().max(12), age: z.number().int().min(0).max(120) });
const operands = { type: "integer", minimum: 0, maximum: 999 };
const tools = [
  {
    type: "function",
    function: {
      name: "add",
      parameters: {
        type: "object",
        properties: { left: operands, right: operands },
        required: ["left", "right"],
        additionalProperties: false,
      },
    },
  },
];

test("models", async () => {
  const names = (await client.models.list()).data.map((each) => each.id);
  assert.ok(names.includes(model));
  assert.equal((await client.models.retrieve(model)).id, model);
});

test("chat, whole and streamed", async () => {
  const asked = { model, messages, temperature: 0, max_tokens: 24 };
  const whole = await client.chat.completions.create(asked);
  const text = whole.choices[0].message.content;
  assert.ok(text);
  let said = "";
  let usage;
  const stream = await client.chat.completions.create({
    ...asked,
    stream: true,
    stream_options: { include_usage: true },
  });
  for await (const chunk of stream) {
    said += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(said, text);
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
  assert.equal(await client.chat.completions.stream(asked).finalContent(), text);
});

test("a stream that is left ends at the server", async () => {
  const stream = await client.chat.completions.create({ model, messages, max_tokens: 1500, stream: true, ignore_eos: true });
  for await (const _ of stream) break;
  stream.controller.abort();
  for (let left = 100; ; left--) {
    const { data } = await client.get("/requests");
    if (data.length === 0) break;
    assert.ok(left > 0, "still running");
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
});

test("structured output", async () => {
  const answer = await client.chat.completions.parse({
    model,
    messages: [{ role: "user", content: "Name a person." }],
    response_format: zodResponseFormat(Person, "person"),
    max_tokens: 200,
    seed: 1,
  });
  assert.ok(Person.safeParse(answer.choices[0].message.parsed).success);
});

test("completions, whole and streamed", async () => {
  const asked = { model, prompt: "Once upon a time", temperature: 0, max_tokens: 8 };
  const whole = (await client.completions.create(asked)).choices[0].text;
  let said = "";
  for await (const chunk of await client.completions.create({ ...asked, stream: true })) said += chunk.choices[0].text;
  assert.equal(said, whole);
});

test("embeddings, as numbers and in base64", async () => {
  const [first, second] = (await client.embeddings.create({ model, input: ["A cat.", "A dog."] })).data;
  const plain = await client.embeddings.create({ model, input: "A cat.", encoding_format: "float" });
  assert.equal(first.embedding.length, second.embedding.length);
  assert.ok(first.embedding.every((number, at) => Math.abs(number - plain.data[0].embedding[at]) < 1e-6));
});

for (const stream of [false, true]) {
  test(`an agent makes two tool turns in a session, ${stream ? "streamed" : "whole"}`, async () => {
    const session_id = `node-${process.pid}-${stream}`;
    const ask = async (messages, tool_choice) => {
      const asked = { model, messages, tools, tool_choice, session_id, temperature: 0, max_tokens: 100 };
      if (!stream) return (await client.chat.completions.create(asked)).choices[0].message;
      return client.chat.completions.stream(asked).finalMessage();
    };
    const resultOf = (message) => {
      const [call] = message.tool_calls;
      const { left, right } = JSON.parse(call.function.arguments);
      return [{ role: "tool", tool_call_id: call.id, content: String(left + right) }];
    };
    let message = await ask([{ role: "user", content: "What is 17 and 23, and 5 more?" }], "required");
    message = await ask(resultOf(message), { type: "function", function: { name: "add" } });
    message = await ask(resultOf(message), "none");
    assert.ok(message.content);
    assert.ok(!message.tool_calls?.length);
    const kept = await client.get(`/sessions/${session_id}`);
    const roles = ["user", "assistant", "tool", "assistant", "tool", "assistant"];
    assert.deepEqual(kept.messages.map((each) => each.role), roles);
  });
}

// The text of a response. At the end of a stream this client sets output_text only for formats that it parses.
const textOf = (response) =>
  response.output
    .filter((item) => item.type === "message")
    .flatMap((item) => item.content.map((part) => part.text))
    .join("");

test("responses, whole, streamed, gone on from and forgotten", async () => {
  const asked = { model, input: "What is the capital of France?", temperature: 0, max_output_tokens: 24 };
  const whole = await client.responses.create(asked);
  assert.ok(whole.output_text);
  let said = "";
  let last;
  for await (const event of await client.responses.create({ ...asked, stream: true })) {
    if (event.type === "response.output_text.delta") said += event.delta;
    last = event;
  }
  assert.equal(said, whole.output_text);
  assert.equal(textOf(last.response), whole.output_text);
  assert.equal(last.response.usage.output_tokens, whole.usage.output_tokens);
  assert.equal(textOf(await client.responses.stream(asked).finalResponse()), whole.output_text);
  const again = await client.responses.create({ ...asked, input: "Why?", previous_response_id: whole.id });
  assert.ok(again.usage.input_tokens > whole.usage.input_tokens);
  assert.ok(again.usage.input_tokens_details.cached_tokens > 0);
  assert.equal(textOf(await client.responses.retrieve(whole.id)), whole.output_text);
  const items = await client.responses.inputItems.list(whole.id);
  assert.deepEqual(items.data.map((item) => item.role), ["user"]);
  await client.responses.delete(whole.id);
  await assert.rejects(client.responses.retrieve(whole.id), OpenAI.NotFoundError);
});

test("structured output of responses", async () => {
  const asked = { model, input: "Name a person.", text: { format: zodTextFormat(Person, "person") }, temperature: 0 };
  for (const parsed of [
    await client.responses.parse(asked),
    await client.responses.stream(asked).finalResponse(),
  ]) {
    assert.ok(Person.safeParse(parsed.output_parsed).success);
    assert.equal(textOf(parsed), parsed.output_text);
  }
});

for (const stream of [false, true]) {
  test(`an agent makes two tool turns in responses, ${stream ? "streamed" : "whole"}`, async () => {
    const flat = tools.map(({ type, function: described }) => ({ type, ...described, strict: true }));
    const ask = async (input, tool_choice, previous_response_id) => {
      const asked = { model, input, tools: flat, tool_choice, previous_response_id, temperature: 0, max_output_tokens: 100 };
      return stream ? client.responses.stream(asked).finalResponse() : client.responses.create(asked);
    };
    const resultOf = (response) => {
      const [call, ...others] = response.output.filter((item) => item.type === "function_call");
      assert.equal(others.length, 0);
      const { left, right } = JSON.parse(call.arguments);
      return [{ type: "function_call_output", call_id: call.call_id, output: String(left + right) }];
    };
    let response = await ask("What is 17 and 23, and 5 more?", "required");
    response = await ask(resultOf(response), { type: "function", name: "add" }, response.id);
    response = await ask(resultOf(response), "none", response.id);
    assert.ok(textOf(response));
    assert.ok(response.output.every((item) => item.type === "message"));
    if (!stream) assert.equal(response.output_text, textOf(response));
  });
}

test("a runner of tools runs them", async () => {
  const runner = client.chat.completions.runTools({
    model,
    messages: [{ role: "user", content: "What is 17 and 23?" }],
    tools: [{ type: "function", function: { ...tools[0].function, parse: JSON.parse, function: ({ left, right }) => String(left + right) } }],
    tool_choice: { type: "function", function: { name: "add" } },
    max_tokens: 100,
  });
  const results = [];
  runner.on("functionToolCallResult", (result) => results.push(result));
  await runner.done();
  assert.equal(results.length, 1);
});

test("errors are the client's own", async () => {
  await assert.rejects(client.chat.completions.create({ model, messages, temperature: -1 }), OpenAI.BadRequestError);
  await assert.rejects(client.chat.completions.create({ model: "nobody", messages }), OpenAI.NotFoundError);
});
