// What will be sent with the next message: chosen, pasted, dropped or recorded pictures and sounds.

import { attach, kindOf, shown } from "./attachments.js";
import { button, byId, element } from "./dom.js";

/** A list of attachments, each with a button that takes it away; `remove(attachment)` is told. */
export function attachmentList(attachments, remove) {
  return attachments.map((attachment) => {
    const gone = button("✕", "icon", () => remove(attachment));
    gone.ariaLabel = `Remove ${attachment.name}`;
    return element("li", attachment.kind, shown(attachment), gone);
  });
}

/** Calls `changed()` when it has more or less, and `tell(sentence)` when a file is none to attach. */
export class Tray {
  constructor(changed, tell) {
    this.changed = changed;
    this.tell = tell;
    this.attachments = [];
    this.reading = 0; // files that are being decoded
    const input = byId("attach-file");
    byId("attach").addEventListener("click", () => input.click());
    input.addEventListener("change", () => {
      this.add([...input.files]);
      input.value = ""; // the same file may be chosen again
    });
    document.addEventListener("paste", (event) => this.paste(event));
  }

  /** Text that comes with a picture of itself is pasted as text. */
  paste(event) {
    const files = [...event.clipboardData.files].filter(kindOf);
    const isElsewhere = document.querySelector("dialog[open]") || event.target.closest?.(".edit");
    if (!files.length || isElsewhere || event.clipboardData.types.includes("text/plain")) return;
    event.preventDefault();
    this.add(files);
  }

  /** Take files, in their order, as far as they can be decoded. */
  async add(files) {
    this.reading += 1;
    this.show();
    const found = await Promise.allSettled(files.map(attach));
    this.reading -= 1;
    const taken = found.filter(({ value }) => value).map(({ value }) => value);
    this.attachments.push(...taken);
    this.show();
    byId("announcer").textContent = taken.length ? `Attached: ${taken.map(({ name }) => name).join(", ")}` : "";
    const problems = found.filter(({ reason }) => reason).map(({ reason }) => reason.message);
    if (problems.length) this.tell(problems.join(" "));
  }

  /** Hand over what there is. */
  take() {
    const { attachments } = this;
    this.attachments = [];
    this.show();
    return attachments;
  }

  show() {
    const { attachments } = this;
    byId("tray").replaceChildren(...attachmentList(attachments, (gone) => {
      this.attachments = attachments.filter((other) => other !== gone);
      this.show();
      byId("prompt").focus();
    }));
    byId("tray-state").textContent = this.reading ? "Reading …" : "";
    this.changed();
  }
}
