// Check a model against the certificate that onnxq wrote into it, with onnxruntime-web or onnxruntime-node alone.
//
//     import * as ort from "onnxruntime-web";
//     import { verify } from "./onnxq-verify.mjs";
//     const found = await verify(ort, new Uint8Array(await (await fetch("model.onnx")).arrayBuffer()));
//     if (!found.right) console.warn(found.reason);
//
// With Node: node onnxq-verify.mjs model.onnx [onnxruntime-node]. Makes the same inputs and verdicts as onnxq_verify.py.
// A certificate is no signature: it finds damage and runtimes that compute something else, not forgery.

const KEY = "onnxq.certificate";
const VERSION = 1;
const METADATA = 14;
const BUCKETS = 64;
const HUGE = 1e30;
const ARRAYS = {
  float32: Float32Array, float64: Float64Array, float16: Uint16Array, bool: Uint8Array,
  int8: Int8Array, uint8: Uint8Array, int16: Int16Array, uint16: Uint16Array, int32: Int32Array, uint32: Uint32Array,
  int64: BigInt64Array, uint64: BigUint64Array,
};
const hex = (buffer) => Array.from(new Uint8Array(buffer), (byte) => byte.toString(16).padStart(2, "0")).join("");
const sha256 = async (bytes) => hex(await crypto.subtle.digest("SHA-256", bytes));

// Returns the certificate of a model, and the SHA-256 of all its fields but the metadata_props.
export async function read(bytes) {
  const kept = new Uint8Array(bytes.length);
  let length = 0;
  let certificate = null;
  for (const [number, field, value] of fields(bytes)) {
    if (number !== METADATA) {
      kept.set(field, length);
      length += field.length;
      continue;
    }
    const entry = Object.fromEntries([...fields(value)].map(([inner, , text]) => [inner, new TextDecoder().decode(text)]));
    if (entry[1] === KEY) certificate = JSON.parse(entry[2]);
  }
  return { certificate, digest: await sha256(kept.subarray(0, length)) };
}

function* fields(bytes) {
  let place = 0;
  const varint = () => {
    for (let value = 0, scale = 1; ; scale *= 128) {
      const byte = bytes[place++];
      value += (byte & 127) * scale;
      if (!(byte > 127)) return value;
    }
  };
  while (place < bytes.length) {
    const start = place;
    const tag = varint();
    const kind = tag & 7;
    if (kind === 0) varint();
    const length = kind === 2 ? varint() : { 0: 0, 1: 8, 5: 4 }[kind];
    if (!(length >= 0)) throw new Error("it is no ONNX model");
    const content = place;
    place += length;
    yield [tag >>> 3, bytes.subarray(start, place), bytes.subarray(content, place)];
  }
}

// Returns 32 pseudo-random bits: the hash lowbias32 of Chris Wellons' hash-prospector.
export function mix(value) {
  value = Math.imul(value ^ (value >>> 16), 0x7feb352d);
  value = Math.imul(value ^ (value >>> 15), 0x846ca68b);
  return (value ^ (value >>> 16)) >>> 0;
}

const keyOf = (seed, stream) => mix(Math.imul(seed, 0x9e3779b9) + stream);

