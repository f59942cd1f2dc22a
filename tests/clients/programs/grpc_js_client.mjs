// @grpc/grpc-js with stubs made of the protos at run time: node grpc_js_client.mjs ADDRESS GUARDED KEY PROTOS.
import assert from "node:assert";
import { createRequire } from "node:module";
import path from "node:path";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const [address, guarded, key, protos] = process.argv.slice(2);
const inside = createRequire(import.meta.url).resolve;
const folder = (name, ...rest) => path.join(path.dirname(inside(`${name}/package.json`)), ...rest);
const files = [
  "slipstream/v1/gateway.proto",
  folder("grpc-health-check", "proto/health/v1/health.proto"),
  folder("@grpc/reflection", "build/proto/grpc/reflection/v1/reflection.proto"),
];
const options = { longs: String, enums: String, defaults: true, oneofs: true };
const packages = grpc.loadPackageDefinition(loader.loadSync(files, { ...options, includeDirs: [protos] }));
const details = loader.loadSync(["google/rpc/status.proto", "google/rpc/error_details.proto"], {
  ...options,
  includeDirs: [folder("google-proto-files")],
});

const config = JSON.stringify({
  loadBalancingConfig: [{ round_robin: {} }],
  methodConfig: [
    {
      name: [{ service: "slipstream.v1.GatewayService", method: "ListModels" }],
      retryPolicy: {
        maxAttempts: 4,
        initialBackoff: "0.2s",
        maxBackoff: "2s",
        backoffMultiplier: 2,
        retryableStatusCodes: ["UNAVAILABLE"],
      },
    },
  ],
});
const plain = grpc.credentials.createInsecure();
const gateway = new packages.slipstream.v1.GatewayService(address, plain, { "grpc.service_config": config });
const deadline = () => ({ deadline: Date.now() + 60_000 });
const unary = (client, method, request) =>
  new Promise((done, failed) =>
    client[method](request, deadline(), (error, answer) => (error ? failed(error) : done(answer))),
  );

/** Events of a stream until its end: what its Started has, tokens, text, log-probabilities, what its Finished has. */
async function read(stream, each = () => {}) {
  const all = { tokens: [], text: "", logprobs: [] };
  for await (const event of stream) {
    if (event.event === "started") all.started = event.started;
    if (event.event === "finished") all.finished = event.finished;
    if (event.event === "delta") {
      assert.equal(event.delta.offset, all.tokens.length + (all.from ??= event.delta.offset));
      all.tokens.push(...event.delta.tokenIds);
      all.text += event.delta.text;
      all.logprobs.push(...event.delta.logprobs);
    }
    each(all, stream);
  }
  return all;
}

/** Reason, field and numbers of an error, out of grpc-status-details-bin. */
function told(error) {
  const decode = (name, bytes) => details[`google.rpc.${name}`].deserialize(bytes);
  const status = decode("Status", error.metadata.get("grpc-status-details-bin")[0]);
  const found = {};
  for (const { type_url: type, value } of status.details) {
    const name = type.split(".").pop();
    found[name] = decode(name, value);
  }
  return found;
}

const { models } = await unary(gateway, "ListModels", {});
assert(models[0].model.name && models[0].verifiers >= 1);
console.log("done models");

const prompt = "def read(self, path):";
const asked = { prompt, maxTokens: 24, sampling: { temperature: 0 } };
const whole = await read(gateway.Generate(asked, deadline()));
assert.equal(whole.tokens.length, 24);
assert.equal(whole.finished.outputTokens, 24);
assert.equal(whole.finished.reason, "FINISH_REASON_LENGTH");
const { tokenIds } = await unary(gateway, "Tokenize", { text: prompt });
assert.deepEqual(whole.started.promptTokenIds, tokenIds);
const compressed = { "grpc.default_compression_algorithm": grpc.compressionAlgorithms.gzip };
const zipped = new packages.slipstream.v1.GatewayService(address, plain, compressed);
assert.equal((await read(zipped.Generate(asked, deadline()))).text, whole.text);
console.log("done generate");

const { sessionId, revision } = whole.started;
const rest = await read(gateway.Resume({ sessionId, offset: 10, revision }, deadline()));
assert.deepEqual(rest.tokens, whole.tokens.slice(10));
assert(whole.text.endsWith(rest.text) && rest.text.length < whole.text.length);
console.log("done resume");

const messages = [{ role: "user", content: "Is 2 even?" }];
const schema = { type: "object", properties: { even: { type: "boolean" } }, required: ["even"], additionalProperties: false };
const chat = { chat: { messages }, maxTokens: 60, structuredOutput: { jsonSchema: JSON.stringify(schema) } };
const held = await read(gateway.Generate({ ...chat, logprobs: true, topLogprobs: 2 }, deadline()));
assert.equal(typeof JSON.parse(held.text).even, "boolean");
assert(held.logprobs.length === held.tokens.length && held.logprobs.every((one) => one.logprob <= 0 && one.top.length === 2));
console.log("done structured");

