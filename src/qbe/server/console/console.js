// The console: asks the server once a second what it does, and answers one question in two tiers.

const TIERS = ["flex", "default", "priority"];
const $ = (id) => document.getElementById(id);
let key = sessionStorage.getItem("qbe-key") ?? "";
let models = [];

const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});
const money = (cost) => (cost === 0 ? "0" : cost >= 0.01 ? cost.toFixed(4) : cost.toExponential(2));
const bits = (value) => (value === null ? "–" : value.toFixed(2));

function element(tag, className, text) {
  const found = document.createElement(tag);
  if (className) found.className = className;
  if (text !== undefined) found.textContent = text;
  return found;
}

function showTiers(lastMinute, currency) {
  const total = TIERS.reduce((sum, tier) => sum + lastMinute[tier].tokens, 0);
  const bars = TIERS.filter((tier) => lastMinute[tier].tokens).map((tier) => {
    const bar = element("i", tier);
    bar.style.flexGrow = lastMinute[tier].tokens;
    bar.title = `${tier}: ${lastMinute[tier].tokens} tokens`;
    return bar;
  });
  $("mix").replaceChildren(...bars);
  $("mix").setAttribute("aria-label", total ? TIERS.map((t) => `${t} ${lastMinute[t].tokens}`).join(", ") : "no tokens yet");
  $("tiers").replaceChildren(...TIERS.map((tier) => {
    const { requests, tokens, average_weight_bits: average, cost } = lastMinute[tier];
    const line = element("li");
    line.append(element("i", `dot ${tier}`), `${tier}: ${tokens} tokens, ${requests} request${requests === 1 ? "" : "s"}, ${bits(average)} bits, ${money(cost)} ${currency}`);
    return line;
  }));
  const computed = TIERS.filter((tier) => lastMinute[tier].tokens);
  const weighted = computed.reduce((sum, tier) => sum + lastMinute[tier].tokens * lastMinute[tier].average_weight_bits, 0);
  $("bits").textContent = total ? bits(weighted / total) : "–";
  $("cost").textContent = money(TIERS.reduce((sum, tier) => sum + lastMinute[tier].cost, 0));
  $("currency").textContent = currency;
  const joules = TIERS.reduce((sum, tier) => sum + lastMinute[tier].joules, 0);
  $("energy").textContent = total ? (joules / total).toPrecision(2) : "–";
}

function showScale(scale) {
  if ($("scale").childElementCount) return;
  $("scale").append(...scale.map(([gear, colour]) => {
    const one = element("span"), dot = element("i", "dot");
    dot.style.background = colour;
    one.append(dot, `${gear}`);
    return one;
  }));
}

function showRequests(requests) {
  $("requests").replaceChildren(...requests.map((one) => {
    const line = element("li", ["running", "waiting"].includes(one.state) ? "" : "over");
    const tier = element("span");
    tier.append(element("i", `dot ${one.tier}`), one.tier);
    const id = element("span", "id", one.id.slice(-8));
    id.title = `${one.id}, key ${one.key}`;
    const strip = element("div", "strip");
    strip.title = `${one.strip.length} layers, ${bits(one.average_weight_bits)} bits on average`;
    strip.append(...one.strip.map(([, colour]) => {
      const cell = element("i");
      cell.style.background = colour;
      return cell;
    }));
    line.append(id, tier, strip, element("span", "number", `${bits(one.average_weight_bits)} bits`),
      element("span", "number", `${one.tokens} tok`), element("span", "number", `${one.seconds.toFixed(1)} s`),
      element("span", "number", ["running", "waiting"].includes(one.state) ? one.state : `${one.state} ${money(one.cost)}`));
    return line;
  }));
  $("nobody").hidden = requests.length > 0;
}

async function look() {
  try {
    const answer = await fetch("v1/qbe/live", { headers: headers(), cache: "no-store" });
    $("login").hidden = answer.status !== 401;
    if (answer.status === 401) {
      $("state").textContent = key ? "the key is unknown" : "a key is needed";
      return;
    }
    const now = await answer.json();
    $("state").textContent = now.ready ? "ready" : "not ready";
    $("model").textContent = now.model;
    document.title = `QBE · ${now.model}`;
    models = [now.model];
    $("speed").textContent = now.tokens_per_s.toFixed(now.tokens_per_s < 10 ? 1 : 0);
    $("answers").textContent = `${now.running} + ${now.waiting}`;
    $("pressure").textContent = now.brownout ? `written + waiting, brownout ${now.brownout}` : "written + waiting";
    $("says").textContent = `, ${now.energy}`;
    showTiers(now.last_minute, now.currency);
    showScale(now.scale);
    showRequests(now.requests);
  } catch {
    $("state").textContent = "the server does not answer";
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

async function ask(side, question, tokens, signal) {
  const [tier, text, facts] = [side.querySelector("select").value, side.querySelector(".answer"), side.querySelector(".facts")];
  text.textContent = "";
  facts.className = "soft facts";
  facts.textContent = "asked";
  const begun = performance.now();
  const fail = (message) => {
    facts.className = "bad facts";
    facts.textContent = message;
  };
  try {
    const answer = await fetch("v1/chat/completions", {
      method: "POST", signal, headers: { "Content-Type": "application/json", ...headers() },
      body: JSON.stringify({
        model: models[0], messages: [{ role: "user", content: question }], service_tier: tier, temperature: 0,
        max_completion_tokens: tokens, stream: true, stream_options: { include_usage: true },
      }),
    });
    if (!answer.ok) return fail((await answer.json()).error.message);
    for await (const event of events(answer)) {
      if (event.error) return fail(event.error.message);
      text.textContent += event.choices[0]?.delta.content ?? "";
      if (!event.usage) continue;
      const { completion_tokens: count, cost, qbe } = event.usage;
      const seconds = (performance.now() - begun) / 1000;
      facts.textContent = `${event.service_tier}: ${bits(qbe.average_weight_bits)} bits, ${count} tokens in ${seconds.toFixed(1)} s, `
        + `${money(cost)} ${qbe.currency}`;
    }
  } catch (error) {
    fail(error.name === "AbortError" ? "stopped" : "the server does not answer");
  }
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  sessionStorage.setItem("qbe-key", key);
  look();
});

let running = null;
$("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  running = new AbortController();
  $("go").disabled = true;
  $("stop").disabled = false;
  const tokens = Math.max(1, Number($("tokens").value) || 120);
  await Promise.all([...document.querySelectorAll(".side")].map((side) => ask(side, $("prompt").value, tokens, running.signal)));
  $("go").disabled = false;
  $("stop").disabled = true;
});
$("stop").addEventListener("click", () => running?.abort());

for (;;) {
  if (!document.hidden) await look();
  await new Promise((resolve) => setTimeout(resolve, 1000));
}
