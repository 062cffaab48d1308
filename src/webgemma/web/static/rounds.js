// Rounds of calls in a reply: message.rounds = [{content, thinking, thinking_seconds?, calls}], each what the model wrote before its calls,
// and those calls: {name, arguments, state, result, seconds}. What follows the last round is the message's own content.
// The states of a call: "waiting" for those before it, "asking" the user, "running", and then "done", "refused" by the
// user, "failed" or "stopped".

export const MAX_ROUNDS = 10; // in one reply; then the model has to answer without another call
const STOPPED = "The user stopped this call.";
const ENDED = ["done", "refused", "failed", "stopped"];
const MOST = 1000; // rounds, and calls of one, in a file that is imported

export const isEnded = ({ state }) => ENDED.includes(state);

/** Return how many messages an engine is sent for a message; `isOpen`: it is the last one, and is continued. */
export function sentCount({ role, content, rounds = [] }, isOpen = false) {
  if (role === "user") return 1;
  return rounds.reduce((count, { calls }) => count + 1 + calls.length, 0) + (content || isOpen ? 1 : 0);
}

/** Return what an engine is sent for a message with this content: the model's calls, their results, the rest. */
export function sentMessages(message, content, isOpen = false) {
  const { role, rounds = [], thinking } = message;
  const sent = rounds.flatMap(({ content: before, thinking: thoughts, calls }, i) => {
    const ids = calls.map((_, j) => `call_${i}_${j}`);
    const made = calls.map(({ name, arguments: given }, j) => ({ id: ids[j], type: "function", function: { name, arguments: given } }));
    const said = { role, content: before, tool_calls: made, ...(thoughts && { thinking: thoughts }) };
    return [said, ...calls.map(({ name, result = STOPPED }, j) => ({ role: "tool", tool_call_id: ids[j], name, content: result }))];
  });
  if (role === "user" || content || isOpen) sent.push({ role, content, ...(isOpen && thinking && { thinking }) });
  return sent;
}

/** Begin a round with the calls that a message ends with; return them. */
export function beginRound(message) {
  const { content, thinking = "", thinking_seconds: seconds, tool_calls: made, rounds = [] } = message;
  const calls = made.map((call) => ({ ...call, state: "waiting" }));
  // Emptied, not deleted: other tabs take over the fields that they are sent.
  const round = { content, thinking, thinking_seconds: seconds, calls };
  Object.assign(message, { rounds: [...rounds, round], content: "", thinking: "", thinking_seconds: undefined, tool_calls: [] });
  return calls;
}

/** End the calls of a message that have not ended: nobody will answer or run them any more. */
export function stopCalls({ rounds = [] }) {
  for (const call of rounds.flatMap(({ calls }) => calls)) {
    if (!isEnded(call)) Object.assign(call, { state: "stopped", result: STOPPED });
  }
}

// In exported files

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isList = (value, check) => Array.isArray(value) && value.length <= MOST && value.every(check);

/** Whether a value of a file is a number of seconds. */
export const isDuration = (value) => Number.isFinite(value) && value >= 0;

function isCall(call) {
  return isObject(call) && typeof call.name === "string" && isObject(call.arguments)
    && ["string", "undefined"].includes(typeof call.result);
}

/** Whether rounds of a file can be read. */
export const areRounds = (rounds) => isList(rounds, (round) =>
  isObject(round) && typeof round.content === "string" && typeof (round.thinking ?? "") === "string"
  && isList(round.calls, isCall) && round.calls.length > 0);

/** Return the fields of rounds that an exported file holds: calls that have not ended are stopped. */
export const roundsFields = (rounds) => rounds.map(({ content, thinking = "", thinking_seconds: thought, calls }) => ({
  content,
  thinking,
  ...(isDuration(thought) && { thinking_seconds: thought }),
  calls: calls.map(({ name, arguments: given, state, result = STOPPED, seconds }) => ({
    name,
    arguments: given,
    state: isEnded({ state }) ? state : "stopped",
    result,
    ...(isDuration(seconds) && { seconds }),
  })),
}));
