// The further options of a model, as fields made from the server's schema. An empty field is the default.

import { byId, make, setText } from "./dom.js";
import { label, plain } from "./words.js";

const ELSEWHERE = ["model", "prompt", "negative_prompt", "size", "num_frames", "profile", "schedule", "lora", "seed", "live"];
/** A preset decides these, and the server refuses them beside one. */
const BY_PRESET = ["num_steps", "flow_shift", "solver", "timesteps"];

const typed = new Map();
let fields = [];

/** Shows the fields of a model. `counts` are the numbers of videos that can be made at once. */
export function showOptions(model, schemas, counts, isLive) {
  const properties = schemas.CreateVideo?.properties ?? {};
  const media = model.inputs.map((input) => input.name);
  const windows = isLive || model.options.includes("window_frames") ? ["num_frames"] : []; // more than a shape has
  const elsewhere = [...ELSEWHERE, ...media].filter((name) => !windows.includes(name));
  const names = model.options.filter((name) => properties[name] && !elsewhere.includes(name));
  fields = names
    .map((name) => ({ name, rule: ruleOf(properties[name], model.fields[name], schemas), usual: model.defaults[name] }))
    .map((field) => (field.name === "num_videos" ? { ...field, rule: { ...field.rule, choices: counts } } : field))
    .filter(({ rule }) => rule.choices.length !== 1);
  byId("options").replaceChildren(...fields.map(row));
  byId("more").hidden = fields.length === 0;
  showCount();
}

/** One property of a schema without its null and its references, with the text and the choices of the model. */
function ruleOf(property, { description, choices, default: usual }, schemas) {
  const kinds = (property.anyOf ?? property.oneOf ?? [property])
    .map((kind) => (kind.$ref ? schemas[kind.$ref.split("/").pop()] : kind))
    .filter((kind) => kind.type !== "null");
  return { ...kinds[0], choices, description: plain(description), usual: usual ?? property.default };
}

function row(field) {
  const { name, rule } = field;
  const id = `option-${name}`;
  field.control = controlOf(field, id);
  field.control.value = typed.get(name) ?? "";
  field.control.addEventListener("input", () => {
    typed.set(name, field.control.value);
    showCount();
  });
  return make(
    "div",
    { class: "field option" },
    make("label", { for: id, text: label(name) }),
    field.control,
    make("p", { class: "help", id: `${id}-help`, text: rule.description }),
    make("p", { class: "error", id: `${id}-error`, "data-error-for": name, hidden: true }),
  );
}

function controlOf({ name, rule, usual }, id) {
  const common = { id, name, "aria-describedby": `${id}-help ${id}-error` };
  const standard = usual ?? rule.usual ?? null;
  const given = Array.isArray(standard) ? standard.join(", ") : standard;
  if (rule.choices.length || rule.type === "boolean") {
    const choices = rule.type === "boolean" ? ["true", "false"] : rule.choices;
    const first = make("option", { value: "", text: given === null ? "Default" : `Default (${given})` });
    return make("select", common, first, ...choices.map((choice) => make("option", { value: choice, text: choice })));
  }
  const placeholder = given === null || given === "" ? "Default" : String(given);
  if (rule.type === "string" && rule.maxLength) return make("textarea", { ...common, placeholder, rows: 3, dir: "auto" });
  if (rule.type !== "integer" && rule.type !== "number") return make("input", { ...common, placeholder, autocomplete: "off" });
  return make("input", {
    ...common,
    type: "number",
    placeholder,
    min: rule.minimum,
    max: rule.maximum,
    step: rule.type === "integer" ? 1 : "any",
    inputmode: rule.type === "integer" ? "numeric" : "decimal",
  });
}

/** Sets aside what a preset decides. */
export function setAside(hasPreset) {
  for (const { name, rule, control } of fields) {
    if (!BY_PRESET.includes(name)) continue;
    control.disabled = hasPreset;
    setText(byId(`option-${name}-help`), hasPreset ? "The preset decides this." : rule.description);
  }
  showCount();
}

/** The first field that holds something impossible, with what is wrong: [name, message], or null. */
export function wrongOption() {
  for (const { name, rule, control } of fields) {
    const { validity, value } = control;
    if (control.disabled || (!value && validity.valid)) continue;
    if (validity.badInput) return [name, "Enter a number."];
    if (validity.stepMismatch) return [name, "Enter a whole number."];
    if (validity.rangeUnderflow) return [name, `Enter at least ${rule.minimum}.`];
    if (validity.rangeOverflow) return [name, `Enter at most ${rule.maximum}.`];
    if (Number(value) <= rule.exclusiveMinimum) return [name, `Enter more than ${rule.exclusiveMinimum}.`];
    if (Number(value) >= rule.exclusiveMaximum) return [name, `Enter less than ${rule.exclusiveMaximum}.`];
  }
  return null;
}

/** What is given, by name. */
export function optionValues() {
  const given = fields.filter(({ control }) => !control.disabled && control.value.trim() !== "");
  return Object.fromEntries(given.map(({ name, control }) => [name, control.value.trim()]));
}

/** All that was typed, also for fields that this model lacks. */
export const typedOptions = () => Object.fromEntries(typed);

/** Fills the fields; what is not given becomes empty. */
export function fillOptions(values) {
  typed.clear();
  for (const [name, value] of Object.entries(values)) typed.set(name, Array.isArray(value) ? value.join(", ") : String(value));
  for (const { name, control } of fields) control.value = typed.get(name) ?? "";
  showCount();
}

function showCount() {
  const count = Object.keys(optionValues()).length;
  setText(byId("more-count"), count ? `${count} set` : "");
}
