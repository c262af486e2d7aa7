// The two photos: dropped, pasted, chosen or taken; each is read at once, so that what is shown is what is sent.

const SHOWN = 4096; // pixels, the longer side on the screen; what is sent is the file itself
const THUMB = 320;

export class Photos {
  /** change: is called when a photo comes or goes; complain: gets a sentence. */
  constructor(change, complain) {
    this.change = change;
    this.complain = complain;
    this.limits = null; // of the server, once they are known
    this.formats = [];
    this.list = [null, null];
    this.turn = [0, 0]; // counts what was put into a slot: the last one stays, whichever is decoded first
    this.slots = [0, 1].map((n) => document.getElementById(`slot${n}`));
    this.slots.forEach((slot, n) => {
      for (const input of slot.querySelectorAll("input"))
        input.addEventListener("change", async () => {
          const files = Array.from(input.files);
          await this.add(files, n);
          input.value = ""; // so that the same file can be chosen again
        });
      slot.querySelector(".clear").addEventListener("click", () => {
        this.put(n, null);
        slot.querySelector("input").focus();
      });
    });
    this.#listen();
  }

  get names() {
    return this.list.map((photo) => photo?.name ?? "");
  }

  get complete() {
    return this.list.every(Boolean);
  }

  /** Into a slot, the next one into the other; without a slot, into those that are empty. */
  async add(files, slot = null) {
    if (!files.length) return;
    const empty = [0, 1].filter((n) => !this.list[n]);
    const order = slot !== null ? [slot, 1 - slot] : files.length > 1 || !empty.length ? [0, 1] : empty;
    const taken = files.slice(0, order.length);
    const problems = await Promise.all(taken.map((file, n) => this.read(file, order[n])));
    if (files.length > 2) problems.push(`${files.length} files were given: the first two were taken.`);
    const words = problems.filter(Boolean).join(" ");
    if (words) this.complain(words);
  }

  /** What is wrong with it, in words; null: nothing. */
  async read(file, n) {
    const name = file.name || "pasted photo";
    if (file.type && !file.type.startsWith("image/")) {
      return `${name} is not an image.` + (this.formats.length ? ` ${this.formats.join(", ")} are taken.` : "");
    }
    if (this.limits && file.size > this.limits.bytes) {
      return `${name} has ${mib(file.size)} MiB; this server takes at most ${mib(this.limits.bytes)} MiB for both ` +
        "photos. Nothing is shrunk unasked: make it smaller, or let the server take more.";
    }
    const turn = ++this.turn[n];
    let bytes;
    try {
      bytes = await file.arrayBuffer();
    } catch {
      return `${name} cannot be read.`;
    }
    const photo = { name, blob: new Blob([bytes], { type: file.type }), bitmap: null, width: 0, height: 0 };
    try {
      if (!isTurnedUnseen(bytes)) Object.assign(photo, await decoded(photo.blob));
    } catch {
      // Perhaps a format that the server knows and the browser does not, such as TIFF: the server tells.
    }
    if (turn === this.turn[n]) this.put(n, photo);
    else photo.bitmap?.close();
    return null;
  }

  put(n, photo) {
    this.turn[n]++;
    if (this.list[n] !== photo) this.list[n]?.bitmap?.close();
    this.list[n] = photo;
    this.show(n);
    this.change();
  }

  swap() {
    this.list.reverse();
    this.turn = this.turn.map((turn) => turn + 1);
    this.show(0);
    this.show(1);
    this.change();
  }

  show(n) {
    const [slot, photo] = [this.slots[n], this.list[n]];
    const canvas = slot.querySelector("canvas");
    slot.classList.toggle("filled", Boolean(photo));
    slot.classList.toggle("unseeable", Boolean(photo) && !photo.bitmap);
    slot.querySelector(".clear").hidden = !photo;
    const size = photo?.width ? `${photo.width}\u00a0×\u00a0${photo.height}` : "";
    slot.querySelector(".name").textContent = photo ? [photo.name, size].filter(Boolean).join(", ") : "drop, paste or choose";
    slot.querySelector(".placeholder").textContent = photo ? "shown once it is matched" : ["First photo", "Second photo"][n];
    const scale = photo?.bitmap ? Math.min(1, THUMB / Math.max(photo.bitmap.width, photo.bitmap.height)) : 0;
    canvas.width = scale ? Math.max(1, Math.round(photo.bitmap.width * scale)) : 0;
    canvas.height = scale ? Math.max(1, Math.round(photo.bitmap.height * scale)) : 0;
    if (scale) canvas.getContext("2d").drawImage(photo.bitmap, 0, 0, canvas.width, canvas.height);
  }

  #listen() {
    const frame = document.getElementById("dropping");
    const over = (event) => this.slots.findIndex((slot) => slot.contains(event.target));
    const mark = (n) => this.slots.forEach((slot, m) => slot.classList.toggle("over", m === n));
    document.addEventListener("dragover", (event) => {
      event.preventDefault();
      frame.hidden = false;
      mark(over(event));
    });
    document.addEventListener("dragleave", (event) => {
      if (event.relatedTarget) return;
      frame.hidden = true;
      mark(-1);
    });
    document.addEventListener("drop", (event) => {
      event.preventDefault();
      frame.hidden = true;
      mark(-1);
      const slot = over(event);
      const files = Array.from(event.dataTransfer.files);
      if (files.length) this.add(files, slot < 0 ? null : slot);
      else this.complain("That was no file: save the picture first, then drop it here.");
    });
    document.addEventListener("paste", (event) => {
      const files = Array.from(event.clipboardData.files);
      if (!files.length) return;
      event.preventDefault();
      const slot = over(event);
      this.add(files, slot < 0 ? null : slot);
    });
  }
}

/** Of a WebP with EXIF: browsers do not turn it as that says, but the server does. */
function isTurnedUnseen(bytes) {
  const head = new Uint8Array(bytes, 0, Math.min(21, bytes.byteLength));
  const text = String.fromCharCode(...head);
  return text.startsWith("RIFF") && text.startsWith("WEBPVP8X", 8) && (head[20] & 8) !== 0;
}

/** The picture as it is shown, turned as its EXIF says, and its true size. */
export async function decoded(blob) {
  const bitmap = await createImageBitmap(blob, { imageOrientation: "from-image" });
  const { width, height } = bitmap;
  if (Math.max(width, height) <= SHOWN) return { bitmap, width, height };
  const scale = SHOWN / Math.max(width, height);
  const small = await createImageBitmap(bitmap, {
    resizeWidth: Math.max(1, Math.round(width * scale)),
    resizeHeight: Math.max(1, Math.round(height * scale)),
    resizeQuality: "medium",
  });
  bitmap.close();
  return { bitmap: small, width, height };
}

export function mib(bytes) {
  return (bytes / 2 ** 20).toFixed(1).replace(/\.0$/, "");
}
