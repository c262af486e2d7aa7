// Matches as files that `Matches.load` reads, made here: no server is asked.

/** What is saved: the matches of these indices, with the geometry's inliers among them. */
export function chosen(result, index) {
  const pick = (values) => Array.from(index, (n) => values[n]);
  const part = {
    keypoints0: pick(result.keypoints0), keypoints1: pick(result.keypoints1), scores: pick(result.scores),
    size0: result.size0, size1: result.size1, name0: result.names[0], name1: result.names[1],
    keep0: result.details.keep0, keep1: result.details.keep1,
  };
  for (const fit of result.geometry) {
    part[`${fit.model}_inliers`] = pick(fit.inliers);
    if (fit.matrix) part[`${fit.model}_matrix`] = fit.matrix;
  }
  return part;
}

export function toJson(part) {
  return new Blob([JSON.stringify(part)], { type: "application/json" });
}

export function toCsv(part) {
  const quoted = (text) => `"${text.replaceAll('"', '""')}"`;
  const head = ["#", ...part.size0, ...part.size1, quoted(part.name0), quoted(part.name1)];
  const rows = part.scores.map((score, n) => [...part.keypoints0[n], ...part.keypoints1[n], score]);
  const lines = [head, ["x0", "y0", "x1", "y1", "score"], ...rows];
  return new Blob([lines.map((line) => line.join(",") + "\r\n").join("")], { type: "text/csv" });
}

export function toNpz(part) {
  const n = part.scores.length;
  const arrays = {
    keypoints0: ["<f4", [n, 2], new Float32Array(part.keypoints0.flat())],
    keypoints1: ["<f4", [n, 2], new Float32Array(part.keypoints1.flat())],
    scores: ["<f4", [n], new Float32Array(part.scores)],
  };
  for (const name of ["size0", "size1"])
    arrays[name] = ["<i8", [2], new BigInt64Array(part[name].map(BigInt))];
  for (const name of ["name0", "name1"]) {
    const points = Array.from(part[name] || " ", (c) => c.codePointAt(0));
    arrays[name] = [`<U${points.length}`, [], new Uint32Array(points)];
  }
  for (const name of ["keep0", "keep1"]) {
    const keep = part[name];
    const shape = [keep.length, keep[0].length, keep[0][0].length];
    arrays[name] = ["|b1", shape, new Uint8Array(keep.flat(2))];
  }
  for (const model of ["homography", "fundamental"]) {
    const [inliers, matrix] = [part[`${model}_inliers`], part[`${model}_matrix`]];
    if (inliers) arrays[`${model}_inliers`] = ["|b1", [n], new Uint8Array(inliers.map(Number))];
    if (matrix) arrays[`${model}_matrix`] = ["<f8", [3, 3], new Float64Array(matrix.flat())];
  }
  const files = Object.entries(arrays).map(([name, array]) => [`${name}.npy`, toNpy(...array)]);
  return new Blob(zip(files), { type: "application/x-npz" });
}

/** NumPy's format: a dictionary in Python's words, filled up to a multiple of 64 bytes, then the values. */
function toNpy(kind, shape, values) {
  const tuple = shape.length === 1 ? `(${shape[0]},)` : `(${shape.join(", ")})`;
  const text = `{'descr': '${kind}', 'fortran_order': False, 'shape': ${tuple}, }`;
  const header = text.padEnd(Math.ceil((text.length + 11) / 64) * 64 - 11) + "\n";
  const bytes = new Uint8Array(10 + header.length + values.byteLength);
  bytes.set([0x93, ...new TextEncoder().encode("NUMPY"), 1, 0, header.length & 255, header.length >> 8]);
  bytes.set(new TextEncoder().encode(header), 10);
  bytes.set(new Uint8Array(values.buffer), 10 + header.length);
  return bytes;
}

/** An archive of files that are stored as they are: [name, bytes] each. */
function zip(files) {
  const parts = [];
  const directory = [];
  let offset = 0;
  for (const [name, bytes] of files) {
    const path = new TextEncoder().encode(name);
    // Version 2.0, no flags, stored, 1 January 1980, sum, twice the size, length of the name, nothing more.
    const common = [[20, 2], [0, 2], [0, 2], [0, 2], [0x21, 2], [crc32(bytes), 4], [bytes.length, 4],
      [bytes.length, 4], [path.length, 2], [0, 2]];
    const local = little([[0x04034b50, 4], ...common]);
    directory.push(little([[0x02014b50, 4], [20, 2], ...common, [0, 2], [0, 2], [0, 2], [0, 4], [offset, 4]]), path);
    parts.push(local, path, bytes);
    offset += local.length + path.length + bytes.length;
  }
  const size = directory.reduce((sum, part) => sum + part.length, 0);
  const end = little([[0x06054b50, 4], [0, 2], [0, 2], [files.length, 2], [files.length, 2], [size, 4], [offset, 4], [0, 2]]);
  return [...parts, ...directory, end];
}

/** [value, bytes] each, least byte first. */
function little(fields) {
  return new Uint8Array(fields.flatMap(([value, count]) =>
    Array.from({ length: count }, (_, n) => (value >>> (8 * n)) & 255)));
}

const CRC = Uint32Array.from({ length: 256 }, (_, n) => {
  let c = n;
  for (let bit = 0; bit < 8; bit++) c = c & 1 ? 0xedb88320 ^ (c >>> 1) : c >>> 1;
  return c;
});

function crc32(bytes) {
  let c = ~0;
  for (const byte of bytes) c = CRC[(c ^ byte) & 255] ^ (c >>> 8);
  return ~c >>> 0;
}

export function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000); // the browser may still be reading
}
