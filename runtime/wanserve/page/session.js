// The key: asks for it when the server wants one, and signs out.

import { closeSession, openSession } from "./api.js";
import { openDialog } from "./dialogs.js";
import { byId } from "./dom.js";
import { load, save } from "./draft.js";

const MARK = "signed-in";
let pending = null;

/** Asks for the key, once for however many requests wait for it; false if there is none. */
export function askForKey() {
  pending ??= new Promise((done) => {
    const dialog = byId("key-dialog");
    byId("key").value = "";
    showKeyError("");
    openDialog(dialog);
    dialog.addEventListener("close", () => done(dialog.returnValue === "signed-in"), { once: true });
  }).then((signedIn) => {
    pending = null;
    showButtons(signedIn);
    return signedIn;
  });
  return pending;
}

function showButtons(signedIn) {
  save(MARK, signedIn || null);
  byId("sign-out").hidden = !signedIn;
  byId("enter-key").hidden = signedIn;
}

function showKeyError(message) {
  byId("key-error").textContent = message;
  byId("key-error").hidden = !message;
  byId("key").setAttribute("aria-invalid", String(Boolean(message)));
}

async function signIn(event) {
  event.preventDefault();
  const field = byId("key");
  if (!field.value) return failed("Enter the key.");
  try {
    await openSession(field.value);
    field.value = "";
    byId("key-dialog").close("signed-in");
  } catch (error) {
    failed(error.status === 401 ? "This key is wrong." : error.message);
  }
}

function failed(message) {
  showKeyError(message);
  byId("key").select();
  byId("key").focus();
}

async function signOut() {
  try {
    await closeSession();
  } catch (error) {
    if (error.status === 0) return;
  }
  save(MARK, null);
  location.reload();
}

/** Readies the dialog and the buttons; the page is loaded anew once a key was given later. */
export function startSession() {
  byId("sign-out").hidden = load(MARK) === null;
  byId("key-form").addEventListener("submit", signIn);
  byId("key-dialog").addEventListener("cancel", () => byId("key-dialog").close("none"));
  byId("key-dialog").querySelector("[data-action=not-now]").addEventListener("click", () => byId("key-dialog").close("none"));
  byId("sign-out").addEventListener("click", signOut);
  byId("enter-key").addEventListener("click", async () => {
    if (await askForKey()) location.reload();
  });
}
