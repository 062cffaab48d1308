// A question in a dialog: yes or no, or a line of text.

import { byId } from "./dom.js";

async function ask(text, yes, value) {
  const dialog = byId("question");
  const answer = byId("question-answer");
  const wantsText = value !== null;
  byId("question-text").textContent = text;
  byId("question-yes").textContent = yes;
  byId("question-answer-label").hidden = !wantsText;
  answer.value = value ?? "";
  dialog.returnValue = "no";
  dialog.showModal();
  if (wantsText) answer.select();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  return dialog.returnValue === "yes" ? answer.value : null;
}

byId("question-answer").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.isComposing) return;
  event.preventDefault(); // the first button of the form is Cancel
  byId("question").close("yes");
});

/** Whether the user agrees; `yes` names the button that does. */
export const confirmed = async (text, yes) => (await ask(text, yes, null)) !== null;

/** The line the user has written, or null. */
export const askLine = (text, yes, value) => ask(text, yes, value);
