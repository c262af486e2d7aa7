// One canvas: two photos, the matches between them, masks of what was pruned, or one photo laid on the other.

const UNIT = 1000; // the longer side of a photo, in units of the scene
const GAP = 16;
const CELL = 8; // pixels a side of what is pruned, of the photo as the model sees it
const NEAR = { mouse: 12, touch: 26 }; // pixels between a pointer and the point that it means
const SHADES = 40;
const MOST_ZOOM = 80; // times the zoom that shows all
// The paper's colours for what the first to the last MPM prunes.
const LAYERS = [[122, 2, 12], [255, 13, 28], [255, 118, 37], [255, 254, 60]];

export class Scene {
  /** point: is called with what to say of the match that is pointed at, or with null. */
  constructor(canvas, point) {
    this.canvas = canvas;
    this.point = point;
    this.photos = [null, null];
    this.result = null;
    this.options = {
      least: 0, most: 0, inliers: "all", lines: true, points: true, safe: false, masks: false, layer: 1,
      overlay: false, blend: 0.5,
    };
    this.shown = []; // indices of matches, in the order in which they cover the photo
    this.picked = null; // index of the one that is pointed at
    this.view = null; // null: all is shown; otherwise the scene's scale and where its origin is
    this.pointers = new Map();
    this.#listen();
  }

  setPhotos(photos) {
    this.photos = photos;
    this.setResult(null);
  }

  setResult(result) {
    this.result = result;
    this.picked = null;
    this.view = null;
    this.cache = {}; // what is made of the result once
    if (result) this.order = covering(result);
    this.update();
  }

  /** options: those that change. Nothing is asked of the server. */
  update(options = {}) {
    const layoutChanges = "overlay" in options && options.overlay !== this.options.overlay;
    Object.assign(this.options, options);
    if (layoutChanges) this.view = null;
    this.shown = this.result ? this.#chosen() : [];
    if (this.picked !== null && !this.shown.includes(this.picked)) this.pick(null);
    this.draw();
  }

