// The notice that offers to undo the deletion of conversations, as long as they are kept.

import { KEEP_MILLISECONDS } from "./conversations.js";
import { plural, t } from "./language.js";
import { hideNotice, noticeText, showNotice } from "./notice.js";

const MARGIN_MILLISECONDS = 500; // that the offer ends before the conversation does

/** `restore(conversation)` undoes the deletion of one. */
export class UndoNotice {
  constructor(restore) {
    this.restore = restore;
    this.offered = [];
    this.message = "";
  }

  /** Offer to undo what has just been deleted, together with what the notice offers already. */
  offer(...conversations) {
    if (!conversations.length) return;
    if (!this.message || noticeText() !== this.message) this.offered = [];
    this.offered.push(...conversations);
    const [{ title }] = this.offered;
    this.message = this.offered.length === 1
      ? t("“{title}” was deleted.", { title })
      : plural(this.offered.length, "{count} conversation was deleted.", "{count} conversations were deleted.");
    const { offered } = this;
    showNotice(this.message, { name: t("Undo"), act: () => offered.forEach((conversation) => this.restore(conversation)) });
    const end = Math.max(...offered.map(({ deleted }) => deleted)) + KEEP_MILLISECONDS - MARGIN_MILLISECONDS;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.hide(), end - Date.now());
  }

  hide() {
    if (noticeText() === this.message) hideNotice();
    this.offered = [];
  }
}
