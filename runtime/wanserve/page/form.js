// The composer's fields: shows what the model can do, reads what was typed, and fills it in again.

import { getModels, getSchema } from "./api.js";
import { byId, debounce, hasMouse, make, setText } from "./dom.js";
import { save } from "./draft.js";
import { showError, watchErrors } from "./errors.js";
import { fillLoras, loraValues, showLoras, typedLoras } from "./loras.js";
import { missingInput, showInputs, watchFiles } from "./media.js";
import { fillOptions, optionValues, setAside, showOptions, typedOptions, wrongOption } from "./options.js";
import { builtCounts, chooseShape, shapeValues, showShapes, slotRank, wrongShape } from "./shapes.js";
import { isLive } from "./videos.js";

const IN_FORM = ["prompt", "negative_prompt", "size", "num_frames", "schedule", "lora", "seed", "model", "live"];
let models = [];
let schemas = {};
let model = null;
let wanted = {};
let modelShown = () => {};
let keep = (typed) => save("draft", typed);

/** Readies the fields. What is typed from now on is kept. */
export function startForm() {
  const form = byId("composer");
  form.addEventListener("input", keepSoon);
  form.addEventListener("change", keepSoon);
  addEventListener("pagehide", () => model && keep(typed()));
  watchErrors(form);
  watchFiles();
  byId("model").addEventListener("change", () => showModel(byId("model").value));
  byId("schedule").addEventListener("change", showPreset);
  byId("play-live").addEventListener("change", () => showKind());
  byId("shapes").addEventListener("change", () => showFields());
  byId("more").querySelector("summary").addEventListener("click", () => {
    // What is opened comes into view, below the fold as it is.
    requestAnimationFrame(() => byId("more").open && byId("more").scrollIntoView({ block: "start" }));
  });
  byId("random").addEventListener("change", () => {
    showSeed();
    if (!byId("random").checked) byId("seed").focus();
  });
}

/** Sets what hears that another model is shown. */
export function onModel(action) {
  modelShown = action;
}

const keepSoon = debounce(() => model && keep(typed()), 250);

/** Sets where what is typed is kept. */
export function keepWith(action) {
  keep = action;
}

/** Asks which models there are; the typed text stays. */
export async function loadModels() {
  const [list, schema] = await Promise.all([getModels(), getSchema()]);
  for (const each of list) Object.assign(each, { loaded: null, problem: null }); // ready.js follows these
  if (JSON.stringify([list, schema]) === JSON.stringify([models, schemas])) return;
  const before = model ? typed() : { ...wanted, ...typedEarly() };
  models = list;
  schemas = schema;
  byId("model").replaceChildren(...models.map(({ id }) => make("option", { value: id, text: id })));
  byId("model-field").hidden = models.length < 2;
  fill(before);
}

/** The models that have an input of a name. */
export const modelsWith = (input) => models.filter(({ inputs }) => inputs.some(({ name }) => name === input));
export const currentModel = () => model;

function showModel(id) {
  model = models.find((each) => each.id === id) ?? models[0] ?? null;
  if (!model) return;
  byId("model").value = model.id;
  setText(byId("model-name"), model.id);
  byId("negative").hidden = !model.options.includes("negative_prompt");
  byId("negative_prompt").placeholder = model.defaults.negative_prompt ?? "";
  showInputs(model);
  byId("live-field").hidden = !model.live;
  showPresets();
  showKind();
  modelShown();
}

/** Whether a live video is asked for. */
const wantsLive = () => Boolean(model?.live) && byId("play-live").checked;

function showKind() {
  showShapes(model, wantsLive());
  showFields();
}

function showFields() {
  showLoras(model, slotRank());
  showOptions(model, schemas, builtCounts(), wantsLive());
  setAside(byId("schedule").value !== "");
}

function showPresets() {
  const select = byId("schedule");
  const before = select.value;
  const presets = model.presets ?? [];
  const choices = presets.map(({ name }) => make("option", { value: name, text: name }));
  select.replaceChildren(make("option", { value: "", text: "Default" }), ...choices);
  select.value = presets.some(({ name }) => name === before) ? before : "";
  byId("schedule-field").hidden = presets.length === 0;
  showPreset();
}

function showPreset() {
  const preset = model.presets?.find(({ name }) => name === byId("schedule").value);
  setText(byId("schedule-help"), preset?.description ?? "The model’s own steps and solver.");
  setAside(Boolean(preset));
}