  #chosen() {
    const { scores } = this.result;
    const fit = this.result.geometry.find((x) => x.model === this.options.inliers);
    const fits = this.order.filter((n) => scores[n] >= this.options.least && (!fit || fit.inliers[n]));
    return fits.slice(0, this.options.most);
  }

  draw() {
    this.waiting ??= requestAnimationFrame(() => {
      this.waiting = null;
      const { clientWidth: width, clientHeight: height } = this.canvas;
      const density = window.devicePixelRatio || 1;
      const [w, h] = [Math.round(width * density), Math.round(height * density)];
      if (this.canvas.width !== w || this.canvas.height !== h) Object.assign(this.canvas, { width: w, height: h });
      const context = this.canvas.getContext("2d");
      context.setTransform(1, 0, 0, 1, 0, 0);
      context.clearRect(0, 0, w, h);
      context.scale(density, density);
      this.#paint(context, this.#layout(width, height), this.view ?? this.#fitting(width, height), this.picked);
      this.canvas.classList.toggle("zoomed", this.view !== null);
    });
  }

  /** All of it as a PNG, as it is drawn now but for the zoom. */
  async picture(ground) {
    const [width, height] = [this.canvas.clientWidth, this.canvas.clientHeight];
    const layout = this.#layout(width, height);
    const canvas = document.createElement("canvas");
    const scale = 1800 / Math.max(layout.width, layout.height);
    canvas.width = Math.max(1, Math.round(layout.width * scale));
    canvas.height = Math.max(1, Math.round(layout.height * scale));
    const context = canvas.getContext("2d");
    context.fillStyle = ground;
    context.fillRect(0, 0, canvas.width, canvas.height);
    this.#paint(context, layout, { scale, x: 0, y: 0 }, null);
    return new Promise((done) => canvas.toBlob(done, "image/png"));
  }

  /** Where the photos lie: side by side, or one above the other where that makes them much larger. */
  #layout(width, height) {
    const sizes = this.photos.map((photo, n) => this.result?.[`size${n}`] ?? (photo?.width ? [photo.width, photo.height] : null));
    const boxes = sizes.map((size) => {
      if (!size) return null;
      const scale = UNIT / Math.max(...size);
      return { x: 0, y: 0, width: size[0] * scale, height: size[1] * scale, scale };
    });
    const [a, b] = boxes;
    if (this.#isOverlay()) return { boxes: [null, b], width: b.width, height: b.height };
    if (!a || !b) return { boxes, width: (a ?? b)?.width ?? 1, height: (a ?? b)?.height ?? 1 };
    const beside = [a.width + GAP + b.width, Math.max(a.height, b.height)];
    const below = [Math.max(a.width, b.width), a.height + GAP + b.height];
    const room = ([w, h]) => Math.min(width / w, height / h);
    if (room(beside) >= 0.75 * room(below)) { // lines are read from left to right
      b.x = a.width + GAP;
      for (const box of boxes) box.y = (beside[1] - box.height) / 2;
      return { boxes, width: beside[0], height: beside[1] };
    }
    b.y = a.height + GAP;
    for (const box of boxes) box.x = (below[0] - box.width) / 2;
    return { boxes, width: below[0], height: below[1] };
  }

  #fitting(width, height) {
    const layout = this.#layout(width, height);
    const margin = Math.min(width, height) < 500 ? 6 : 16;
    const scale = Math.max(1e-6, Math.min((width - 2 * margin) / layout.width, (height - 2 * margin) / layout.height));
    return { scale, x: (width - layout.width * scale) / 2, y: (height - layout.height * scale) / 2 };
  }

  #isOverlay() {
    return Boolean(this.options.overlay && this.result?.flat);
  }

  #paint(context, { boxes }, view, picked) {
    const overlay = this.#isOverlay();
    context.save();
    context.translate(view.x, view.y);
    context.scale(view.scale, view.scale);
    boxes.forEach((box, n) => {
      if (!box) return;
      const bitmap = this.photos[n]?.bitmap;
      context.imageSmoothingEnabled = !bitmap || view.scale * box.width / bitmap.width < 6; // pixels, from near
      if (bitmap) context.drawImage(bitmap, box.x, box.y, box.width, box.height);
      else {
        context.fillStyle = "#8884";
        context.fillRect(box.x, box.y, box.width, box.height);
      }
      if (overlay) {
        context.globalAlpha = this.options.blend;
        context.drawImage(this.#warped(), box.x, box.y, box.width, box.height);
        context.globalAlpha = 1;
      } else if (this.options.masks && this.result) this.#paintMask(context, box, n);
    });
    context.restore();
    if (this.result) this.#paintMatches(context, boxes, view, picked);
  }

  #paintMask(context, box, n) {
    const { canvas, width, height } = this.#mask(n, this.options.layer);
    context.save();
    context.beginPath();
    context.rect(box.x, box.y, box.width, box.height);
    context.clip();
    context.imageSmoothingEnabled = false;
    context.drawImage(canvas, box.x, box.y, width * box.scale, height * box.scale);
    context.restore();
  }

  /** What the first MPMs have pruned, a pixel a cell, and how much of the photo its grid covers, in pixels. */
  #mask(n, layer) {
    const key = `mask ${n} ${layer}`;
    if (this.cache[key]) return this.cache[key];
    const keep = this.result.details[`keep${n}`];
    const [rows, columns] = [keep[0].length, keep[0][0].length];
    const image = new ImageData(columns, rows);
    for (let y = 0; y < rows; y++)
      for (let x = 0; x < columns; x++) {
        const by = keep.slice(0, layer).findIndex((mask) => !mask[y][x]);
        if (by >= 0) image.data.set([...layerColour(by, keep.length), 165], 4 * (y * columns + x));
      }
    const canvas = document.createElement("canvas");
    Object.assign(canvas, { width: columns, height: rows });
    canvas.getContext("2d").putImageData(image, 0, 0);
    const [width, height] = this.result[`size${n}`];
    const shrunk = Math.min(1, this.result.size / Math.max(width, height));
    const seen = [width, height].map((length) => Math.max(CELL, Math.round(length * shrunk)));
    const mask = { canvas, width: columns * CELL * width / seen[0], height: rows * CELL * height / seen[1] };
    return (this.cache[key] = mask);
  }

  #warped() {
    return (this.cache.warped ??= warp(this.photos[0].bitmap, this.result));
  }

  /** A match on the screen: both points, of which in an overlay the first is where the homography takes it. */
  #ends(n, boxes, view) {
    const { keypoints0, keypoints1, flat } = this.result;
    const place = (box, [x, y]) => [
      view.x + view.scale * (box.x + (x + 0.5) * box.scale),
      view.y + view.scale * (box.y + (y + 0.5) * box.scale),
    ];
    const first = boxes[0] ? place(boxes[0], keypoints0[n]) : place(boxes[1], apply(flat.matrix, keypoints0[n]));
    return [first, place(boxes[1], keypoints1[n])];
  }

  #paintMatches(context, boxes, view, picked) {
    const { lines, points, safe } = this.options;
    const shades = Array.from({ length: SHADES + 1 }, () => []);
    for (const n of this.shown) shades[Math.round(this.result.scores[n] * SHADES)].push(this.#ends(n, boxes, view));
    context.lineWidth = this.shown.length > 600 ? 0.8 : 1.15;
    shades.forEach((ends, shade) => { // the sure ones last, above the others
      if (!ends.length) return;
      context.strokeStyle = context.fillStyle = colour(shade / SHADES, safe);
      if (lines) {
        context.globalAlpha = picked === null ? 0.8 : 0.2;
        context.beginPath();
        for (const [[x0, y0], [x1, y1]] of ends) {
          context.moveTo(x0, y0);
          context.lineTo(x1, y1);
        }
        context.stroke();
      }
      if (points) {
        context.globalAlpha = picked === null ? 1 : 0.3;
        context.beginPath();
        for (const pair of ends)
          for (const [x, y] of pair) {
            context.moveTo(x + 2.6, y);
            context.arc(x, y, 2.6, 0, 7);
          }
        context.fill();
      }
    });
    context.globalAlpha = 1;
    if (picked === null) return;
    const [first, second] = this.#ends(picked, boxes, view);
    for (const [width, style] of [[5, "#000a"], [2.4, colour(this.result.scores[picked], safe)]]) {
      context.strokeStyle = style;
      context.lineWidth = width;
      context.beginPath();
      context.moveTo(...first);
      context.lineTo(...second);
      for (const [x, y] of [first, second]) {
        context.moveTo(x + 7, y);
        context.arc(x, y, 7, 0, 7);
      }
      context.stroke();
    }
  }

  /** Point at a match, by its index; null: at none. */
  pick(n, aloud = false) {
    if (n === this.picked) return;
    this.picked = n;
    this.draw();
    if (n === null) return this.point(null);
    const [width, height] = [this.canvas.clientWidth, this.canvas.clientHeight];
    const { boxes } = this.#layout(width, height);
    const ends = this.#ends(n, boxes, this.view ?? this.#fitting(width, height));
    const { keypoints0, keypoints1, scores } = this.result;
    this.point({ score: scores[n], from: keypoints0[n], to: keypoints1[n], ends, aloud });
  }

  #nearest(x, y, within) {
    const [width, height] = [this.canvas.clientWidth, this.canvas.clientHeight];
    const { boxes } = this.#layout(width, height);
    const view = this.view ?? this.#fitting(width, height);
    let [best, distance] = [null, within];
    for (const n of this.shown)
      for (const end of this.#ends(n, boxes, view)) {
        const away = Math.hypot(end[0] - x, end[1] - y);
        if (away < distance) [best, distance] = [n, away];
      }
    return best;
  }

  zoom(factor, x = this.canvas.clientWidth / 2, y = this.canvas.clientHeight / 2) {
    const fitting = this.#fitting(this.canvas.clientWidth, this.canvas.clientHeight);
    const view = this.view ?? fitting;
    const scale = Math.min(fitting.scale * MOST_ZOOM, view.scale * factor);
    if (scale <= fitting.scale * 1.001) return this.fit();
    const by = scale / view.scale;
    this.view = { scale, x: x - (x - view.x) * by, y: y - (y - view.y) * by };
    this.#moved();
  }

  pan(dx, dy) {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const view = { ...(this.view ?? this.#fitting(width, height)) };
    const layout = this.#layout(width, height);
    // A part of it always stays in sight.
    const inside = (at, length, room) => Math.min(room - 40, Math.max(40 - length * view.scale, at));
    this.view = { ...view, x: inside(view.x + dx, layout.width, width), y: inside(view.y + dy, layout.height, height) };
    this.#moved();
  }

  fit() {
    this.view = null;
    this.#moved();
  }

  #moved() {
    this.pick(null);
    this.draw();
  }

  /** To the next match that is shown, or the one before; by keys. */
  step(by) {
    if (!this.shown.length) return;
    const at = this.shown.indexOf(this.picked);
    const next = at < 0 ? (by > 0 ? 0 : this.shown.length - 1) : at + by;
    this.pick(this.shown[(next + this.shown.length) % this.shown.length], true);
  }

  #listen() {
    const { canvas } = this;
    const at = (event) => {
      const box = canvas.getBoundingClientRect();
      return { x: event.clientX - box.left, y: event.clientY - box.top };
    };
    new ResizeObserver(() => {
      this.pick(null);
      this.draw();
    }).observe(canvas);
    canvas.addEventListener("wheel", (event) => {
      if (!this.view && event.deltaY > 0) return; // nothing to zoom out of: the page scrolls
      event.preventDefault();
      const { x, y } = at(event);
      this.zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0016)), x, y);
    }, { passive: false });
    canvas.addEventListener("dblclick", (event) => this.zoom(2.5, at(event).x, at(event).y));
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.pointers.set(event.pointerId, { ...at(event), moved: 0 });
    });
    canvas.addEventListener("pointermove", (event) => {
      const now = at(event);
      const pointer = this.pointers.get(event.pointerId);
      if (!pointer) {
        const near = this.#nearest(now.x, now.y, NEAR.mouse);
        canvas.classList.toggle("near", near !== null);
        this.pick(near);
        return;
      }
      const others = [...this.pointers].filter(([id]) => id !== event.pointerId).map(([, other]) => other);
      const moved = pointer.moved + Math.hypot(now.x - pointer.x, now.y - pointer.y);
      if (others.length === 1) {
        const [other] = others;
        const apart = (p) => Math.max(1, Math.hypot(p.x - other.x, p.y - other.y));
        this.zoom(apart(now) / apart(pointer), (now.x + other.x) / 2, (now.y + other.y) / 2);
      } else if (!others.length && moved > 4) {
        canvas.classList.add("moving");
        this.pan(now.x - pointer.x, now.y - pointer.y);
      } else if (!others.length) return; // a finger that trembles
      this.pointers.set(event.pointerId, { ...now, moved });
    });
    const up = (event) => {
      const pointer = this.pointers.get(event.pointerId);
      this.pointers.delete(event.pointerId);
      canvas.classList.remove("moving");
      if (event.type === "pointerup" && pointer && pointer.moved <= 4 && event.pointerType !== "mouse")
        this.pick(this.#nearest(pointer.x, pointer.y, NEAR.touch));
    };
    canvas.addEventListener("pointerup", up);
    canvas.addEventListener("pointercancel", up);
    canvas.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse" && !this.pointers.size) this.pick(null);
    });
    const keys = {
      ArrowLeft: () => this.pan(50, 0), ArrowRight: () => this.pan(-50, 0),
      ArrowUp: () => this.pan(0, 50), ArrowDown: () => this.pan(0, -50),
      "+": () => this.zoom(1.4), "=": () => this.zoom(1.4), "-": () => this.zoom(1 / 1.4), 0: () => this.fit(),
      n: () => this.step(1), p: () => this.step(-1), Escape: () => this.pick(null),
    };
    canvas.addEventListener("keydown", (event) => {
      const act = keys[event.key] ?? keys[event.key.toLowerCase()];
      if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      act();
    });
  }
}

