// The playground: one question at two precisions, both streamed, and what differs between the answers marked.

import { compare } from "./differences.js";
import { bits, count, element, fillStrip, money, seconds } from "./format.js";

const $ = (id) => document.getElementById(id);
const sides = [...document.querySelectorAll(".side")];
const part = (side, name) => side.querySelector(`.${name}`);
let asking = null;

// Offer the tiers that the key may use, the cheapest against the dearest.
export function offerTiers(tiers) {
  const names = Object.keys(tiers), offered = [...part(sides[0], "tier").options].map((option) => option.value);
  if (names.join() === offered.join()) return;
  sides.forEach((side, number) => {
    part(side, "tier").replaceChildren(...names.map((name) => element("option", "", name)));
    part(side, "tier").value = names[number ? names.length - 1 : 0];
  });
  // With one tier alone, its own choice is compared with the most that it may read.
  part(sides[1], "bits").value = names.length === 1 ? tiers[names[0]].ceiling : "";
}

// The blueprint of an answer, when the server shows its request.
export function showBlueprints(requests) {
  for (const side of sides) {
    const found = requests.find((one) => one.id === side.dataset.id);
    if (found && part(side, "strip").hidden) fillStrip(part(side, "strip"), found.strip, found.average_weight_bits);
  }
}

export function reset() {
  asking?.abort();
  $("verdict").textContent = "";
  for (const side of sides) {
    delete side.dataset.id;
    part(side, "answer").textContent = part(side, "facts").textContent = "";
    part(side, "strip").hidden = true;
  }
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) if (line !== "data: [DONE]") yield JSON.parse(line.slice("data: ".length));
  }
}

function body(side, model) {
  const wanted = part(side, "bits").value;
  const system = $("system").value.trim();
  return {
    model, messages: [...(system ? [{ role: "system", content: system }] : []), { role: "user", content: $("prompt").value }],
    service_tier: part(side, "tier").value, temperature: Number($("temperature").value) || 0, seed: 1,
    max_completion_tokens: Math.max(1, Number($("tokens").value) || 120), stream: true,
    stream_options: { include_usage: true }, ...(wanted ? { qbe: { bits: Number(wanted) } } : {}),
  };
}

// One answer: its text and usage, or null.
async function ask(side, model, headers, signal) {
  const [text, facts, begun] = [part(side, "answer"), part(side, "facts"), performance.now()];
  text.textContent = "";
  part(side, "strip").hidden = true;
  delete side.dataset.id;
  facts.className = "soft facts";
  facts.textContent = "asked";
  let usage = null, tier = "";
  try {
    const answer = await fetch("v1/chat/completions", {
      method: "POST", signal, headers: { "Content-Type": "application/json", ...headers }, body: JSON.stringify(body(side, model)),
    });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    for await (const event of events(answer)) {
      if (event.error) throw new Error(event.error.message);
      side.dataset.id = event.id;
      text.append(event.choices[0]?.delta.content ?? "");
      [usage, tier] = [event.usage ?? usage, event.service_tier ?? tier];
    }
  } catch (error) {
    facts.className = "bad facts";
    facts.textContent = error.name === "AbortError" ? "stopped" : error instanceof TypeError ? "the server does not answer" : error.message;
    return null;
  }
  if (!usage) return null;
  facts.textContent = `${tier}: ${bits(usage.qbe.average_weight_bits)} bits, ${count(usage.completion_tokens)} tokens in `
    + `${seconds((performance.now() - begun) / 1000)}, ${money(usage.cost, usage.qbe.currency)}`;
  return { text: text.textContent, cost: usage.cost, currency: usage.qbe.currency, node: text };
}

function judge(first, second) {
  const { left, right, same } = compare(first.text, second.text);
  for (const [node, found] of [[first.node, left], [second.node, right]]) {
    node.replaceChildren(...found.map(([text, equal]) => (equal ? text : element("mark", "", text))));
  }
  const [low, high] = [first.cost, second.cost].sort((a, b) => a - b);
  const alike = same === 1 ? "Both answers are the same." : `${Math.round(same * 100)} % of the words are the same; what differs is marked.`;
  const cost = low > 0 && high > low * 1.005 ? ` One costs ${(high / low).toPrecision(2)} times the other.` : "";
  const million = high > 0 ? ` A million of them: ${money(first.cost * 1e6, first.currency)} and ${money(second.cost * 1e6, second.currency)}.` : "";
  $("verdict").textContent = alike + cost + million;
}

// Wire the form. `model` and `headers` are functions, for they change.
export function start(model, headers) {
  $("ask").addEventListener("submit", async (event) => {
    event.preventDefault();
    asking = new AbortController();
    $("go").disabled = true;
    $("stop").disabled = false;
    $("verdict").textContent = "";
    const found = await Promise.all(sides.map((side) => ask(side, model(), headers(), asking.signal)));
    if (found.every(Boolean)) judge(...found);
    $("go").disabled = false;
    $("stop").disabled = true;
  });
  $("stop").addEventListener("click", () => asking?.abort());
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit($("go"));
  });
}
