// Anthropic's SDK in JavaScript: node anthropic_js_client.mjs URL.
import assert from "node:assert";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const asked = { model: "alias", max_tokens: 60, messages: [{ role: "user", content: "Is 2 even?" }], temperature: 0 };

const whole = await client.messages.create({ ...asked, max_tokens: 12 });
assert(whole.content[0].text && whole.usage.output_tokens <= 12);
console.log("done message");

const stream = client.messages.stream({ ...asked, max_tokens: 12 });
let text = "";
stream.on("text", (piece) => (text += piece));
const final = await stream.finalMessage();
assert.equal(text, whole.content[0].text);
assert.equal(final.usage.output_tokens, whole.usage.output_tokens);
console.log("done stream");

const schema = { type: "object", properties: { even: { type: "boolean" } }, required: ["even"], additionalProperties: false };
const tools = [{ name: "look", description: "Looks.", input_schema: schema }];
const used = await client.messages.stream({ ...asked, tools, tool_choice: { type: "tool", name: "look" } }).finalMessage();
const call = used.content.find((block) => block.type === "tool_use");
assert(call.name === "look" && typeof call.input.even === "boolean" && used.stop_reason === "tool_use");
const result = { type: "tool_result", tool_use_id: call.id, content: "It is." };
const messages = [...asked.messages, { role: "assistant", content: used.content }, { role: "user", content: [result] }];
assert((await client.messages.create({ ...asked, tools, messages, max_tokens: 12 })).content.length);
console.log("done tools");

const held = await client.messages.create({ ...asked, output_config: { format: { type: "json_schema", schema } } });
assert.equal(typeof JSON.parse(held.content[0].text).even, "boolean");
console.log("done schema");

assert((await client.messages.countTokens({ model: "alias", messages: asked.messages })).input_tokens > 0);
await assert.rejects(client.messages.create({ ...asked, model: "nothing" }), Anthropic.NotFoundError);
console.log("done error");