/** All matches in such an order that the first so many cover the first photo: from each part of it the surest, then
 * from each the second, and so on. */
function covering({ keypoints0, scores, size0 }) {
  const cell = Math.max(...size0) / 16;
  const seen = new Map();
  const rank = scores.map((_, n) => { // they come best first
    const part = keypoints0[n].map((x) => Math.floor(x / cell)).join();
    seen.set(part, (seen.get(part) ?? 0) + 1);
    return seen.get(part);
  });
  return scores.map((_, n) => n).sort((a, b) => rank[a] - rank[b] || scores[b] - scores[a] || a - b);
}

/** From red to green; or, for those who cannot tell these apart, from blue to yellow. */
export function colour(score, safe) {
  const v = Math.min(1, Math.max(0, score));
  const mix = (a, b, t) => a.map((x, n) => Math.round(x + (b[n] - x) * t));
  const [low, middle, high] = safe
    ? [[11, 60, 255], [169, 164, 160], [255, 230, 0]]
    : [[255, 0, 0], [255, 255, 0], [0, 255, 0]];
  return `rgb(${v < 0.5 ? mix(low, middle, 2 * v) : mix(middle, high, 2 * v - 1)})`;
}

export function layerColour(layer, layers) {
  const at = layers > 1 ? (layer * (LAYERS.length - 1)) / (layers - 1) : 0;
  const [low, high] = [LAYERS[Math.floor(at)], LAYERS[Math.ceil(at)]];
  return low.map((x, n) => Math.round(x + (high[n] - x) * (at % 1)));
}

