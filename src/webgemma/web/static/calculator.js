// The calculator: reads an expression with a parser of its own, never as a program, and computes with fractions of
// whole numbers of any length. What has no exact value (most roots, logarithms, sines) is a number of about 15 digits,
// marked by "≈". Its errors are sentences for the model, in English.

const MAX_LENGTH = 2000; // of an expression
const MAX_DEPTH = 100; // of parentheses, signs and powers within each other
const MAX_BITS = 200_000; // of a whole number: about 60 000 digits
const MAX_DIGITS = 300; // that are written out
const MAX_EXPONENT = 20_000; // of 10 in a number, as in 1e20000
const MAX_FACTORIAL = 5000;

const fail = (message) => {
  throw new Error(message);
};
const magnitude = (n) => (n < 0n ? -n : n);
const bitsOf = (n) => magnitude(n).toString(16).length * 4;

function gcd(a, b) {
  let [x, y] = [magnitude(a), magnitude(b)];
  while (y) [x, y] = [y, x % y];
  return x;
}

// Values: {n, d}, the exact fraction n/d with d > 0, or {x}, a number that is not exact.

function exact(n, d = 1n) {
  if (d === 0n) fail("Division by zero.");
  if (bitsOf(n) > MAX_BITS || bitsOf(d) > MAX_BITS) fail("The numbers become too long: more than 60 000 digits.");
  const divisor = gcd(n, d) * (d < 0n ? -1n : 1n);
  return { n: n / divisor, d: d / divisor };
}

function inexact(x) {
  if (Number.isNaN(x)) fail("The result is not a real number.");
  if (!Number.isFinite(x)) fail("The result is too large for a number that is not exact.");
  return { x };
}

const isExact = ({ d }) => d !== undefined;
const isWhole = ({ d }) => d === 1n;
const areExact = (...values) => values.every(isExact);

/** Return a value as the nearest number, or nearly so. */
function asNumber({ n, d, x }) {
  if (x !== undefined) return x;
  const shift = bitsOf(d) - bitsOf(n) + 70; // the quotient then has 66 to 74 bits
  const quotient = shift >= 0 ? (n << BigInt(shift)) / d : n / (d << BigInt(-shift));
  const half = Math.trunc(shift / 2); // 2 ** -shift alone may be 0
  return inexact(Number(quotient) * 2 ** -half * 2 ** -(shift - half)).x;
}

/** Return the logarithm of a value to base e, also of one that no number can hold. */
function logarithm(value) {
  if (compare(value, exact(0n)) <= 0) fail("Only numbers above 0 have a logarithm.");
  if (!isExact(value)) return Math.log(value.x);
  const ofWhole = (n) => {
    const shift = Math.max(0, bitsOf(n) - 64);
    return Math.log(Number(n >> BigInt(shift))) + shift * Math.LN2;
  };
  return bitsOf(value.n) < 900 && bitsOf(value.d) < 900 ? Math.log(asNumber(value)) : ofWhole(value.n) - ofWhole(value.d);
}

function compare(a, b) {
  const difference = areExact(a, b) ? a.n * b.d - b.n * a.d : asNumber(a) - asNumber(b);
  return difference > 0 ? 1 : difference < 0 ? -1 : 0;
}

const negative = (a) => (isExact(a) ? { n: -a.n, d: a.d } : { x: -a.x });
const add = (a, b) => (areExact(a, b) ? exact(a.n * b.d + b.n * a.d, a.d * b.d) : inexact(asNumber(a) + asNumber(b)));
const subtract = (a, b) => add(a, negative(b));
const multiply = (a, b) => (areExact(a, b) ? exact(a.n * b.n, a.d * b.d) : inexact(asNumber(a) * asNumber(b)));

function divide(a, b) {
  if (areExact(a, b)) return exact(a.n * b.d, a.d * b.n);
  return asNumber(b) ? inexact(asNumber(a) / asNumber(b)) : fail("Division by zero.");
}

