// Names of the times at which conversations were last used: "Today", "Previous 7 days", "October 2026".

import { language, t } from "./language.js";

const MONTH = new Intl.DateTimeFormat(language, { month: "long", year: "numeric" });

/** Return a function that names the group of a time in milliseconds, as seen today. */
export function dateGroups(now = new Date()) {
  const daysAgo = (days) => new Date(now.getFullYear(), now.getMonth(), now.getDate() - days).getTime();
  const groups = [
    [daysAgo(0), t("Today")],
    [daysAgo(1), t("Yesterday")],
    [daysAgo(7), t("Previous 7 days")],
    [daysAgo(30), t("Previous 30 days")],
  ];
  return (time) => groups.find(([start]) => time >= start)?.[1] ?? monthOf(time);
}

function monthOf(time) {
  try {
    return MONTH.format(time);
  } catch {
    return t("Older"); // not a date: an imported file may have said so before that was checked
  }
}
