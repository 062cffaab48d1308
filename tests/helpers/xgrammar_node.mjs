// web-xgrammar and xgrammar.js in Node: each line of the input is a call, each line of the output its result.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const [library, script] = process.argv.slice(2);
// The library was built for pages and for CommonJS; its messages must not get between the results.
Object.assign(globalThis, { require: createRequire(import.meta.url), __filename: library, __dirname: "." });
console.log = console.error;
await import(script);

const objects = [];
const kept = (object) => objects.push(object) - 1;
const calls = {
  open: async (tokens, size, ends) => kept(await openWebgemmaXgrammar(library, tokens, size, ends)),
  compile: async (id, ebnf) => kept(await objects[id].compile(ebnf)),
  mask: (id) => Buffer.from(objects[id].mask()).toString("base64"),
  accept: (id, token) => objects[id].accept(token),
  rollback: (id, count) => objects[id].rollback(count) ?? null,
  forced: (id) => objects[id].forced(),
  copy: (id) => kept(objects[id].copy()),
  free: (id) => (objects[id] = null),
};

for await (const line of createInterface({ input: process.stdin })) {
  const [name, ...given] = JSON.parse(line);
  let answer;
  try {
    answer = { result: await calls[name](...given) };
  } catch (error) {
    answer = { error: String(error.message ?? error).slice(0, 500) };
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