/** Return the largest whole number that is not above a value. */
function floor(a) {
  if (!isExact(a)) return exact(BigInt(Math.floor(a.x)));
  const quotient = a.n / a.d;
  return exact(quotient * a.d > a.n ? quotient - 1n : quotient);
}

const ceiling = (a) => negative(floor(negative(a)));
const modulo = (a, b) => subtract(a, multiply(b, floor(divide(a, b)))); // has the sign of b

/** Round to a number of decimals; halves away from zero. */
function round(a, decimals = exact(0n)) {
  const scale = power(exact(10n), whole(decimals, "The number of decimals"));
  const half = exact(1n, 2n);
  const scaled = multiply(isExact(a) ? a : parsed(String(a.x)), scale);
  const rounded = scaled.n < 0n ? ceiling(subtract(scaled, half)) : floor(add(scaled, half));
  return divide(rounded, scale);
}

function whole(a, what = "The argument") {
  return isExact(a) && isWhole(a) ? a : fail(`${what} must be a whole number.`);
}

/** Return the whole root of n, which is not negative: the largest r with r ** k <= n. */
function wholeRoot(n, k) {
  if (n < 2n) return n;
  let root = 1n << BigInt(Math.ceil(bitsOf(n) / Number(k)));
  for (;;) { // Newton's method from above
    const next = ((k - 1n) * root + n / root ** (k - 1n)) / k;
    if (next >= root) return root;
    root = next;
  }
}

/** Return the k-th root of a value, exactly if it is a fraction. */
function root(a, k = exact(2n)) {
  const { n: degree } = whole(k, "The degree of a root");
  if (degree < 1n || degree > 1000n) fail("The degree of a root must be from 1 to 1000.");
  if (compare(a, exact(0n)) < 0) {
    return degree % 2n ? negative(root(negative(a), k)) : fail("A negative number has no real root of an even degree.");
  }
  if (isExact(a)) {
    const [n, d] = [a.n, a.d].map((part) => wholeRoot(part, degree));
    if (n ** degree === a.n && d ** degree === a.d) return exact(n, d);
  }
  return inexact(degree === 2n ? Math.sqrt(asNumber(a)) : degree === 3n ? Math.cbrt(asNumber(a)) : asNumber(a) ** (1 / Number(degree)));
}

function power(a, b) {
  if (areExact(a, b) && isWhole(b)) {
    const times = magnitude(b.n);
    if (BigInt(Math.max(bitsOf(a.n), bitsOf(a.d))) * times > BigInt(MAX_BITS) && magnitude(a.n) + a.d > 2n) {
      fail("The power is too long to be written: it has more than 60 000 digits.");
    }
    if (magnitude(a.n) + a.d <= 2n && a.n) return exact(a.n < 0n && times % 2n ? -1n : 1n); // of 1 and -1
    return b.n < 0n ? exact(a.d ** times, a.n ** times) : exact(a.n ** times, a.d ** times);
  }
  if (compare(a, exact(0n)) < 0 && !(isExact(b) && isWhole(b))) fail("A negative number has no real power of a fraction: use root(x, n) for an odd n.");
  if (areExact(a, b) && b.d <= 1000n) {
    const base = root(a, exact(b.d));
    if (isExact(base)) return power(base, exact(b.n));
  }
  return inexact(asNumber(a) ** asNumber(b));
}

/** Return the product of the whole numbers from `first` to `last`. */
function productOf(first, last) {
  if (last - first < 8n) {
    let product = 1n;
    for (let n = first; n <= last; n += 1n) product *= n;
    return product;
  }
  const middle = (first + last) / 2n;
  return productOf(first, middle) * productOf(middle + 1n, last);
}

function counting(a, what) {
  const { n } = whole(a, what);
  return n >= 0n && n <= MAX_FACTORIAL ? n : fail(`${what} must be from 0 to ${MAX_FACTORIAL}.`);
}

const factorial = (a) => exact(productOf(1n, counting(a, "The argument of a factorial")));

