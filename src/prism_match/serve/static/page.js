// What the page does: photos in, one question to the server, and everything else here.

import { Refusal, getExample, getInfo, inWords, match, setToken } from "./api.js";
import { Photos, decoded, mib } from "./photos.js";
import { chosen, download, toCsv, toJson, toNpz } from "./save.js";
import { Scene, layerColour } from "./scene.js";

const $ = (id) => document.getElementById(id);
const DRAWN = 150; // matches at first: a picture of thousands of lines shows nothing
const FLAT = { inliers: 20, share: 0.5 }; // that a homography needs for the scene to count as flat
const NARROW = "(max-width: 760px)"; // as in page.css
const SIZES = [320, 480, 640, 832, 1024, 1152, 1408, 1600];

let info = null; // of the server
let result = null;
let running = null; // the AbortController of the match that is on its way

const photos = new Photos(photosChanged, complain);
const scene = new Scene($("canvas"), pointedAt);

// The server

/** Whether the server lets us in. */
async function connect() {
  try {
    info = await getInfo();
  } catch (error) {
    if (error instanceof Refusal && error.status === 401) askForToken();
    else complain(inWords(error, []));
    return false;
  }
  $("token-form").hidden = true;
  complain(null);
  photos.limits = info.limits;
  photos.formats = info.formats;
  const accept = info.formats.map((format) => ({ PPM: ".ppm" })[format] ?? `image/${format.toLowerCase()}`);
  for (const slot of photos.slots) slot.querySelector("input").accept = accept.join();
  $("server").textContent = `${info.device}, ${info.precisions[0]}, version ${info.version}` +
    (info.weights.trained ? "" : " — untrained weights: the matches mean nothing");
  const sizes = [...new Set([...SIZES, info.defaults.size])].filter((size) => size <= info.limits.size);
  fill($("size"), sizes.sort((a, b) => a - b).map((size) => [size, `${size} px`]), info.defaults.size);
  fill($("precision"), info.precisions.map((name) => [name, name]), info.precisions[0]);
  $("rotate").value = info.defaults.rotate;
  $("examples").replaceChildren(...info.examples.map(({ name, images }) => {
    const button = element("button", `Example: ${name}`);
    button.type = "button";
    button.addEventListener("click", () => takeExample(images));
    return button;
  }));
  refresh();
  return true;
}

function askForToken() {
  $("token-form").hidden = false;
  $("token").value = "";
  $("token").focus();
}

$("token-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  setToken($("token").value.trim());
  if (!(await connect()) && !$("token-form").hidden) complain("That is not the server's token.");
});

function fill(select, entries, value) {
  select.replaceChildren(...entries.map(([key, words]) => new Option(words, key)));
  select.value = value;
}

async function takeExample(images) {
  complain(null);
  try {
    const blobs = await Promise.all(images.map(getExample));
    await photos.add(blobs.map((blob, n) => new File([blob], images[n].split("/").pop(), { type: blob.type })), 0);
  } catch (error) {
    complain(inWords(error, []));
    return;
  }
  await start();
}

// Matching

function photosChanged() {
  running?.abort();
  result = null;
  complain(null);
  scene.setPhotos(photos.list);
  refresh();
  if (!running) say(photos.complete ? "Ready to match." : "Give two photos, or take an example.");
}

