// The title of a model's thoughts: how long it thinks, or has thought.

import { humanSeconds } from "./dom.js";
import { t } from "./language.js";

/** Return the title of thoughts: "Thinking … 3 s", "Thought for 12 s". */
export function thoughtsTitle({ content, tool_calls: calls, thinking_seconds: seconds }, isReplying) {
  const time = humanSeconds(seconds ?? 0);
  if (isReplying && !content && !calls?.length) return t("Thinking … {time}", { time });
  return seconds === undefined ? t("Thoughts") : t("Thought for {time}", { time });
}
