// The choice of a shape: the sizes and lengths that the model was built for, as a row of radio buttons.

import { byId, make } from "./dom.js";
import { aspect, lengthWords, shapeWords, sizeWords } from "./words.js";

let shapes = [];
let chosen = "";

const keyOf = ({ size, num_frames }) => `${size}/${num_frames}`;

/** Shows a model's shapes; the one that was chosen stays, if it is built. */
export function showShapes(model) {
  shapes = model.shapes;
  const keys = shapes.map(keyOf);
  if (!keys.includes(chosen)) chosen = keys[0] ?? "";
  const single = shapes.filter((shape, index) => keys.indexOf(keyOf(shape)) === index);
  byId("shapes").replaceChildren(...single.map((shape) => chip(shape, single)));
  byId("shape-field").hidden = single.length === 0;
}

function chip(shape, single) {
  const key = keyOf(shape);
  const words = shapeWords(shape);
  const alike = single.some((other) => other !== shape && shapeWords(other) === words);
  const input = make("input", { type: "radio", name: "shape", value: key, change: () => (chosen = key) });
  input.checked = key === chosen;
  const glyph = make("span", { class: "glyph", "aria-hidden": "true" });
  const ratio = aspect(shape.size);
  glyph.style.width = `${ratio >= 1 ? 18 : 18 * ratio}px`;
  glyph.style.height = `${ratio >= 1 ? 18 / ratio : 18}px`;
  const parts = [sizeWords(shape.size), lengthWords(shape.seconds), ...(alike ? [`${shape.num_frames} frames`] : [])];
  const unbroken = parts.flatMap((text, index) => [index ? " " : "", make("b", { text: index < parts.length - 1 ? `${text},` : text })]);
  return make("label", { class: "chip" }, input, make("span", { class: "glyph-box" }, glyph), make("span", {}, ...unbroken));
}

/** Chooses a shape; what is not given, or not built, becomes the nearest that is built. */
export function chooseShape({ size, num_frames: frames }) {
  const wanted =
    shapes.find((shape) => keyOf(shape) === `${size}/${frames}`) ?? shapes.find((shape) => shape.size === size) ?? shapes[0];
  chosen = wanted ? keyOf(wanted) : "";
  for (const input of byId("shapes").querySelectorAll("input")) input.checked = input.value === chosen;
}

/** The size and the frames that are chosen. */
export function shapeValues() {
  const shape = shapes.find((each) => keyOf(each) === chosen);
  return shape ? { size: shape.size, num_frames: String(shape.num_frames) } : {};
}

/** The rank of the slots for LoRAs that the chosen shape was built with. */
export const slotRank = () => Math.max(0, ...shapes.filter((shape) => keyOf(shape) === chosen).map((shape) => shape.lora_rank));

/** The numbers of videos that the chosen shape was built for. */
export function builtCounts() {
  const counts = shapes.filter((shape) => keyOf(shape) === chosen).map((shape) => shape.num_videos);
  return [...new Set(counts)].sort((one, other) => one - other);
}
