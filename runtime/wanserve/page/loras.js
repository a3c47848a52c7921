// The LoRAs of a model: a list with a box for each, and sliders for its strength, or for those of two experts.

import { byId, make, setText } from "./dom.js";
import { label } from "./words.js";

const LEAST = -1;
const MOST = 2;
const WORDS = { strength: "Strength", high: "High noise", low: "Low noise" };

/** What was chosen by name, also of LoRAs that this model lacks: whether it is on, and its strengths. */
const held = new Map();
let loras = [];
let haveSlots = true;

const keysOf = ({ experts }) => (experts.length > 1 ? experts : ["strength"]);
const choiceOf = (name) => {
  if (!held.has(name)) held.set(name, { on: false, strengths: {} });
  return held.get(name);
};
const strengthOf = (name, key) => choiceOf(name).strengths[key] ?? choiceOf(name).strengths.strength ?? 1;

/** Shows the LoRAs of a model; `rank` is that of the slots of the shape that is chosen. */
export function showLoras(model, rank) {
  loras = model.loras ?? [];
  haveSlots = rank > 0;
  byId("loras").replaceChildren(...loras.map(row));
  byId("lora-field").hidden = loras.length === 0;
  byId("lora-field").disabled = !haveSlots;
  setText(byId("lora-help"), haveSlots ? "" : "This shape was built without LoRAs.");
}

function row(lora, index) {
  const { name } = lora;
  const id = `lora-${index}`;
  const box = make("input", { type: "checkbox", "aria-describedby": `${id}-help` });
  const sliders = keysOf(lora).map((key) => slider(name, key, `${id}-${key}`));
  const strengths = make("div", { class: "strengths" }, ...sliders);
  box.checked = choiceOf(name).on;
  strengths.hidden = !box.checked;
  box.addEventListener("change", () => {
    choiceOf(name).on = box.checked;
    strengths.hidden = !box.checked;
  });
  return make(
    "li",
    { class: "lora", "data-lora": name },
    make("label", { class: "check" }, box, " ", make("span", { text: name, dir: "auto" })),
    make("p", { class: "help", id: `${id}-help`, text: about(lora) }),
    strengths,
  );
}

function slider(name, key, id) {
  const value = strengthOf(name, key);
  const shown = make("span", { class: "strength-value", "aria-hidden": "true", text: words(value) });
  const input = make("input", { type: "range", id, min: Math.min(LEAST, value), max: Math.max(MOST, value), step: 0.05 });
  input.value = value;
  input.addEventListener("input", () => {
    choiceOf(name).strengths[key] = Number(input.value);
    setText(shown, words(Number(input.value)));
  });
  const of = make("span", { class: "visually-hidden", text: ` of ${name}` });
  return make("div", { class: "strength" }, make("label", { for: id, text: WORDS[key] }, of), input, shown);
}

const words = (value) => String(+value.toFixed(2));

/** What a LoRA is for, and which options it brings. */
function about({ rank, experts, defaults }) {
  const alone = experts.length === 1 ? [`${WORDS[experts[0]]} alone`] : [];
  const brought = Object.entries(defaults).map(([name, value]) => `${label(name)} ${Array.isArray(value) ? value.join(", ") : value}`);
  return [`Rank ${rank}`, ...alone, ...brought].join(" · ");
}

/** What is chosen, as a request has it: nothing, or the field with its JSON. */
export function loraValues() {
  const chosen = haveSlots ? loras.filter(({ name }) => choiceOf(name).on) : [];
  const said = chosen.map((lora) => ({
    name: lora.name,
    ...Object.fromEntries(keysOf(lora).map((key) => [key, strengthOf(lora.name, key)])),
  }));
  return said.length ? { lora: JSON.stringify(said) } : {};
}

/** All that was chosen, also of LoRAs that this model lacks, as `fillLoras` takes it. */
export const typedLoras = () =>
  [...held].filter(([, { on }]) => on).map(([name, { strengths }]) => ({ name, ...strengths }));

/** Chooses LoRAs with their strengths, and no others; `showLoras` shows them. */
export function fillLoras(list) {
  held.clear();
  for (const { name, ...strengths } of list) held.set(name, { on: true, strengths });
}
