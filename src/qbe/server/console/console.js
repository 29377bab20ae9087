// The console: asks the server once a second what it does and shows it; the playground is a file of its own.

import { bits, count, element, fillStrip, money, seconds } from "./format.js";
import { offerTiers, reset, showBlueprints, start } from "./playground.js";

const $ = (id) => document.getElementById(id);
const TIERS = ["flex", "default", "priority"];
const RUNNING = ["running", "waiting"];
let key = sessionStorage.getItem("qbe-key") ?? "";
let model = "";
let shown = "";

const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});
const cell = (text, className = "number") => element("td", className, text);
const dotted = (tag, tier) => {
  const found = element(tag, "", element("i", `dot ${tier}`), tier);
  if (tag === "th") found.scope = "row";
  return found;
};

function showTiers(now) {
  const { last_minute: minute, currency } = now, tiers = now.key.tiers;
  const priced = Object.values(tiers).some((tier) => tier.input || tier.output);
  document.querySelectorAll(".price").forEach((one) => { one.hidden = !priced; });
  $("tiers").tBodies[0].replaceChildren(...Object.entries(tiers).map(([name, tier]) => {
    const { requests, tokens, average_weight_bits: average, cost } = minute[name];
    return element("tr", "", dotted("th", name), cell(`${tier.bits[0]} to ${tier.bits[1]}`),
      ...(priced ? [cell(money(tier.input, currency)), cell(money(tier.output, currency))] : []),
      cell(count(requests)), cell(count(tokens)), cell(bits(average)), cell(money(cost, currency)));
  }));
}

function showNumbers(now) {
  const all = TIERS.map((tier) => now.last_minute[tier]), sum = (of) => all.reduce((total, one) => total + of(one), 0);
  const tokens = sum((one) => one.tokens), cost = sum((one) => one.cost), joules = sum((one) => one.joules);
  $("speed").textContent = now.tokens_per_s.toFixed(now.tokens_per_s < 10 ? 1 : 0);
  $("bits").textContent = tokens ? bits(sum((one) => one.tokens * (one.average_weight_bits ?? 0)) / tokens) : "–";
  $("cost").textContent = money(cost, now.currency);
  $("rate").textContent = cost ? `last minute; ${money(cost * 60, now.currency)} an hour` : "in the last minute";
  $("energy").textContent = tokens ? `${(joules / tokens).toPrecision(2)} J` : "–";
  $("says").textContent = now.energy === "model" ? ", assumed" : `, ${now.energy}`;
  $("answers").textContent = count(now.running);
  $("waiting").textContent = `running, ${count(now.waiting)} waiting`;
}

function showHistory(now) {
  const totals = now.history.map((minute) => TIERS.reduce((sum, tier) => sum + minute[tier], 0));
  const most = Math.max(1, ...totals), sum = (of) => now.history.reduce((total, minute) => total + minute[of], 0);
  $("history").replaceChildren(...now.history.map((minute, i) => {
    const bar = element("span", "", ...TIERS.filter((tier) => minute[tier]).map((tier) => {
      const piece = element("i", tier);
      piece.style.height = `${(100 * minute[tier]) / most}%`;
      return piece;
    }));
    const ago = now.history.length - 1 - i;
    bar.title = `${ago ? `${ago} min ago` : "this minute"}: ${count(totals[i])} tokens, ${count(minute.requests)} requests, ${money(minute.cost, now.currency)}`;
    return bar;
  }));
  const told = `${count(totals.reduce((a, b) => a + b, 0))} tokens in ${count(sum("requests"))} requests, ${money(sum("cost"), now.currency)}; at most ${count(Math.max(...totals))} tokens a minute.`;
  $("sum").textContent = told;
  $("history").setAttribute("aria-label", told);
}

function showScale(scale) {
  if ($("scale").childElementCount) return;
  $("scale").append(...scale.map(([gear, colour]) => {
    const dot = element("i", "dot");
    dot.style.background = colour;
    return element("span", "", dot, `${gear} bits`);
  }));
}

function showRequests(now) {
  const { requests, key: asks } = now;
  const keys = asks.operator && asks.name !== null;
  document.querySelector("#requests .key").hidden = !keys;
  $("requests").parentElement.hidden = !requests.length;
  $("nobody").hidden = requests.length > 0;
  const rows = requests.map((one) => {
    const id = element("th", "id", one.id.slice(-8));
    id.scope = "row";
    id.title = one.id + (one.ended ? `, ended ${new Date(one.ended * 1000).toLocaleTimeString()}` : "");
    const strip = element("div", "strip");
    fillStrip(strip, one.strip, one.average_weight_bits);
    return element("tr", RUNNING.includes(one.state) ? "" : "over", id, ...(keys ? [cell(one.key, "")] : []), dotted("td", one.tier),
      element("td", "", strip), cell(bits(one.average_weight_bits)), cell(count(one.prompt_tokens)), cell(count(one.tokens)),
      cell(seconds(one.seconds)), cell(RUNNING.includes(one.state) ? "–" : money(one.cost, one.currency)),
      cell(one.arm === "candidate" ? `${one.state}, candidate` : one.state, ""));
  });
  $("requests").tBodies[0].replaceChildren(...rows);
}

// Renewed only where something has changed, so that a screen reader is not told the same again.
function showWarnings(warnings) {
  if ([...$("warnings").children].map((one) => one.textContent).join() === warnings.join()) return;
  $("warnings").replaceChildren(...warnings.map((text) => element("li", "", text)));
}

function show(now) {
  model = now.model;
  document.title = `QBE · ${model}`;
  $("state").textContent = now.ready ? "ready" : "not ready";
  $("model").textContent = model;
  $("inside").hidden = false;
  $("who").hidden = $("leave").hidden = now.key.name === null;
  $("who").textContent = now.key.name === null ? "" : now.key.name + (now.key.operator ? ", operator" : "");
  offerTiers(now.key.tiers);
  showWarnings(now.warnings);
  showScale(now.scale);
  showNumbers(now);
  showBlueprints(now.requests);
  const text = JSON.stringify([now.requests, now.last_minute, now.history, now.key]);
  if (text === shown) return;
  shown = text;
  showTiers(now);
  showHistory(now);
  showRequests(now);
}

async function look() {
  const asked = key;
  try {
    const answer = await fetch("v1/qbe/live", { headers: headers(), cache: "no-store" });
    if (asked !== key) return; // signed out, or in, in the meantime
    if (answer.status === 401) {
      $("login").hidden = false;
      $("inside").hidden = true;
      $("who").hidden = $("leave").hidden = true;
      $("state").textContent = key ? "the key is unknown" : "a key is needed";
      return;
    }
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    $("login").hidden = true;
    show(await answer.json());
  } catch (error) {
    $("state").textContent = error instanceof TypeError ? "the server does not answer" : error.message;
  }
}

$("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  sessionStorage.setItem("qbe-key", key);
  await look();
  if (!$("inside").hidden) $("playground").focus();
});

$("leave").addEventListener("click", async () => {
  key = shown = $("key").value = "";
  sessionStorage.removeItem("qbe-key");
  reset();
  $("inside").hidden = true;
  await look();
  $("key").focus();
});

start(() => model, headers);
for (;;) {
  if (!document.hidden) await look();
  await new Promise((resolve) => setTimeout(resolve, 1000));
}
