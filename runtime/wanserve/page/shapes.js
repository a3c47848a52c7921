// The choice of a shape: the sizes and lengths that the model was built for, as a row of radio buttons; and another
// one in two fields, where the server builds what is lacking.

import { byId, make } from "./dom.js";
import { aspect, lengthWords, shapeWords, sizeWords } from "./words.js";

const OTHER = "other";
let shapes = [];
let live = false;
let limit = null;
let chosen = "";

const keyOf = ({ size, num_frames }) => `${size}/${num_frames}`;

/** Shows a model's shapes, of a live video its sizes alone; the one that was chosen stays, if it is built or can be. */
export function showShapes(model, isLive) {
  live = isLive;
  const sizes = model.shapes.map(({ size }) => size);
  shapes = model.shapes.filter(({ size }, index) => !live || sizes.indexOf(size) === index);
  limit = live ? null : model.build_limit;
  const keys = shapes.map(keyOf);
  if (!keys.includes(chosen) && !(limit && chosen === OTHER)) chosen = keys[0] ?? "";
  const single = shapes.filter((shape, index) => keys.indexOf(keyOf(shape)) === index);
  const other = limit ? [make("label", { class: "chip" }, radio(OTHER), make("span", { text: "Another shape" }))] : [];
  byId("shapes").replaceChildren(...single.map((shape) => chip(shape, single)), ...other);
  byId("shape-field").hidden = single.length === 0;
  choose(chosen);
}

/** Chooses a button; the fields of another shape are there with theirs alone. */
function choose(key) {
  chosen = key;
  for (const input of byId("shapes").querySelectorAll("input")) input.checked = input.value === chosen;
  byId("other-shape").hidden = chosen !== OTHER;
}

const radio = (key) => make("input", { type: "radio", name: "shape", value: key, change: () => choose(key) });

function chip(shape, single) {
  const words = shapeWords(shape);
  const alike = single.some((other) => other !== shape && shapeWords(other) === words);
  const glyph = make("span", { class: "glyph", "aria-hidden": "true" });
  const ratio = aspect(shape.size);
  glyph.style.width = `${ratio >= 1 ? 18 : 18 * ratio}px`;
  glyph.style.height = `${ratio >= 1 ? 18 / ratio : 18}px`;
  const length = live ? [] : [lengthWords(shape.seconds)];
  const parts = [sizeWords(shape.size), ...length, ...(alike ? [`${shape.num_frames} frames`] : [])];
  const unbroken = parts.flatMap((text, index) => [index ? " " : "", make("b", { text: index < parts.length - 1 ? `${text},` : text })]);
  return make("label", { class: "chip" }, radio(keyOf(shape)), make("span", { class: "glyph-box" }, glyph), make("span", {}, ...unbroken));
}

/** Chooses a shape; one that is not built is another one, or becomes the nearest that is. */
export function chooseShape({ size, num_frames: frames }) {
  const exact = shapes.find((shape) => keyOf(shape) === `${size}/${frames}`);
  if (!exact && limit && size && frames) {
    byId("other-size").value = size;
    byId("other-frames").value = frames;
    return choose(OTHER);
  }
  const wanted = exact ?? shapes.find((shape) => shape.size === size) ?? shapes[0];
  choose(wanted ? keyOf(wanted) : "");
}

/** The size and the frames that are chosen; a live video has as many as it gets. */
export function shapeValues() {
  const other = { size: byId("other-size").value.trim(), num_frames: byId("other-frames").value.trim() };
  const shape = chosen === OTHER ? other : shapes.find((each) => keyOf(each) === chosen);
  if (!shape) return {};
  return { size: shape.size, ...(live ? {} : { num_frames: String(shape.num_frames) }) };
}

/** What is wrong with another shape, as `showError` takes it; the server knows what can be built. */
export function wrongShape() {
  const { size = "", num_frames: frames = "" } = shapeValues();
  if (chosen !== OTHER || (/^[0-9]+[xX*][0-9]+$/.test(size) && /^[0-9]+$/.test(frames))) return null;
  return ["size", "Enter a size such as 832x480, and a number of frames."];
}

/** The shapes of the chosen size and length; of another one every shape, since the nearest is its model. */
const alike = () => (chosen === OTHER ? shapes : shapes.filter((shape) => keyOf(shape) === chosen));

/** The rank of the slots for LoRAs that the chosen shape was built with. */
export const slotRank = () => Math.max(0, ...alike().map((shape) => shape.lora_rank));

/** The numbers of videos that the chosen shape was built for. */
export const builtCounts = () => [...new Set(alike().map((shape) => shape.num_videos))].sort((one, other) => one - other);