// Returns the values of an input, the same bits as make_input of onnxq_verify.py.
export function makeInput(recipe, shape, seed, stream, scale = 1) {
  const grains = recipe.grain.map((one) => (one > 1 ? one * scale : 1));
  const size = shape.reduce((a, b) => a * b, 1);
  const isText = recipe.type === "string";
  const isFloat = recipe.type === "float32" || recipe.type === "float64";
  const isLong = recipe.type === "int64" || recipe.type === "uint64";
  const values = isText ? new Array(size) : new ARRAYS[recipe.type](size);
  const [ownKey, cellKey] = [keyOf(seed, 2 * stream), keyOf(seed, 2 * stream + 1)];
  const index = shape.map(() => 0);
  const entries = recipe.tables[0].length;
  for (let n = 0; n < size; n++) {
    let cell = 0;
    shape.forEach((dim, axis) => {
      cell = Math.imul(cell, Math.ceil(dim / grains[axis])) + Math.floor(index[axis] / grains[axis]);
    });
    const own = mix(n ^ ownKey);
    const drawn = (own & 15) === 0 ? own : mix(cell ^ cellKey);
    const row = (shape.length ? index[recipe.axis] : 0) % recipe.tables.length;
    const table = recipe.tables[row];
    if (isFloat) {
      const place = ((drawn >>> 16) * (entries - 1)) >>> 16;
      const part = (drawn >>> 8) & 255;
      values[n] = (table[place] * (256 - part) + table[place + 1] * part) * 2 ** recipe.exponents[row];
    } else {
      const chosen = table[((drawn >>> 16) * entries) >>> 16];
      values[n] = isText ? recipe.texts[chosen] : isLong ? BigInt(chosen) : chosen;
    }
    for (let axis = shape.length - 1; axis >= 0 && ++index[axis] === shape[axis]; axis--) index[axis] = 0;
  }
  return values;
}

const float16 = (bits) => {
  const [sign, exponent, part] = [bits >> 15 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
  if (exponent === 31) return part ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + part / 1024) : 2 ** -14 * (part / 1024));
};

// An output's elements as numbers; some runtimes give 16-bit floats as their bits.
function numbers(tensor) {
  if (tensor.type === "float16" && tensor.data instanceof Uint16Array) return Float64Array.from(tensor.data, float16);
  return Float64Array.from(tensor.data, Number);
}

export function sketch(values, buckets, seed) {
  const sums = new Float64Array(buckets);
  const key = keyOf(seed, 0xffff);
  let lost = 0;
  values.forEach((value, n) => {
    const hashed = mix(n ^ key);
    const bucket = n < buckets ? n : (hashed >>> 8) & (buckets - 1);
    if (!(Math.abs(value) < HUGE)) lost++;
    else sums[bucket] += hashed & 1 ? -value : value;
  });
  return [sums, lost];
}

function labels(values) {
  const count = Math.min(values.length, BUCKETS);
  return Array.from({ length: count }, (_, place) => {
    const one = values[Math.floor((place * values.length) / Math.max(count, 1))];
    if (typeof one === "string") return (new TextEncoder().encode(one).reduce((a, b) => a + b, 0) << 16) >> 16;
    return Number(BigInt.asIntN(16, BigInt(one)));
  });
}

function decibels(wanted, found) {
  const energy = (values) => values.reduce((sum, value) => sum + value * value, 0);
  const noise = energy(wanted.map((value, n) => found[n] - value));
  const signal = energy(wanted);
  return !noise ? Infinity : signal ? 10 * Math.log10(signal / noise) : -Infinity;
}

function unpack(text, scale) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return Array.from(new Int16Array(bytes.buffer), (code) => code * scale);
}

// Returns whether an output is right, and its sketch beside the float model's and the certified one's.
function compare(mark, tensor, seed) {
  const certified = unpack(mark.quantized, mark.scale);
  const isShaped = tensor.dims.length === mark.shape.length && mark.shape.every((dim, axis) => dim === tensor.dims[axis]);
  if (mark.labels) {
    const found = isShaped ? labels(tensor.data) : [];
    return [found.filter((one, n) => one === certified[n]).length >= mark.tolerance * certified.length, null];
  }
  const values = numbers(tensor);
  const [found, lost] = isShaped ? sketch(values, certified.length, seed) : [certified.map(() => 0), -1];
  const top = mark.top < 0 ? -1 : values.reduce((best, value, n) => (value > values[best] ? n : best), 0);
  const right = lost === mark.lost && top === mark.top && decibels(certified, found) >= mark.tolerance;
  return [right, [unpack(mark.floats, mark.scale), certified, Array.from(found)]];
}