async function start() {
  if (!info || !photos.complete) return;
  const total = photos.list.reduce((sum, photo) => sum + photo.blob.size, 0);
  complain(null);
  if (total > info.limits.bytes) {
    complain(`The photos have ${mib(total)} MiB together; this server takes at most ${mib(info.limits.bytes)} MiB. ` +
      "Nothing is shrunk unasked: make them smaller, or let the server take more.");
    return;
  }
  running?.abort();
  const mine = (running = new AbortController());
  const asked = { size: Number($("size").value), precision: $("precision").value, rotate: $("rotate").value };
  const pair = [...photos.list];
  const began = performance.now();
  refresh();
  say("Matching …");
  tick(began, mine);
  try {
    const found = await match(pair.map((photo) => photo.blob), {
      ...asked, details: true, geometry: "both",
      previews: pair.some((photo) => !photo.bitmap), // of what the browser cannot show
    }, mine.signal);
    const seconds = (performance.now() - began) / 1000;
    mine.signal.throwIfAborted();
    const odd = [0, 1].filter((n) => pair[n].bitmap && [pair[n].width, pair[n].height].join() !== found[`size${n}`].join());
    if (odd.length) { // the browser turns it in another way than the server: it is shown as the server reads it
      for (const n of odd) pair[n].bitmap = null;
      return start();
    }
    await lookAt(found, pair);
    mine.signal.throwIfAborted(); // other photos may be there by now
    arrived(found, asked, pair, seconds);
  } catch (error) {
    if (running !== mine) return; // another one has taken its place
    if (error.name === "AbortError") say("Cancelled.");
    else {
      say(result ? "The last result is still shown." : "No result.");
      complain(inWords(error, pair.map((photo) => photo.name)));
      if (error.status === 401) askForToken();
    }
  } finally {
    if (running === mine) running = null;
    refresh();
  }
}

function tick(began, mine) {
  $("clock").hidden = running !== mine;
  if (running !== mine) return;
  $("clock").textContent = `${((performance.now() - began) / 1000).toFixed(1)} s`;
  setTimeout(tick, 100, began, mine);
}

/** What the browser cannot show is seen as the server has read it. */
async function lookAt(found, pair) {
  for (const n of [0, 1]) {
    if (pair[n].bitmap || !found.previews) continue;
    const preview = Uint8Array.from(atob(found.previews[n]), (c) => c.charCodeAt(0));
    const { bitmap } = await decoded(new Blob([preview], { type: "image/png" }));
    const [width, height] = found[`size${n}`];
    Object.assign(pair[n], { bitmap, width, height });
    photos.show(n);
  }
}

function arrived(found, asked, pair, seconds) {
  const homography = found.geometry.find((fit) => fit.model === "homography");
  const inliers = count(homography.inliers);
  const isFlat = homography.matrix && pair[0].bitmap && inliers >= FLAT.inliers && inliers >= FLAT.share * found.scores.length;
  result = { ...found, ...asked, names: pair.map((photo) => photo.name), flat: isFlat ? homography : null };
  result.share = found.scores.length ? inliers / found.scores.length : 0;
  showTimes(found.time, seconds);
  setControls();
  scene.setResult(result);
  apply();
  const number = found.scores.length;
  const likely = found.same_place == null ? "" : ` The same place: ${percent(found.same_place)} likely.`;
  say(number
    ? `${number.toLocaleString("en")} ${number === 1 ? "match" : "matches"} in ${seconds.toFixed(seconds < 10 ? 2 : 1)} s.${likely}`
    : "No matches: perhaps the photos show nothing in common. A larger size may help, or rotation “all four”.");
  if (matchMedia(NARROW).matches) {
    $("time").open = false;
    $("stage").scrollIntoView({ block: "nearest" });
  }
}

// What is shown of it

function setControls() {
  const number = result.scores.length;
  const least = Math.floor(100 * Math.min(info.defaults.threshold, ...result.scores.slice(-1))) / 100;
  Object.assign($("least"), { min: least, value: least });
  Object.assign($("most"), { max: number, value: Math.min(DRAWN, number) });
  const layers = result.details.keep0.length;
  Object.assign($("layer"), { max: layers, value: layers });
  document.querySelector('[name="inliers"][value="all"]').checked = true;
  for (const fit of result.geometry) {
    $(`count-${fit.model}`).textContent = fit.matrix ? count(fit.inliers) : "none fits";
    document.querySelector(`[name="inliers"][value="${fit.model}"]`).disabled = !fit.matrix;
  }
  $("overlay").checked = false;
  $("flat-words").textContent = result.flat
    ? `One homography explains ${percent(result.share)} of the matches: the scene is flat, or the camera only turned.`
    : `Not for this pair: one homography explains ${percent(result.share)} of the matches.`;
  $("mpm-legend").replaceChildren(...result.details.keep0.map((_, n) => {
    const entry = element("span", `${n + 1}`);
    const swatch = element("i");
    swatch.style.background = `rgb(${layerColour(n, layers)})`;
    entry.prepend(swatch);
    return entry;
  }));
  $("mpm-legend").prepend("Pruned by MPM");
}

