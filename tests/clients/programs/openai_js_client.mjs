// OpenAI's SDK in JavaScript: node openai_js_client.mjs URL.
import assert from "node:assert";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const asked = { model: "alias", messages: [{ role: "user", content: "Is 2 even?" }], seed: 7, max_completion_tokens: 60 };
const Rich = z.object({
  tags: z.array(z.string()).max(2),
  when: z.iso.date().nullable(),
  counts: z.record(z.enum(["a", "b"]), z.int32().min(0).max(9)),
});

const whole = await client.chat.completions.create({ ...asked, max_completion_tokens: 12 });
assert(whole.choices[0].message.content && whole.usage.completion_tokens <= 12);
console.log("done chat");

const stream = client.chat.completions.stream({ ...asked, max_completion_tokens: 12, stream_options: { include_usage: true } });
let text = "";
for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
assert.equal(text, whole.choices[0].message.content);
assert.equal((await stream.totalUsage()).completion_tokens, whole.usage.completion_tokens);
console.log("done stream");

const format = { type: "json_schema", json_schema: { name: "rich", schema: z.toJSONSchema(Rich) } };
const rich = await client.chat.completions.create({ ...asked, response_format: format, max_completion_tokens: 200 });
Rich.parse(JSON.parse(rich.choices[0].message.content));
const answer = zodResponseFormat(z.object({ even: z.boolean() }), "answer");
const parsed = await client.chat.completions.parse({ ...asked, response_format: answer });
assert.equal(typeof parsed.choices[0].message.parsed.even, "boolean");
console.log("done schema");

const tool = {
  type: "function",
  function: {
    name: "look",
    parse: JSON.parse,
    parameters: { type: "object", properties: { even: { type: "boolean" } }, required: ["even"], additionalProperties: false },
    function: ({ even }) => `even: ${even}`,
  },
};
const runner = client.chat.completions.runTools(
  { ...asked, tools: [tool], tool_choice: { type: "function", function: { name: "look" } }, stream: true },
  { maxChatCompletions: 2 },
);
let called = 0;
runner.on("functionToolCall", (call) => {
  assert.equal(call.name, "look");
  JSON.parse(call.arguments);
  called += 1;
});
await runner.done();
assert.equal(called, 1);
console.log("done tools");

const events = client.responses.stream({ model: "alias", input: "Is 2 even?", max_output_tokens: 12 });
const kinds = [];
for await (const event of events) kinds.push(event.type);
const final = await events.finalResponse();
assert(final.output_text && kinds[0] === "response.created" && kinds.includes("response.output_text.delta"));
const held = await client.responses.parse({
  model: "alias",
  input: "Is 2 even?",
  max_output_tokens: 60,
  text: { format: zodTextFormat(z.object({ even: z.boolean() }), "answer") },
});
assert.equal(typeof held.output_parsed.even, "boolean");
console.log("done responses");

await assert.rejects(client.chat.completions.create({ ...asked, temperature: -1 }), (error) => {
  return error instanceof OpenAI.BadRequestError && error.param === "temperature";
});
console.log("done error");
