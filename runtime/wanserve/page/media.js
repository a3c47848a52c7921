// The files of a request: one drop zone for each input of the model, filled by choosing, dropping or pasting.

import { say } from "./dialogs.js";
import { byId, icon, make } from "./dom.js";
import { clearErrors, showError } from "./errors.js";
import { label, plain } from "./words.js";

const held = new Map();
const addresses = new Map();
let inputs = [];

const slot = (name) => {
  if (!held.has(name)) held.set(name, { files: [], changed: false });
  return held.get(name);
};
const zoneOf = (name) => document.querySelector(`[data-input="${CSS.escape(name)}"]`);
const fits = (input, file) => !file.type || file.type.startsWith(`${input.kind}/`);

/** Shows the drop zones of a model; files of another model's inputs are kept for when it comes back. */
export function showInputs(model) {
  inputs = model.inputs;
  byId("inputs").replaceChildren(...inputs.map(zone));
  byId("inputs").hidden = inputs.length === 0;
  for (const input of inputs) show(input);
}

function zone(input) {
  const id = `input-${input.name}`;
  const file = make("input", {
    type: "file",
    id,
    class: "visually-hidden",
    accept: `${input.kind}/*`,
    multiple: input.many,
    "aria-labelledby": `${id}-name`,
    "aria-describedby": `${id}-help ${id}-error`,
    change: (event) => {
      event.stopPropagation();
      add(input, [...file.files]);
      file.value = "";
    },
  });
  const mark = input.required ? make("span", { class: "mark-required", text: "Required" }) : null;
  return make(
    "div",
    { class: "zone", "data-input": input.name },
    make("p", { class: "zone-name", id: `${id}-name` }, make("span", { text: label(input.name) }), " ", mark),
    make("ul", { class: "thumbs" }),
    file,
    make("label", { class: "drop", for: id }, icon(input.kind), make("span", { class: "drop-words" })),
    make("p", { class: "help", id: `${id}-help`, text: plain(input.description) }),
    make("p", { class: "error", id: `${id}-error`, "data-error-for": input.name, hidden: true }),
  );
}

function show(input) {
  const node = zoneOf(input.name);
  const { files } = slot(input.name);
  const list = node.querySelector(".thumbs");
  list.replaceChildren(...files.map((file) => thumb(input, file)));
  node.classList.toggle("filled", files.length > 0);
  const what = input.kind === "video" ? "a video" : "an image";
  const again = input.many ? "Add another" : "Choose another";
  node.querySelector(".drop-words").textContent = files.length ? again : `Choose, drop or paste ${what}`;
}

function release(file) {
  URL.revokeObjectURL(addresses.get(file));
  addresses.delete(file);
}

/** An address of a file for this page, made once. */
function addressOf(file) {
  if (!addresses.has(file)) addresses.set(file, URL.createObjectURL(file));
  return addresses.get(file);
}

function thumb(input, file) {
  const source = addressOf(file);
  const picture =
    input.kind === "video"
      ? make("video", { src: source, preload: "metadata", muted: true, playsinline: true, "aria-hidden": "true" })
      : make("img", { src: source, alt: "" });
  picture.addEventListener("error", () => picture.classList.add("broken"));
  const look = "button quiet icon-only";
  const away = make("button", { type: "button", class: look, "aria-label": `Remove ${file.name}` }, icon("close"));
  away.addEventListener("click", () => {
    put(input.name, slot(input.name).files.filter((other) => other !== file));
    byId(`input-${input.name}`).focus();
  });
  return make("li", { class: "thumb" }, picture, make("span", { class: "thumb-name", text: file.name, dir: "auto" }), away);
}

function add(input, files) {
  const fitting = files.filter((file) => fits(input, file));
  if (files.length && !fitting.length) {
    showError(input.name, input.kind === "video" ? "This file is no video." : "This file is no image.");
    return;
  }
  if (!fitting.length) return;
  put(input.name, input.many ? [...slot(input.name).files, ...fitting] : [fitting.at(-1)]);
  say(`${label(input.name)}: ${fitting.map((file) => file.name).join(", ")}`);
}

/** Puts files into an input in place of what it held. `changed` is false for those that the server has already. */
export function put(name, files, changed = true) {
  for (const old of slot(name).files) if (!files.includes(old)) release(old);
  Object.assign(slot(name), { files, changed });
  const input = inputs.find((each) => each.name === name);
  if (!input) return;
  clearErrors([byId(`input-${name}-error`)]);
  show(input);
}

/** The files of the model's inputs by name; with `changedOnly`, of those that were changed. */
export function mediaFiles(changedOnly = false) {
  const wanted = inputs.filter(({ name }) => (changedOnly ? slot(name).changed : slot(name).files.length));
  return Object.fromEntries(wanted.map(({ name }) => [name, slot(name).files]));
}

/** What all inputs hold, to be put back later by `restoreMedia`. */
export const mediaState = () => new Map([...held].map(([name, { files, changed }]) => [name, { files, changed }]));

export function restoreMedia(state) {
  for (const name of held.keys()) put(name, state.get(name)?.files ?? [], state.get(name)?.changed ?? false);
}

/** The first required input that is empty, or null. */
export const missingInput = () => inputs.find(({ name, required }) => required && !slot(name).files.length) ?? null;

/** Takes in files that were pasted, or dropped anywhere on the page. */
export function watchFiles() {
  document.addEventListener("paste", (event) => {
    const hasText = event.clipboardData.types.includes("text/plain");
    if (!hasText && take([...event.clipboardData.files], event.target)) event.preventDefault();
  });
  const carriesFiles = (event) => event.dataTransfer?.types.includes("Files");
  const mark = (event, on) => carriesFiles(event) && byId("inputs").classList.toggle("dragging", on);
  document.addEventListener("dragover", (event) => {
    if (!carriesFiles(event)) return;
    event.preventDefault();
    mark(event, true);
  });
  document.addEventListener("dragleave", (event) => event.relatedTarget === null && mark(event, false));
  document.addEventListener("drop", (event) => {
    if (!carriesFiles(event)) return;
    event.preventDefault();
    mark(event, false);
    take([...event.dataTransfer.files], event.target);
  });
}

/** Gives files to the zone that they were aimed at, else to the first empty one that they fit. */
function take(files, target) {
  const name = target?.closest?.("[data-input]")?.dataset.input;
  const aimed = inputs.find((input) => input.name === name);
  const open = document.querySelector("dialog[open]");
  if (!files.length || open) return false;
  const fitting = inputs.filter((input) => files.some((file) => fits(input, file)));
  const input = aimed ?? fitting.find((each) => !slot(each.name).files.length) ?? fitting[0];
  if (input) add(input, files);
  return Boolean(input);
}
