// The server's API: one function for each thing that can be asked of it, and the errors that it answers with.

const calls = { key: async () => false, lost: () => {} };

/** An answer that is an error; `status` 0 is no answer at all. */
class ApiError extends Error {
  constructor(status, message, { param = null, code = null, after = null } = {}) {
    super(message);
    Object.assign(this, { status, param, code, after });
  }
}

/** Sets what asks for a key (true once there is one), and what hears that the server cannot be reached. */
export function onTrouble({ key, lost }) {
  Object.assign(calls, { key, lost });
}

async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin", cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    calls.lost();
    throw new ApiError(0, "The server cannot be reached.");
  }
  if (response.ok) return response;
  if (response.status === 401 && path !== "/session" && (await calls.key())) return ask(path, options);
  throw await errorOf(response);
}

async function errorOf(response) {
  let said = {};
  try {
    said = (await response.json()).error ?? {};
  } catch {
    // A proxy's page, or nothing: the status has to do.
  }
  const message = said.message || `The server answered with error ${response.status}.`;
  return new ApiError(response.status, message, {
    param: said.param,
    code: said.code,
    after: Number(response.headers.get("Retry-After")) || null,
  });
}

async function askJson(path, options) {
  const response = await ask(path, options);
  try {
    return await response.json();
  } catch {
    calls.lost();
    throw new ApiError(0, "The server’s answer was cut off.");
  }
}

const json = (method, body) => ({
  method,
  headers: { "Content-Type": "application/json" },
  body: JSON.stringify(body),
});
const at = (id) => `/v1/videos/${encodeURIComponent(id)}`;

export const getModels = async () => (await askJson("/v1/models")).data;
export const getModel = (id) => askJson(`/v1/models/${encodeURIComponent(id)}`);
export const getSchema = async () => (await askJson("/openapi.json")).components.schemas;
export const getVideo = (id) => askJson(at(id));
export const listVideos = (query, signal) => askJson(`/v1/videos?${new URLSearchParams(query)}`, { signal });
export const moveVideo = (id, position) => askJson(at(id), json("PATCH", { position }));
export const steerVideo = (id, prompt) => askJson(at(id), json("PATCH", { prompt }));
export const changeVideo = (id, form) => askJson(at(id), { method: "PATCH", body: form });
export const cancelVideo = (id) => askJson(`${at(id)}/cancel`, { method: "POST" });
export const deleteVideo = (id) => askJson(at(id), { method: "DELETE" });
export const openSession = (key) => ask("/session", json("POST", { key }));
export const closeSession = () => ask("/session", { method: "DELETE" });

/** Makes a video. The same key never makes two, however often it is sent. */
export const createVideo = (form, key) =>
  askJson("/v1/videos", { method: "POST", headers: { "Idempotency-Key": key }, body: form });

export const previewPath = (id, step) => `${at(id)}/preview?step=${step}`;

export const contentPath = (id, index = 0, variant = "video") => `${at(id)}/content?index=${index}&variant=${variant}`;
export const mediaPath = (id, { option, index }) => `${at(id)}/media/${encodeURIComponent(option)}/${index}`;

/** A live video as it streams, no faster than it plays. */
export const getLive = (id, signal) => ask(`${at(id)}/live?pace=played`, { signal });

/** Fetches a file of the server's as a File with a name. */
export async function getFile(path, name) {
  const blob = await (await ask(path)).blob();
  return new File([blob], name, { type: blob.type });
}

/** Whether the server is ready, or null where it cannot be said. */
export async function isReady() {
  try {
    const { status } = await fetch("/readyz", { cache: "no-store" });
    if (status === 503) return false;
    return status === 200 ? true : null;
  } catch {
    return null;
  }
}

/** The form of a request: values as text, lists with commas, and files under their input's name. */
export function formOf(values, files = {}) {
  const form = new FormData();
  for (const [name, value] of Object.entries(values)) {
    if (value !== null && value !== undefined) form.append(name, String(value));
  }
  for (const [name, list] of Object.entries(files)) for (const file of list) form.append(name, file, file.name);
  return form;
}

/** A new random UUID; crypto.randomUUID is missing on plain HTTP. */
export function newKey() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  bytes[6] = (bytes[6] & 15) | 64;
  bytes[8] = (bytes[8] & 63) | 128;
  const hex = [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  return hex.replace(/^(.{8})(.{4})(.{4})(.{4})/, "$1-$2-$3-$4-");
}
