// Vercel's AI SDK: node client.mjs URL.
import assert from "node:assert";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, Output, streamText } from "ai";
import { z } from "zod";

const url = process.argv[2];
const compatible = createOpenAICompatible({
  name: "slipstream",
  baseURL: `${url}/v1`,
  apiKey: "none",
  supportsStructuredOutputs: true,
});
const model = compatible("alias");
const asked = { model, prompt: "Is 2 even?", maxOutputTokens: 60, seed: 7, maxRetries: 0 };

const whole = await generateText(asked);
assert(whole.text);
console.log("done text");

let text = "";
for await (const piece of streamText(asked).textStream) text += piece;
assert.equal(text, whole.text);
console.log("done stream");

const output = Output.object({ schema: z.object({ even: z.boolean() }) });
const held = await generateText({ ...asked, output });
assert.equal(typeof held.output.even, "boolean");
console.log("done object");

const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const told = await generateText({ ...asked, model: openai.responses("alias"), seed: undefined });
assert(told.text);
console.log("done responses");

const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" });
assert((await generateText({ ...asked, model: anthropic("alias"), seed: undefined })).text);
console.log("done anthropic");

await assert.rejects(generateText({ ...asked, model: compatible("nothing") }), (error) => {
  return APICallError.isInstance(error) && error.statusCode === 404;
});
console.log("done error");
