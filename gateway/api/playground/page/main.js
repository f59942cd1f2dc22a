// The page: reads the form, runs the request once or with and without speculation, shows what comes.

import { SNIPPETS } from "./code.js";
import { watchFleet } from "./fleet.js";
import { Palette, Run } from "./run.js";
import { chunks } from "./stream.js";
import { drawTimeline } from "./timeline.js";

const $ = (id) => document.getElementById(id);
const form = $("request");
const palette = new Palette($("legend"));
let stopping = null; // the AbortController of what runs now

// The key stays in the form's field: nothing stores it, and it leaves only in requests to this gateway.
const key = () => form.elements.key.value;

function request(speculate) {
  const field = (name) => form.elements[name].value;
  const number = (name) => (field(name) === "" ? undefined : Number(field(name)));
  const chat = field("mode") === "chat";
  const drafters = field("drafters").split(/[\s,]+/).filter(Boolean);
  const speculation = speculate ? { max_draft_tokens: number("max_draft_tokens"), drafters: drafters.length ? drafters : undefined } : { disabled: true };
  const system = field("system") ? [{ role: "system", content: field("system") }] : [];
  const input = chat ? { messages: [...system, { role: "user", content: field("prompt") }] } : { prompt: field("prompt") };
  const options = Object.fromEntries(["max_tokens", "temperature", "top_p", "seed"].map((name) => [name, number(name)]));
  if (form.elements.mixed_arithmetic.checked) options.mixed_arithmetic = true;
  const body = { ...input, ...options, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true }, speculation: { ...speculation, rounds: true } };
  return { chat, path: chat ? "/v1/chat/completions" : "/v1/completions", body };
}

async function execute(title, speculate) {
  const run = new Run(title, palette, (note) => { $("round").textContent = note; });
  $("runs").append(run.root);
  const { path, body } = request(speculate);
  let drawing = 0;
  const draw = () => { drawing ||= requestAnimationFrame(() => { drawing = 0; if (speculate) drawTimeline($("timeline"), run.rounds, palette); }); };
  const onState = (state) => say(state === "reconnecting" ? "Connection lost; reconnecting…" : `${title}…`);
  onState("streaming");
  for await (const chunk of chunks(path, body, key(), stopping.signal, onState)) {
    run.add(chunk);
    draw();
  }
  return run;
}

async function submit(event) {
  event.preventDefault();
  if (stopping) return;
  stopping = new AbortController();
  const { speculate, compare } = form.elements;
  const both = compare.checked;
  for (const id of ["error", "verdict"]) $(id).hidden = true;
  for (const id of ["runs", "timeline"]) $(id).replaceChildren();
  [$("run").disabled, $("stop").disabled] = [true, false];
  try {
    // One after the other: in one batch they would slow each other.
    const first = await execute(both || speculate.checked ? "With speculation" : "Without speculation", both || speculate.checked);
    if (both) judge(first, await execute("Without speculation", false));
    say("Done.");
  } catch (error) {
    if (stopping.signal.aborted) say("Stopped.");
    else fail(error.message);
  } finally {
    stopping = null;
    [$("run").disabled, $("stop").disabled] = [false, true];
  }
}

function judge(fast, plain) {
  const same = fast.text === plain.text;
  const speeds = `${fast.speed.toFixed(1)} and ${plain.speed.toFixed(1)} tokens/s`;
  $("verdict").textContent = same
    ? `Identical text: ${fast.tokens} tokens, ${speeds}.`
    : `Different text (${speeds}). Equal text is promised with one seed in fp32 on a CPU; in bf16 a near-tie may fall the other way.`;
  $("verdict").classList.toggle("different", !same);
  $("verdict").hidden = false;
}

function fail(message) {
  say("Failed.");
  $("error").textContent = message;
  $("error").hidden = false;
}

function say(text) {
  if ($("status").textContent !== text) $("status").textContent = text;
}

function renderForm() {
  const chat = form.elements.mode.value === "chat";
  $("system-field").hidden = !chat;
  $("prompt-name").textContent = chat ? "Message" : "Prompt";
  const language = document.querySelector("input[name=language]:checked").value;
  const asked = request(form.elements.speculate.checked);
  // Code for users asks for what they want: text, not this page's details.
  const { rounds, ...speculation } = asked.body.speculation;
  const { stream, stream_options, ...body } = asked.body;
  $("snippet").textContent = SNIPPETS[language]({ ...asked, body: { ...body, speculation } });
}

async function copy() {
  try {
    await navigator.clipboard.writeText($("snippet").textContent);
    say("Copied.");
  } catch { // no clipboard outside of secure contexts
    getSelection().selectAllChildren($("snippet"));
    say("Selected; copy it with the keyboard.");
  }
}

form.addEventListener("submit", submit);
form.addEventListener("input", renderForm);
$("code").addEventListener("input", renderForm);
$("stop").addEventListener("click", () => stopping?.abort());
$("copy").addEventListener("click", copy);
renderForm();
watchFleet(key);