/** Return in how many orders k of n can be drawn. */
function arrangements(a, b) {
  const [n, k] = [counting(a, "The first argument"), counting(b, "The second argument")];
  return exact(k > n ? 0n : productOf(n - k + 1n, n));
}

const ofNumber = (compute) => (a) => inexact(compute(asNumber(a)));

/** Return a function of an angle, without the last digits' noise around 0 and around poles. */
const ofAngle = (compute) => (a) => {
  const x = compute(asNumber(a));
  if (Math.abs(x) > 1e15) fail("The tangent has no value there.");
  return inexact(Math.abs(x) < 1e-15 ? 0 : x);
};

const extreme = (sign) => (...values) => values.reduce((a, b) => (sign * compare(b, a) > 0 ? b : a));
const total = (...values) => values.reduce(add);
const ofWholes = (compute) => (...values) => exact(values.map((a) => whole(a).n).reduce(compute));

/** By name: the function, and how many arguments it takes at least and at most. */
const FUNCTIONS = {
  abs: [(a) => (compare(a, exact(0n)) < 0 ? negative(a) : a)],
  sign: [(a) => exact(BigInt(compare(a, exact(0n))))],
  floor: [floor],
  ceil: [ceiling],
  trunc: [(a) => (compare(a, exact(0n)) < 0 ? ceiling(a) : floor(a))],
  round: [round, 1, 2],
  sqrt: [(a) => root(a)],
  cbrt: [(a) => root(a, exact(3n))],
  root: [root, 2],
  pow: [power, 2],
  exp: [ofNumber(Math.exp)],
  ln: [(a) => inexact(logarithm(a))],
  log: [(a, base = exact(10n)) => logarithmTo(a, base), 1, 2],
  log2: [(a) => logarithmTo(a, exact(2n))],
  log10: [(a) => logarithmTo(a, exact(10n))],
  sin: [ofAngle(Math.sin)],
  cos: [ofAngle(Math.cos)],
  tan: [ofAngle(Math.tan)],
  asin: [ofNumber(Math.asin)],
  acos: [ofNumber(Math.acos)],
  atan: [ofNumber(Math.atan)],
  atan2: [(a, b) => inexact(Math.atan2(asNumber(a), asNumber(b))), 2],
  sinh: [ofNumber(Math.sinh)],
  cosh: [ofNumber(Math.cosh)],
  tanh: [ofNumber(Math.tanh)],
  radians: [ofNumber((x) => (x * Math.PI) / 180)],
  degrees: [ofNumber((x) => (x * 180) / Math.PI)],
  factorial: [factorial],
  ncr: [(a, b) => divide(arrangements(a, b), factorial(b)), 2],
  npr: [arrangements, 2],
  mod: [modulo, 2],
  gcd: [ofWholes(gcd), 1, Infinity],
  lcm: [ofWholes((a, b) => (a && b ? magnitude(a * b) / gcd(a, b) : 0n)), 1, Infinity],
  min: [extreme(-1), 1, Infinity],
  max: [extreme(1), 1, Infinity],
  sum: [total, 1, Infinity],
  mean: [(...values) => divide(total(...values), exact(BigInt(values.length))), 1, Infinity],
};
const CONSTANTS = { pi: Math.PI, π: Math.PI, tau: 2 * Math.PI, e: Math.E };

/** Return the logarithm to a base, exactly if it is a whole number. */
function logarithmTo(a, base) {
  const x = logarithm(a) / (logarithm(base) || fail("A logarithm to base 1 does not exist."));
  const nearest = Math.round(x);
  const isPower = areExact(a, base) && Math.abs(x - nearest) < 1e-9 * Math.max(1, Math.abs(x))
    && compare(power(base, exact(BigInt(nearest))), a) === 0;
  return isPower ? exact(BigInt(nearest)) : inexact(x);
}

// The parser