const back = await unary(gateway, "Rollback", { sessionId, outputTokens: 8, tokenIds: { tokenIds: [whole.tokens[9]] } });
assert.deepEqual([back.outputTokens, back.revision], [8, revision + 1]);
const edited = await read(gateway.Resume({ sessionId, offset: 8, revision: back.revision }, deadline()));
assert(edited.tokens.length === 16 && edited.tokens[0] === whole.tokens[9]);
const branch = await unary(gateway, "Rollback", { sessionId, outputTokens: 4, seed: "8", branch: true });
assert.notEqual(branch.key.id, sessionId);
assert.equal((await read(gateway.Resume({ sessionId: branch.key.id, offset: 4 }, deadline()))).tokens.length, 20);
const kept = await unary(gateway, "GetSession", { sessionId });
assert.deepEqual(kept.outputTokenIds, [...whole.tokens.slice(0, 8), ...edited.tokens]);
await assert.rejects(read(gateway.Resume({ sessionId, offset: 8, revision }, deadline())), (error) => {
  assert.equal(error.code, grpc.status.ABORTED);
  return told(error).ErrorInfo.reason === "ROLLED_BACK" && told(error).ErrorInfo.metadata.revision === "1";
});
console.log("done rollback");

const long = { prompt, maxTokens: 900, ignoreEos: true, sampling: { temperature: 0 } };
let stopped;
const ended = await read(gateway.Generate(long, deadline()), (all) => {
  if (all.tokens.length && !stopped) stopped = unary(gateway, "Cancel", { sessionId: all.started.sessionId });
});
await stopped;
assert.equal(ended.finished.reason, "FINISH_REASON_CANCELLED");
let left; // a call that its client gives up; its session waits, and goes on with the next token
await assert.rejects(
  read(gateway.Generate(long, deadline()), (all, stream) => {
    if (all.tokens.length) (left = all), stream.cancel();
  }),
  (error) => error.code === grpc.status.CANCELLED,
);
const paused = { sessionId: left.started.sessionId, offset: left.tokens.length };
let more = 0;
await read(gateway.Resume(paused, deadline()), (all, stream) => {
  if ((more = all.tokens.length)) stream.cancel();
}).catch((error) => assert.equal(error.code, grpc.status.CANCELLED));
assert(more > 0);
await unary(gateway, "Cancel", { sessionId: left.started.sessionId });
const soon = { deadline: Date.now() + 300 };
await assert.rejects(read(gateway.Generate(long, soon)), (error) => error.code === grpc.status.DEADLINE_EXCEEDED);
console.log("done cancel");

const refusals = [
  ["Generate", { ...asked, sampling: { temperature: -1 } }, "INVALID_ARGUMENT", "NUMBER_OUT_OF_RANGE", "sampling.temperature"],
  ["Generate", { ...asked, prompt: "even ".repeat(20_000) }, "INVALID_ARGUMENT", "PROMPT_TOO_LONG", "prompt"],
  ["Generate", { ...asked, model: "nothing" }, "NOT_FOUND", "NO_MODEL", "model"],
  ["Resume", { sessionId, offset: 1000 }, "OUT_OF_RANGE", "NO_OFFSET", "offset"],
  ["Resume", { sessionId: "nothing" }, "NOT_FOUND", "NO_SESSION"],
];
for (const [method, request, code, reason, field] of refusals)
  await assert.rejects(read(gateway[method](request, deadline())), (error) => {
    const { ErrorInfo, BadRequest } = told(error);
    assert.deepEqual(
      [error.code, ErrorInfo.reason, BadRequest?.fieldViolations[0].field],
      [grpc.status[code], reason, field],
    );
    return true;
  });
console.log("done error");

const health = new packages.grpc.health.v1.Health(address, plain);
for (const service of ["", "slipstream.v1.GatewayService"])
  assert.equal((await unary(health, "check", { service })).status, "SERVING");
await assert.rejects(unary(health, "check", { service: "nothing" }), (error) => error.code === grpc.status.NOT_FOUND);
console.log("done health");

const reflection = new packages.grpc.reflection.v1.ServerReflection(address, plain).ServerReflectionInfo();
const wishes = [{ listServices: "" }, { fileContainingSymbol: "slipstream.v1.GatewayService.Generate" }];
wishes.forEach((wish) => reflection.write(wish));
reflection.end();
const answers = [];
for await (const answer of reflection) answers.push(answer);
assert(answers[0].listServicesResponse.service.some(({ name }) => name === "slipstream.v1.GatewayService"));
assert(answers[1].fileDescriptorResponse.fileDescriptorProto.length > 0);
console.log("done reflection");

const closed = new packages.slipstream.v1.GatewayService(guarded, plain);
const metadata = new grpc.Metadata();
metadata.set("authorization", `Bearer ${key}`);
assert.equal((await read(closed.Generate(asked, metadata, deadline()))).text, whole.text);
await assert.rejects(read(closed.Generate(asked, deadline())), (error) => {
  return error.code === grpc.status.UNAUTHENTICATED && told(error).ErrorInfo.reason === "UNAUTHENTICATED";
});
console.log("done key");
for (const client of [gateway, zipped, health, closed]) client.close();
