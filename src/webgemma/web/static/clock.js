// The clock: what day and time it is, here or elsewhere, and what lies between dates. Its errors are sentences for
// the model, in English, as are its results.

const DAY = 86_400_000; // milliseconds
const DATE = /^(\d{4})-(\d\d)-(\d\d)(?:[T ](\d\d):(\d\d)(?::(\d\d))?)?$/;
const WEEKDAYS = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MAX_ADDED = 4_000_000; // days, months: more than 10 000 years of the former

const fail = (message) => {
  throw new Error(message);
};
const padded = (number, length = 2) => String(number).padStart(length, "0");
const counted = (count, one) => `${count} ${one}${count === 1 ? "" : "s"}`;

// A wall clock's time is kept as the instant at which UTC shows it: "wall" below, in milliseconds.

const wallOf = (year, month, day, hours = 0, minutes = 0, seconds = 0) => {
  const date = new Date(0);
  date.setUTCFullYear(year, month - 1, day); // Date.UTC would read the year 50 as 1950
  date.setUTCHours(hours, minutes, seconds);
  return date.getTime();
};

function parsed(text, name) {
  const found = DATE.exec(String(text).trim());
  if (!found) return fail(`${name} must be written as 2026-12-24 or 2026-12-24T18:30, not “${String(text).slice(0, 40)}”.`);
  const [year, month, day, hours = 0, minutes = 0, seconds = 0] = found.slice(1).map((part) => part && Number(part));
  const wall = wallOf(year, month, day, hours, minutes, seconds);
  if (hours > 23 || minutes > 59 || seconds > 59) fail(`${name} has a time that no clock shows: hours are 0 to 23, minutes and seconds 0 to 59.`);
  const date = new Date(wall);
  if (!year || date.getUTCMonth() + 1 !== month || date.getUTCDate() !== day) fail(`${name} is a day that does not exist: ${found[0]}.`);
  return { wall, hasTime: found[4] !== undefined };
}

/** Return what reads the wall clock of a time zone at an instant. */
function clockOf(zone) {
  const options = {
    timeZone: zone, calendar: "iso8601", numberingSystem: "latn", hourCycle: "h23",
    year: "numeric", month: "numeric", day: "numeric", hour: "numeric", minute: "numeric", second: "numeric",
  };
  let format;
  try {
    format = new Intl.DateTimeFormat("en-US", options);
  } catch {
    return fail(`“${String(zone).slice(0, 60)}” is not a time zone: use a name such as Europe/Berlin, America/New_York or UTC.`);
  }
  return (instant) => {
    const parts = Object.fromEntries(format.formatToParts(instant).map(({ type, value }) => [type, value]));
    return wallOf(...["year", "month", "day", "hour", "minute", "second"].map((name) => Number(parts[name])));
  };
}

/** Return the instant at which a zone's clock shows a time; of a time that it skips in spring, one after the gap. */
function instantOf(wall, read) {
  const before = wall + wall - read(wall);
  const instant = before + wall - read(before);
  return read(instant) === wall ? instant : Math.max(before, instant);
}

const dateText = (wall) => {
  const date = new Date(wall);
  return `${padded(date.getUTCFullYear(), 4)}-${padded(date.getUTCMonth() + 1)}-${padded(date.getUTCDate())}`;
};
const timeText = (wall) => new Date(wall).toISOString().slice(-13, -5);
const weekday = (wall) => WEEKDAYS[new Date(wall).getUTCDay()];

function offsetText(wall, instant) {
  const minutes = Math.round((wall - Math.floor(instant / 1000) * 1000) / 60_000);
  const [hours, rest] = [Math.floor(Math.abs(minutes) / 60), Math.abs(minutes) % 60];
  return `UTC${minutes < 0 ? "-" : "+"}${padded(hours)}:${padded(rest)}`;
}

/** Return the number of the week by ISO 8601: the first one has the year's first Thursday. */
function weekOf(wall) {
  const day = Math.floor(wall / DAY);
  const thursday = day - ((day + 3) % 7 + 7) % 7 + 3; // 1970-01-01 was a Thursday
  const year = new Date(thursday * DAY).getUTCFullYear();
  return 1 + Math.floor((thursday - wallOf(year, 1, 1) / DAY) / 7);
}

