// JSON that people write and read: the schema of the settings, and replies that keep to it.

import { t } from "./language.js";

/** Return what is wrong with a text that should be a JSON Schema, or "" if nothing is; an empty one is none. */
export function schemaProblem(text) {
  if (!text.trim()) return "";
  let schema;
  try {
    schema = JSON.parse(text);
  } catch (error) {
    return t("This is not JSON: {problem}.", { problem: error.message });
  }
  const isSchema = typeof schema === "boolean" || (typeof schema === "object" && schema !== null && !Array.isArray(schema));
  return isSchema ? "" : t("A JSON Schema is an object, such as {example}.", { example: '{"type": "object"}' });
}

const TOKEN = /"(?:[^"\\]|\\[^])*"?|[{}[\],:]|[^\s"{}[\],:]+/g;
const CLOSING = { "{": "}", "[": "]" };

/** Return JSON with line breaks and indents, its values as they are; it may be cut anywhere. */
export function indented(json) {
  const tokens = json.match(TOKEN) ?? [];
  let text = "";
  let depth = 0;
  tokens.forEach((token, i) => {
    const before = tokens[i - 1];
    const isClosing = token === "}" || token === "]";
    if (isClosing) depth -= 1;
    const isEmpty = isClosing && CLOSING[before] === token;
    const begins = before === "{" || before === "[" || before === "," || isClosing;
    if (i && begins && !isEmpty) text += `\n${"  ".repeat(depth)}`;
    text += token === ":" ? ": " : token;
    if (token in CLOSING) depth += 1;
  });
  return text;
}