/** The options as they are set now; the server is not asked. */
function apply() {
  const layer = Number($("layer").value);
  scene.update({
    least: Number($("least").value), most: Number($("most").value),
    inliers: document.querySelector('[name="inliers"]:checked').value,
    lines: $("lines").checked, points: $("points").checked, safe: $("palette").checked,
    masks: $("masks").checked, layer, overlay: $("overlay").checked, blend: Number($("blend").value) / 100,
  });
  $("legend").classList.toggle("safe", $("palette").checked);
  if (!result) return;
  $("least-value").textContent = Number($("least").value).toFixed(2);
  $("most-value").textContent = `${scene.shown.length} of ${result.scores.length}`;
  $("layer-value").textContent = `${layer} of ${result.details.keep0.length}`;
  const kept = [0, 1].map((n) => result.details[`keep${n}`][layer - 1].flat());
  $("kept").textContent = `Kept: ${kept.map((cells) => percent(count(cells) / cells.length)).join(" of the first, ")} of the second.`;
  $("count-all").textContent = result.scores.length;
  $("count-shown").textContent = scene.shown.length;
  $("canvas").setAttribute("aria-label",
    `${result.names.join(" and ")}: ${scene.shown.length} of ${result.scores.length} matches are drawn`);
}

function showTimes(time, seconds) {
  const { stages, total, match: all, ...others } = time;
  const named = Object.values(stages).reduce((sum, x) => sum + x, 0);
  const { geometry, ...before } = others;
  const rows = { ...before, ...stages, "other": Math.max(0, all - named), geometry, "answer": Math.max(0, seconds - total) };
  const most = Math.max(...Object.values(rows).filter(Boolean));
  const cells = Object.entries(rows).filter(([, value]) => value !== undefined).flatMap(([name, value]) => {
    const bar = element("i");
    bar.style.width = `${100 * value / most}%`;
    return [element("dt", name), bar, element("dd", span(value))];
  });
  const sum = [element("dt", "in all"), element("span"), element("dd", span(seconds))];
  for (const cell of sum) cell.classList.add("sum");
  $("times").replaceChildren(...cells, ...sum);
}

function pointedAt(match) {
  $("tip").hidden = !match;
  if (!match) return;
  const at = ([x, y]) => `(${x.toFixed(1)}, ${y.toFixed(1)})`;
  const words = `${at(match.from)} ↔ ${at(match.to)}\nconfidence ${match.score.toFixed(3)}`;
  $("tip").textContent = words;
  const [x, y] = match.ends[0];
  const { offsetWidth: width, offsetHeight: height } = $("tip");
  const room = $("view");
  const left = Math.max(4, Math.min(room.clientWidth - width - 4, x + 14));
  const top = y + 14 + height > room.clientHeight ? Math.max(4, y - 14 - height) : Math.max(4, y + 14);
  $("tip").style.transform = `translate(${left}px, ${top}px)`;
  if (match.aloud) $("spoken").textContent = words;
}