function showSeed() {
  const random = byId("random").checked;
  byId("seed").disabled = random;
  byId("seed").placeholder = random ? "Random" : "A number, or 1, 2, 3";
}

/** All that was typed, as `fill` takes it. */
export function typed() {
  return {
    ...typedEarly(),
    model: model?.id,
    ...shapeValues(),
    schedule: byId("schedule").value,
    loras: typedLoras(),
    options: typedOptions(),
  };
}

/** What can be typed before the models are known. */
const typedEarly = () => ({
  prompt: byId("prompt").value,
  negative_prompt: byId("negative_prompt").value,
  seed: byId("seed").value,
  random: byId("random").checked,
  live: byId("play-live").checked,
});

/** Sets a field without moving the cursor of somebody who is in it. */
function setValue(id, value) {
  if (byId(id).value !== value) byId(id).value = value;
}

/** Fills all fields; before the models are known, they are filled once they are. */
export function fill(values) {
  wanted = values;
  setValue("prompt", values.prompt ?? "");
  setValue("negative_prompt", values.negative_prompt ?? "");
  byId("negative").open = Boolean(values.negative_prompt);
  setValue("seed", values.seed ?? "");
  byId("random").checked = values.random ?? true;
  byId("play-live").checked = values.live ?? true;
  showSeed();
  fillLoras(values.loras ?? []);
  fillOptions(values.options ?? {});
  showModel(values.model);
  if (!model) return;
  chooseShape(values);
  const preset = model.presets?.find(({ name }) => name === values.schedule);
  byId("schedule").value = preset?.name ?? "";
  showPreset();
  showFields();
}

/** A video's settings, as `fill` takes them. */
export function settingsOf(video) {
  const media = video.media.map(({ option }) => option);
  const windows = "window_frames" in video.options || "window_overlap" in video.options || isLive(video);
  const elsewhere = [...IN_FORM, ...media].filter((name) => !windows || name !== "num_frames");
  const further = Object.entries(video.options).filter(([name]) => !elsewhere.includes(name));
  const given = video.options.seed;
  const frames = video.live?.frames ? { num_frames: video.live.frames } : {};
  return {
    model: video.model,
    prompt: video.prompt,
    negative_prompt: video.options.negative_prompt,
    size: video.size,
    live: isLive(video),
    num_frames: windows ? video.options.window_frames : video.num_frames,
    schedule: video.options.schedule,
    loras: video.options.lora ?? [],
    seed: String(video.seed ?? given ?? ""),
    random: given === undefined || given === null || given === "random",
    options: { ...frames, ...Object.fromEntries(further.filter(([, value]) => value !== null)) },
  };
}

/** What is to be sent; what is left at its default is left out. */
export function given() {
  const negative = byId("negative_prompt").value;
  const preset = byId("schedule").value;
  return {
    model: model.id,
    prompt: byId("prompt").value,
    ...(negative.trim() && !byId("negative").hidden ? { negative_prompt: negative } : {}),
    ...shapeValues(),
    ...(wantsLive() ? { live: true } : {}),
    ...(preset ? { schedule: preset } : {}),
    ...seedValues(),
    ...loraValues(),
    ...optionValues(),
  };
}

/** The seed, or with commas the seeds of several videos. */
function seedValues() {
  const seed = byId("seed").value.trim();
  if (byId("random").checked) return { seed: "random" };
  return seed.includes(",") ? { seeds: seed } : { seed };
}

/** Whether the form can be sent; otherwise the first error is shown. */
export function isComplete() {
  const wrong = firstWrong();
  if (wrong) showError(...wrong);
  return !wrong;
}

function firstWrong() {
  if (!model) return ["form", "The server’s models are not known yet. Try again in a moment."];
  if (!byId("prompt").value.trim()) return ["prompt", "Describe what the video should show."];
  const missing = missingInput();
  if (missing) return [missing.name, `Choose ${missing.kind === "video" ? "a video" : "an image"}. The model needs it.`];
  const shape = wrongShape();
  if (shape) return shape;
  const seed = byId("seed").value.trim();
  if (!byId("random").checked && !/^[0-9]+(\s*,\s*[0-9]+)*$/.test(seed)) {
    return ["seed", "Enter a whole number, several with commas, or choose a random one."];
  }
  return wrongOption();
}

/** Brings the composer into view, with the focus in the prompt where that opens no screen keyboard. */
export function goToForm() {
  byId("composer-title").scrollIntoView({ block: "center" });
  document.querySelector(".composer-body").scrollTo(0, 0);
  if (hasMouse()) byId("prompt").focus({ preventScroll: true });
}