// Runs the probes; `run` returns the tensors of outputs by name of tensors of inputs by name.
export async function judge(ort, certificate, run) {
  const seen = new Map();
  for (const probe of certificate.probes) {
    const feeds = {};
    certificate.inputs.forEach((recipe, place) => {
      const values = makeInput(recipe, probe.shapes[place], probe.seed, place, probe.scale);
      const own = recipe.type === "float16" && typeof Float16Array !== "undefined";
      const data = own ? new Float16Array(values.buffer) : values;
      feeds[recipe.name] = new ort.Tensor(recipe.type, data, probe.shapes[place]);
    });
    const outputs = await run(feeds);
    for (const mark of probe.outputs) {
      if (!seen.has(mark.name)) seen.set(mark.name, []);
      seen.get(mark.name).push(compare(mark, outputs[mark.name], probe.seed));
    }
  }
  const [wrong, table] = [{}, {}];
  for (const [name, found] of seen) {
    const bad = found.filter(([right]) => !right).length;
    const areLabels = found[0][1] === null;
    // A label may turn over by rounding.
    if (bad > (areLabels ? Math.floor(found.length / 2) : 0)) wrong[name] = bad;
    if (areLabels) continue;
    const [floats, certified, here] = [0, 1, 2].map((part) => found.flatMap(([, sketches]) => sketches[part]));
    table[name] = [decibels(floats, here), decibels(floats, certified)];
  }
  const worst = Object.values(table).reduce((least, one) => (one[0] < least[0] ? one : least), [Infinity, Infinity]);
  return { right: !Object.keys(wrong).length, wrong, sqnr: worst[0], certified: worst[1], outputs: table };
}

// Checks a model; `right` of the result says whether it is right here.
//   ort: the module onnxruntime-web or onnxruntime-node
//   bytes: the model file as a Uint8Array
//   session: an InferenceSession of it; if missing, one is opened with `options`
//   data: files of external weights by location, as Uint8Arrays
export async function verify(ort, bytes, { session = null, options = {}, data = {} } = {}) {
  const { certificate, digest } = await read(bytes);
  if (certificate?.version !== VERSION) return { right: false, reason: "there is no certificate of this version" };
  let same = digest === certificate.graph;
  for (const [name, known] of Object.entries(certificate.data)) same &&= name in data && (await sha256(data[name])) === known;
  if (!same) return { right: false, reason: "the file was changed after it was certified" };
  const externalData = Object.entries(data).map(([path, values]) => ({ path, data: values }));
  session ??= await ort.InferenceSession.create(bytes, externalData.length ? { ...options, externalData } : options);
  if (session.outputNames.join("\n") !== certificate.outputs.join("\n")) {
    return { right: false, reason: "the outputs have other names" };
  }
  const found = await judge(ort, certificate, (feeds) => session.run(feeds));
  return { ...found, reason: found.right ? "" : `outputs differ: ${Object.keys(found.wrong).join(", ")}` };
}

if (typeof process !== "undefined" && process.argv[1]?.endsWith("onnxq-verify.mjs")) {
  const [fs, path, { createRequire }] = [await import("node:fs"), await import("node:path"), await import("node:module")];
  const [model, name = "onnxruntime-node"] = process.argv.slice(2);
  const ort = createRequire(path.resolve("package.json"))(name);
  const bytes = new Uint8Array(fs.readFileSync(model));
  const { certificate } = await read(bytes);
  const places = Object.keys(certificate?.data ?? {}).filter((one) => fs.existsSync(path.join(path.dirname(model), one)));
  const data = Object.fromEntries(places.map((one) => [one, fs.readFileSync(path.join(path.dirname(model), one))]));
  const found = await verify(ort, bytes, { data });
  process.stdout.write(`${JSON.stringify(found, (_, one) => (Object.is(one, Infinity) ? "inf" : one))}\n`);
  process.exitCode = found.right ? 0 : 3;
}
