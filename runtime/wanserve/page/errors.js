// Errors of the form: each stands beside the field that it is about, and the focus goes there.

import { plain } from "./words.js";

const SAME_FIELD = { num_frames: "size", profile: "size" };

const nodes = () => [...document.querySelectorAll("#composer [data-error-for]")];

/** Shows an error at a field, or at the form where there is no such field; returns where it stands. */
export function showError(param, message) {
  const shown = nodes().filter((node) => !node.parentElement.closest("[hidden]"));
  const at = (name, among = shown) => among.find((node) => node.dataset.errorFor === name);
  const own = at(param);
  const elsewhere = own && !controlOf(own)?.value ? at(SAME_FIELD[param]) : undefined; // one that was left empty
  const node = elsewhere ?? own ?? at(SAME_FIELD[param]) ?? at("form", nodes());
  node.textContent = plain(message);
  node.hidden = false;
  node.tabIndex = -1;
  const fold = node.closest("details");
  if (fold) fold.open = true;
  const control = controlOf(node);
  if (control && !control.disabled) {
    control.setAttribute("aria-invalid", "true");
    control.focus();
  } else {
    node.focus();
  }
  node.scrollIntoView({ block: "nearest" });
  return node.dataset.errorFor;
}

/** Takes back the error of one node, or all of them. */
export function clearErrors(list = nodes()) {
  for (const node of list) {
    node.hidden = true;
    node.textContent = "";
    controlOf(node)?.removeAttribute("aria-invalid");
  }
}

/** An error goes away once its field is used. */
export function watchErrors(form) {
  const used = (event) => {
    const group = event.target.closest(".field, .zone");
    clearErrors(nodes().filter((node) => node.dataset.errorFor === "form" || group?.contains(node)));
  };
  form.addEventListener("input", used);
  form.addEventListener("change", used);
}

function controlOf(node) {
  const control = document.querySelector(`[aria-describedby~="${node.id}"]`);
  return control?.matches("fieldset") ? control.querySelector("input:checked") : control;
}