function dayOfYear(wall) {
  return 1 + Math.floor((wall - wallOf(new Date(wall).getUTCFullYear(), 1, 1)) / DAY);
}

function addMonths(wall, months) {
  const date = new Date(wall);
  const index = date.getUTCFullYear() * 12 + date.getUTCMonth() + months;
  const [year, month] = [Math.floor(index / 12), ((index % 12) + 12) % 12];
  const last = new Date(wallOf(year, month + 2, 0)).getUTCDate(); // 31 January and a month is the end of February
  const day = Math.min(date.getUTCDate(), last);
  return wallOf(year, month + 1, day) + (((wall % DAY) + DAY) % DAY);
}

function count(value, name) {
  if (!Number.isInteger(value) || Math.abs(value) > MAX_ADDED) fail(`${name} must be a whole number from -${MAX_ADDED} to ${MAX_ADDED}.`);
  return value;
}

const checked = (wall) => {
  const year = new Date(wall).getUTCFullYear();
  return year >= 1 && year <= 9999 ? wall : fail("The date lies outside the years 1 to 9999.");
};

/** Return what lies between two times: days, and years, months and days. */
function between(from, to, hasTime) {
  const [first, last] = from <= to ? [from, to] : [to, from];
  const days = Math.floor((last - first) / DAY);
  const guess = Math.floor(days / 31) - 1;
  let months = Math.max(0, guess);
  while (addMonths(first, months + 1) <= last) months += 1;
  const rest = Math.floor((last - addMonths(first, months)) / DAY);
  const parts = [[Math.floor(months / 12), "year"], [months % 12, "month"], [rest, "day"]].filter(([number]) => number);
  const facts = [counted(days, "day")];
  if (hasTime) {
    const seconds = Math.floor((last - first) / 1000) % 86_400;
    const clock = [[Math.floor(seconds / 3600), "hour"], [Math.floor(seconds / 60) % 60, "minute"], [seconds % 60, "second"]];
    const texts = clock.filter(([number]) => number).map((part) => counted(...part));
    facts[0] = [...(days || !texts.length ? facts : []), ...texts].join(" ");
  }
  if (months) facts.push(parts.map((part) => counted(...part)).join(" "));
  if (days >= 7) facts.push(`${counted(Math.floor(days / 7), "week")}${days % 7 ? ` ${counted(days % 7, "day")}` : ""}`);
  return `${facts.join(" = ")}${from > to ? " earlier" : ""}`;
}

/**
 * Return a text about a date: by default about now. `date` and `until` are as in ISO 8601, without a zone;
 * `add_months` and `add_days` are added to it. Throw an Error whose message says what is wrong with them.
 */
export function tellTime({ time_zone: zone, date, until, add_days: days = 0, add_months: months = 0 } = {}, now = Date.now()) {
  const here = Intl.DateTimeFormat().resolvedOptions().timeZone;
  const name = zone || here || "UTC";
  const read = clockOf(name);
  const start = date === undefined || date === "" ? { wall: read(now), hasTime: true, isNow: true } : parsed(date, "date");
  const added = addMonths(start.wall, count(months, "add_months")) + count(days, "add_days") * DAY;
  const instant = instantOf(checked(added), read);
  const wall = start.hasTime ? read(instant) : added;
  const lines = [];
  const shown = start.hasTime ? `${dateText(wall)}, ${timeText(wall)}, ${name} (${offsetText(read(instant), instant)})` : dateText(wall);
  lines.push(`${weekday(wall)}, ${shown}, week ${weekOf(wall)}, day ${dayOfYear(wall)} of the year`);
  if (until !== undefined && until !== "") {
    const end = parsed(until, "until");
    const hasTime = end.hasTime && start.hasTime;
    const [from, to] = hasTime ? [instant, instantOf(end.wall, read)] : [wall, end.wall].map((each) => Math.floor(each / DAY) * DAY);
    lines.push(`Until ${weekday(end.wall)}, ${dateText(end.wall)}${hasTime ? `, ${timeText(end.wall)}` : ""}: ${between(from, to, hasTime)}`);
  } else if (!start.isNow) {
    const today = Math.floor(read(now) / DAY) * DAY;
    lines.push(`Today is ${weekday(today)}, ${dateText(today)}; until that date: ${between(today, Math.floor(wall / DAY) * DAY, false)}`);
  }
  return lines.join("\n");
}
