// Whether the chosen model could begin at once, beside its name: jobs load models, and others are released for them.

import { getModel, isReady } from "./api.js";
import { byId, setText, together } from "./dom.js";
import { currentModel, onModel } from "./form.js";
import { onVideo } from "./videos.js";

const AGAIN = 2000;
let timer = 0;

/** Follows the choice of a model, and what jobs load. */
export function startReady() {
  const soon = together(showReady);
  onModel(soon);
  onVideo((video, before) => video?.phase !== before?.phase && soon());
}

/** Asks the server, and again while it loads its first model. */
export async function showReady() {
  clearTimeout(timer);
  const model = currentModel();
  const ready = await isReady();
  const { loaded, problem } = ready && model ? await stateOf(model) : { loaded: false };
  if (model !== currentModel()) return;
  const mark = byId("ready");
  mark.hidden = ready === null || !model;
  mark.dataset.ready = String(loaded);
  setText(mark, problem ?? (loaded ? "Ready" : ready ? "Loads with its first video" : "Loading the model"));
  if (ready === false) timer = setTimeout(showReady, AGAIN);
}

async function stateOf({ id }) {
  try {
    return await getModel(id);
  } catch {
    return { loaded: false };
  }
}
