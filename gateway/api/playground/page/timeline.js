// Rounds of one run on lanes: the verifier's steps, and what each drafter did meanwhile.

import { element } from "./run.js";

const SVG = "http://www.w3.org/2000/svg";
const LANE = 26; // as `.lanes span` in style.css
const BAR = 16;
const LAST_TICK = 60; // room for what stands behind it
const LEAST_WIDTH = 300;
const PIXELS_PER_MS = 0.6;
const MOST_ROUNDS = 400; // the last ones: more bars make the page slow

/** Draws the rounds by the verifier's clock: a round ends its waiting and its step after the round before. */
export function drawTimeline(host, rounds, palette) {
  const spans = [];
  let at = 0;
  for (const round of rounds.slice(-MOST_ROUNDS)) {
    const began = at + (spans.length ? round.wait_ms : 0);
    const ended = began + round.verify_ms;
    const title = `Round ${round.round}: ${round.drafted} drafted, ${round.accepted} accepted`;
    spans.push({ lane: "verifier", began, ended, names: "verifying", title });
    for (const draft of round.drafts) {
      const [from, to] = [ended - draft.began_ms, ended - draft.ended_ms];
      spans.push({ lane: draft.drafter, began: Math.max(0, from), ended: Math.max(0, to), names: palette.of(draft.drafter), title: `${draft.drafter}: ${draft.candidates} candidates` });
    }
    at = ended;
  }
  const lanes = [...new Set(["verifier", ...spans.map((span) => span.lane)])];
  const names = element("div", "lanes", "");
  names.append(...lanes.map((lane) => element("span", "", lane)));
  const width = Math.max(LEAST_WIDTH, at * PIXELS_PER_MS) + LAST_TICK;
  const height = LANE * lanes.length + 22;
  const svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.append(titled(`${rounds.length} rounds in ${Math.round(at)} ms`));
  for (const span of spans) {
    const bar = make("rect", { x: span.began * PIXELS_PER_MS, y: LANE * lanes.indexOf(span.lane) + 5, height: BAR, width: Math.max(1, (span.ended - span.began) * PIXELS_PER_MS), class: span.names });
    bar.append(titled(span.title));
    svg.append(bar);
  }
  for (let tick = 0; tick <= at; tick += 250) svg.append(label(`${tick} ms`, tick * PIXELS_PER_MS, height - 6));
  const atEnd = host.scrollLeft + host.clientWidth >= host.scrollWidth - 4;
  host.replaceChildren(names, svg); // the names stay where bars scroll
  if (atEnd) host.scrollLeft = host.scrollWidth; // who scrolled back stays there
}

function make(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function titled(text) {
  const title = make("title", {});
  title.textContent = text;
  return title;
}

function label(text, x, y) {
  const made = make("text", { x, y });
  made.textContent = text;
  return made;
}