export function apply(matrix, [x, y]) {
  const [u, v, w] = matrix.map((row) => row[0] * x + row[1] * y + row[2]);
  return [u / w, v / w];
}

/** The first photo as the second sees it, by the homography; the canvas has none, so pixel by pixel. */
function warp(bitmap, { size0, size1, flat }) {
  const most = 1400;
  const canvasOf = (size) => {
    const scale = Math.min(1, most / Math.max(...size));
    const canvas = document.createElement("canvas");
    Object.assign(canvas, { width: Math.max(1, Math.round(size[0] * scale)), height: Math.max(1, Math.round(size[1] * scale)) });
    return [canvas, canvas.getContext("2d", { willReadFrequently: true })];
  };
  const [source, from] = canvasOf(size0);
  from.drawImage(bitmap, 0, 0, source.width, source.height);
  const { data: pixels } = from.getImageData(0, 0, source.width, source.height);
  const [canvas, context] = canvasOf(size1);
  const image = context.createImageData(canvas.width, canvas.height);
  const m = inverse(flat.matrix);
  const [sx, sy] = [source.width / size0[0], source.height / size0[1]];
  const [tx, ty] = [size1[0] / canvas.width, size1[1] / canvas.height];
  for (let v = 0, out = 0; v < canvas.height; v++)
    for (let u = 0; u < canvas.width; u++, out += 4) {
      const [x1, y1] = [(u + 0.5) * tx - 0.5, (v + 0.5) * ty - 0.5];
      const w = m[6] * x1 + m[7] * y1 + m[8];
      if (w <= 1e-12) continue; // beyond the horizon
      const x = ((m[0] * x1 + m[1] * y1 + m[2]) / w + 0.5) * sx - 0.5;
      const y = ((m[3] * x1 + m[4] * y1 + m[5]) / w + 0.5) * sy - 0.5;
      if (!(x >= -0.5 && y >= -0.5 && x <= source.width - 0.5 && y <= source.height - 0.5)) continue;
      const left = Math.max(0, Math.floor(x)), top = Math.max(0, Math.floor(y));
      const right = Math.min(source.width - 1, left + 1), bottom = Math.min(source.height - 1, top + 1);
      const fx = Math.max(0, x - left), fy = Math.max(0, y - top);
      const a = 4 * (top * source.width + left), b = 4 * (top * source.width + right);
      const c = 4 * (bottom * source.width + left), d = 4 * (bottom * source.width + right);
      for (let k = 0; k < 4; k++)
        image.data[out + k] = (pixels[a + k] * (1 - fx) + pixels[b + k] * fx) * (1 - fy) +
          (pixels[c + k] * (1 - fx) + pixels[d + k] * fx) * fy;
    }
  context.putImageData(image, 0, 0);
  return canvas;
}

/** Of 3 x 3, row by row, up to a positive factor: signs tell what is in front. */
function inverse([[a, b, c], [d, e, f], [g, h, i]]) {
  const adjoint = [
    e * i - f * h, c * h - b * i, b * f - c * e,
    f * g - d * i, a * i - c * g, c * d - a * f,
    d * h - e * g, b * g - a * h, a * e - b * d,
  ];
  const sign = a * adjoint[0] + b * adjoint[3] + c * adjoint[6] < 0 ? -1 : 1;
  return adjoint.map((x) => x * sign);
}