const TOKEN = /\s*(?:(?<number>(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?<name>[A-Za-zπ][A-Za-z_0-9]*)|(?<sign>\*\*|\/\/|[-+*/^%!(),√×÷−·]))/y;
const SAME = { "**": "^", "×": "*", "·": "*", "÷": "/", "−": "-" };

function tokensOf(text) {
  const tokens = [];
  TOKEN.lastIndex = 0;
  const { length } = text.trimEnd();
  while (TOKEN.lastIndex < length) {
    const at = TOKEN.lastIndex;
    const found = TOKEN.exec(text);
    if (!found) fail(`The calculator does not know “${[...text.slice(at).trim()][0]}”.`);
    const { number, name, sign } = found.groups;
    if (number) tokens.push({ kind: "number", text: number });
    else if (name) tokens.push({ kind: "name", text: name.toLowerCase() });
    else tokens.push({ kind: "sign", text: SAME[sign] ?? sign });
  }
  return tokens;
}

/** Return a decimal number as a fraction. */
function parsed(text) {
  const [digits, exponent = "0"] = text.replaceAll("_", "").toLowerCase().split("e");
  const [before, after = ""] = digits.split(".");
  const shift = Number(exponent) - after.length;
  if (Math.abs(shift) > MAX_EXPONENT) fail(`The exponent of ${text.slice(0, 40)} is too large.`);
  const n = BigInt(before + after || "0");
  return shift < 0 ? exact(n, 10n ** BigInt(-shift)) : exact(n * 10n ** BigInt(shift));
}

/** Reads an expression: sums of products of powers, from the left. */
class Parser {
  constructor(text) {
    this.tokens = tokensOf(text);
    this.at = 0;
    this.depth = 0;
  }

  get next() {
    return this.tokens[this.at];
  }

  /** Whether the next token is one of these; it is then taken. */
  take(...texts) {
    if (this.next?.kind === "number" || !texts.includes(this.next?.text)) return null;
    this.at += 1;
    return this.tokens[this.at - 1].text;
  }

  expect(text) {
    if (!this.take(text)) fail(this.next ? `“${text}” is missing before “${this.next.text}”.` : `“${text}” is missing at the end.`);
  }

  all() {
    if (!this.tokens.length) fail("The expression is empty.");
    const value = this.sum();
    if (!this.next) return value;
    if (this.next.text === ",") fail("Write numbers without thousands separators, and with a decimal point: 1234.5.");
    return fail(this.next.text === ")" ? "There is a “)” too many." : `An operator is missing before “${this.next.text}”.`);
  }

  sum() {
    this.depth += 1;
    if (this.depth > MAX_DEPTH) fail("The expression has too many parentheses within each other.");
    let value = this.product();
    for (let sign = this.take("+", "-"); sign; sign = this.take("+", "-")) {
      let right = this.product();
      if (right.isPercent) right = multiply(value, right); // 80 + 15% is 92, as on pocket calculators
      value = sign === "+" ? add(value, right) : subtract(value, right);
    }
    this.depth -= 1;
    return value;
  }

  product() {
    let value = this.signed();
    for (;;) {
      const sign = this.take("*", "/", "//", "%", "mod", "of");
      if (!sign) return value;
      const right = this.signed();
      if (sign === "/") value = divide(value, right);
      else if (sign === "//") value = floor(divide(value, right));
      else if (sign === "%" || sign === "mod") value = modulo(value, right);
      else value = multiply(value, right);
    }
  }

  signed() {
    this.depth += 1;
    if (this.depth > MAX_DEPTH) fail("The expression has too many signs and powers within each other.");
    const sign = this.take("-", "+");
    let value = sign ? this.signed() : this.after();
    if (sign === "-") value = negative(value);
    else if (!sign && this.take("^")) value = power(value, this.signed());
    this.depth -= 1;
    return value;
  }

  /** Read an operand with what stands after it: 5!, 15%. */
  after() {
    let value = this.operand();
    for (;;) {
      if (this.take("!")) value = factorial(value);
      else if (this.next?.text === "%" && !this.beginsOperand(this.tokens[this.at + 1])) {
        this.at += 1;
        value = { ...divide(value, exact(100n)), isPercent: true };
      } else return value;
    }
  }

  /** Whether a token begins an operand: a % before it is a remainder. */
  beginsOperand(token) {
    if (!token || token.kind === "number") return Boolean(token);
    return token.kind === "name" ? !["of", "mod"].includes(token.text) : ["(", "√"].includes(token.text);
  }

  operand() {
    const token = this.next;
    if (!token) return fail("The expression ends where a number is missing.");
    if (this.take("(")) {
      const value = this.sum();
      this.expect(")");
      return { ...value, isPercent: false };
    }
    if (this.take("√")) return root(this.operand());
    if (token.kind === "sign") return fail(`A number is missing before “${token.text}”.`);
    this.at += 1;
    if (token.kind === "number") return parsed(token.text);
    if (Object.hasOwn(CONSTANTS, token.text) && this.next?.text !== "(") return inexact(CONSTANTS[token.text]);
    return this.call(token.text);
  }

  call(name) {
    if (!Object.hasOwn(FUNCTIONS, name)) fail(`“${name}” is not a function or constant of the calculator. It has: ${[...Object.keys(FUNCTIONS), "pi", "e"].join(", ")}.`);
    const [compute, least = 1, most = least] = FUNCTIONS[name];
    this.expect("(");
    const values = [];
    if (!this.take(")")) {
      do values.push(this.sum()); while (this.take(","));
      this.expect(")");
    }
    if (values.length < least || values.length > most) {
      const count = least === most ? least : most === Infinity ? `${least} or more` : `${least} or ${most}`;
      fail(`${name} was given ${values.length} arguments, but takes ${count}.`);
    }
    return compute(...values);
  }
}

// Writing results

const inDecimal = (x) => String(Number(x.toPrecision(15)));

/** Return a fraction with 15 digits, in powers of ten where no number of the processor can hold it. */
function approximated(value) {
  const { n, d } = value;
  const [digits, below] = [magnitude(n), d].map((part) => part.toString().length);
  const size = digits - below;
  if (Math.abs(size) < 300) return inDecimal(asNumber(value));
  const shift = 20 - size; // the quotient then has 20 or 21 digits
  const scaled = shift >= 0 ? (magnitude(n) * 10n ** BigInt(shift)) / d : magnitude(n) / (d * 10n ** BigInt(-shift));
  const text = scaled.toString();
  const rest = text.slice(1, 15).replace(/0+$/, "");
  return `${n < 0n ? "-" : ""}${text[0]}${rest && `.${rest}`}e${text.length - 1 - shift}`;
}

/** Return a fraction as a decimal number if it has finitely many decimals, and not too many; else null. */
function finiteDecimal({ n, d }) {
  let decimals = 0;
  for (let rest = d; rest > 1n; decimals += 1) {
    const divisor = gcd(rest, 10n);
    if (divisor === 1n || decimals === MAX_DIGITS) return null;
    rest /= divisor;
  }
  const digits = ((magnitude(n) * 10n ** BigInt(decimals)) / d).toString().padStart(decimals + 1, "0");
  if (digits.length > MAX_DIGITS) return null;
  return `${n < 0n ? "-" : ""}${digits.slice(0, digits.length - decimals)}.${digits.slice(-decimals)}`;
}

function written(value) {
  if (!isExact(value)) return `≈ ${inDecimal(value.x)}`;
  const { n, d } = value;
  const fraction = `${n}/${d}`;
  if (d === 1n) return fraction.length - 2 <= MAX_DIGITS ? String(n) : `≈ ${approximated(value)} (${magnitude(n).toString().length} digits)`;
  const decimal = finiteDecimal(value);
  if (decimal) return decimal;
  return fraction.length <= 60 ? `${fraction} ≈ ${approximated(value)}` : `≈ ${approximated(value)}`;
}

/** Return the value of an expression as text; throw an Error whose message says what is wrong with it. */
export function calculate(expression) {
  if (typeof expression !== "string") fail("The expression must be a text.");
  if (expression.length > MAX_LENGTH) fail(`The expression is longer than ${MAX_LENGTH} characters.`);
  return written(new Parser(expression).all());
}
