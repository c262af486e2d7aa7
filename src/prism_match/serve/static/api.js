// The HTTP API of the server that this page comes from, and what it refuses, in words.

const TOKEN = "prism-token"; // in sessionStorage: gone with the tab

export class Refusal extends Error {
  constructor(status, words, later = null) {
    super(words);
    this.status = status;
    this.later = later; // seconds after which it is worth another try
  }
}

export function setToken(token) {
  sessionStorage.setItem(TOKEN, token);
}

export async function getInfo() {
  return readJson(await ask("v1/info", {}));
}

export async function getExample(url) {
  return (await ask(url.replace(/^\//, ""), {})).blob();
}

/** photos: two blobs; options: fields of /v1/match; signal: of an AbortController, to take it back. */
export async function match(photos, options, signal) {
  const form = new FormData();
  photos.forEach((photo, n) => form.append(`image${n}`, photo, "photo")); // names are nobody's business
  for (const [name, value] of Object.entries(options)) form.append(name, String(value));
  return readJson(await ask("v1/match", { method: "POST", body: form, signal }));
}

async function ask(path, options) {
  const token = sessionStorage.getItem(TOKEN);
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    throw error.name === "AbortError" ? error : gone();
  }
  if (response.ok) return response;
  let words = `The server answered with ${response.status}.`;
  try {
    words = (await response.json()).error || words;
  } catch {
    // Not the server's own answer, but one of something between it and us: the number has to do.
  }
  throw new Refusal(response.status, words, Number(response.headers.get("retry-after")) || null);
}

async function readJson(response) {
  try {
    return await response.json();
  } catch (error) {
    throw error.name === "AbortError" ? error : gone();
  }
}

function gone() {
  return new Refusal(0, "the server does not answer: is it still running?");
}

/** An error as a sentence for people. names: of both photos. */
export function inWords(error, names) {
  if (!(error instanceof Refusal)) return `Something in this page went wrong: ${error.message}`;
  const ordinals = ["First photo", "Second photo"];
  let words = error.message.replace(/\b(image|mask)([01])\b/g, (_, kind, n) =>
    names[n] ? `${ordinals[n]} (${names[n]})` : ordinals[n]);
  words = words[0].toUpperCase() + words.slice(1);
  if (!/[.?!]$/.test(words)) words += ".";
  if (error.status === 413) words += " Nothing is shrunk unasked: make it smaller, or let the server take more.";
  if (error.status === 503 && error.later) words += ` In about ${error.later} s it may be free.`;
  return words;
}