function refresh() {
  const busy = Boolean(running);
  const asked = { size: Number($("size").value), precision: $("precision").value, rotate: $("rotate").value };
  const same = result && Object.keys(asked).every((name) => asked[name] === result[name]);
  $("match").disabled = !info || !photos.complete;
  $("match").textContent = busy ? "Start again" : same ? "Match again" : "Match";
  $("cancel").hidden = !busy;
  $("swap").disabled = !photos.list.some(Boolean);
  $("empty").hidden = photos.list.some(Boolean);
  for (const id of ["show", "pruning", "save"]) $(id).disabled = !result;
  $("flat").disabled = !result?.flat;
  $("legend").hidden = !result?.scores.length;
  $("time").hidden = !result;
  if (result) return;
  for (const id of ["least-value", "most-value", "layer-value", "kept", "flat-words", "mpm-legend", "count-all",
    "count-shown", "count-homography", "count-fundamental"]) $(id).textContent = "";
  $("canvas").setAttribute("aria-label", photos.complete ? "Two photos, not matched yet" : "No pair of photos yet");
}

async function save(kind) {
  complain(null);
  if (kind === "png") {
    const ground = getComputedStyle(document.documentElement).getPropertyValue("--card").trim();
    download(await scene.picture(ground), "matches.png");
    return;
  }
  const all = document.querySelector('[name="extent"]:checked').value === "all";
  const index = all ? result.scores.map((_, n) => n) : [...scene.shown].sort((a, b) => a - b); // best first
  const part = chosen(result, index);
  download({ npz: toNpz, json: toJson, csv: toCsv }[kind](part), `matches.${kind}`);
}

// Words

function say(words) {
  $("status").textContent = words;
}

function complain(words) {
  $("error").hidden = !words;
  $("error").textContent = words ?? "";
}

function element(name, text = "") {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
}

function count(flags) {
  return flags.reduce((sum, flag) => sum + (flag ? 1 : 0), 0);
}

function percent(share) {
  return `${Math.round(100 * share)} %`;
}

function span(seconds) {
  return seconds < 0.9995 ? `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms` : `${seconds.toFixed(2)} s`;
}

// The theme

const root = document.documentElement;

function setTheme(theme) {
  if (theme === "auto") delete root.dataset.theme;
  else root.dataset.theme = theme;
  $("theme").value = theme;
}

let remembered = null;
try {
  remembered = localStorage.getItem("prism-theme");
} catch {
  // Storage may be forbidden; the theme is then the system's.
}
setTheme(["light", "dark"].includes(remembered) ? remembered : "auto");
$("theme").addEventListener("change", () => {
  setTheme($("theme").value);
  try {
    localStorage.setItem("prism-theme", $("theme").value);
  } catch {
    // As above.
  }
});

// Everything that can be pressed or moved

$("match").addEventListener("click", start);
$("cancel").addEventListener("click", () => {
  running?.abort();
  $("match").focus(); // Cancel is gone in a moment
});
$("swap").addEventListener("click", () => photos.swap());
for (const id of ["size", "precision", "rotate"]) $(id).addEventListener("change", refresh);
for (const id of ["least", "most", "layer", "blend"]) $(id).addEventListener("input", apply);
for (const id of ["lines", "points", "palette", "masks", "overlay"]) $(id).addEventListener("change", apply);
for (const input of document.querySelectorAll('[name="inliers"]')) input.addEventListener("change", apply);
$("layer").addEventListener("input", () => {
  if (!$("masks").checked) $("masks").click(); // whoever moves it wants to see it
});
function blink() {
  $("blend").value = Number($("blend").value) >= 50 ? 0 : 100;
  if (!$("overlay").checked) $("overlay").checked = true;
  apply();
}
$("blink").addEventListener("click", blink);
$("canvas").addEventListener("keydown", (event) => {
  if (event.key.toLowerCase() === "b" && result?.flat && !event.ctrlKey && !event.metaKey && !event.altKey) blink();
});
for (const button of document.querySelectorAll("[data-save]"))
  button.addEventListener("click", () => save(button.dataset.save));
$("zoom-in").addEventListener("click", () => scene.zoom(1.5));
$("zoom-out").addEventListener("click", () => scene.zoom(1 / 1.5));
$("zoom-fit").addEventListener("click", () => scene.fit());

refresh();
connect();
