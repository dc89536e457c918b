// Check a model against the certificate that onnxq wrote into it, with onnxruntime-web or onnxruntime-node alone.
//
//     import * as ort from "onnxruntime-web";
//     import { verify } from "./onnxq-verify.mjs";
//     const found = await verify(ort, new Uint8Array(await (await fetch("model.onnx")).arrayBuffer()));
//     if (!found.right) console.warn(found.reason);
//
// With Node: node onnxq-verify.mjs model.onnx [onnxruntime-node]. Makes the same inputs and verdicts as onnxq_verify.py.
// A certificate is no signature: it finds damage and runtimes that compute something else, not forgery.

const [KEY, VERSION, METADATA, SIGNS, HUGE, LEAST] = ["onnxq.certificate", 1, 14, 0xffff, 1e30, 1e-300];
const ARRAYS = {
  float32: Float32Array, float64: Float64Array, float16: Uint16Array, bool: Uint8Array,
  int8: Int8Array, uint8: Uint8Array, int16: Int16Array, uint16: Uint16Array, int32: Int32Array, uint32: Uint32Array,
  int64: BigInt64Array, uint64: BigUint64Array,
};
const unpack = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer;
const sum = (values) => values.reduce((total, one) => total + one, 0);
const sha256 = async (bytes) =>
  Array.from(new Uint8Array(await crypto.subtle.digest("SHA-256", bytes)), (one) => one.toString(16).padStart(2, "0")).join("");

// Returns the certificate of a model, and the SHA-256 of all its fields but the metadata_props.
export async function read(bytes) {
  const kept = new Uint8Array(bytes.length);
  let [place, length, certificate] = [0, 0, null];
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
    if (tag & 5) throw new Error("it is not an ONNX model");
    const size = varint();
    const content = place;
    if (tag & 2) place += size;
    const text = tag >>> 3 === METADATA ? new TextDecoder().decode(bytes.subarray(content, place)) : null;
    if (text === null) {
      kept.set(bytes.subarray(start, place), length);
      length += Math.min(place, bytes.length) - start;
    } else if (text.slice(2).startsWith(KEY)) certificate = JSON.parse(text.slice(text.indexOf('{"')));
  }
  return { certificate, digest: await sha256(kept.subarray(0, length)) };
}

// Returns 32 pseudo-random bits: the hash lowbias32 of Chris Wellons' hash-prospector.
export function mix(value) {
  value = Math.imul(value ^ (value >>> 16), 0x7feb352d);
  value = Math.imul(value ^ (value >>> 15), 0x846ca68b);
  return (value ^ (value >>> 16)) >>> 0;
}

const keyOf = (seed, stream) => mix((seed << 16) | stream);

// Returns the values of an input, the same bits as make_input of onnxq_verify.py.
export function makeInput({ type, shape, grain, tables, rows, stride }, seed, stream) {
  const strides = shape.map((_, axis) => shape.slice(axis + 1).reduce((a, b) => a * b, 1));
  const grains = grain.map((one) => (one > 1 ? one << seed % 3 : 1));
  const table = type === "string" ? tables : new ARRAYS[type](unpack(tables[seed % tables.length]));
  const values = new (type === "string" ? Array : ARRAYS[type])(shape.reduce((a, b) => a * b, 1));
  const [entries, ownKey, cellKey] = [table.length / rows, keyOf(seed, 2 * stream), keyOf(seed, 2 * stream + 1)];
  for (let n = 0; n < values.length; n++) {
    const cell = strides.reduce((left, one, axis) => left - ((Math.floor(n / one) % shape[axis]) % grains[axis]) * one, n);
    const own = mix(n ^ ownKey);
    const drawn = (own & 15) === 0 ? own : mix(cell ^ cellKey);
    values[n] = table[(Math.floor(n / stride) % rows) * entries + ((drawn >>> 8) % entries)];
  }
  return values;
}

function halfToNumber(bits) {
  const [sign, exponent, part] = [bits >> 15 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
  if (exponent === 31) return part ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + part / 1024) : 2 ** -14 * (part / 1024));
}

const labelOf = (one) => (typeof one === "string" ? sum(new TextEncoder().encode(one)) : BigInt.asUintN(32, BigInt(one)));

// Returns sums of randomly signed elements in buckets, and the number of finite elements, as sketch of onnxq_verify.py.
export function sketch({ type, data }, buckets, seed) {
  // Some runtimes give 16-bit floats as their bits.
  const isHalf = type === "float16" && data instanceof Uint16Array;
  const number = isHalf ? halfToNumber : type.startsWith("float") ? Number : (one) => mix(Number(labelOf(one))) - 2 ** 31;
  const [sums, key] = [new Array(buckets).fill(0), keyOf(seed, SIGNS)];
  let finite = 0;
  data.forEach((one, n) => {
    const value = number(one);
    if (!(Math.abs(value) < HUGE)) return;
    finite++;
    sums[n % buckets] += mix(n ^ key) & 1 ? -value : value;
  });
  return [sums, finite];
}

// Returns the floats of quantized values, given their scale and zero point; without these, the values.
const floatsOf = (tensor, quantizer) =>
  quantizer ? { type: "float64", data: Array.from(tensor.data, (one) => quantizer[0] * (one - quantizer[1])) } : tensor;

function decibels(wanted, found) {
  const [signal, noise] = [sum(wanted.map((one) => one * one)), sum(wanted.map((one, n) => (found[n] - one) ** 2))];
  return noise ? 10 * Math.log10(Math.max(signal, LEAST) / noise) : Infinity;
}

// Runs the probes; `run` returns the tensors of outputs by name of tensors of inputs by name.
export async function judge(ort, { inputs, seeds, fingerprints, quantized = {} }, run) {
  const [runs, wrong, outputs] = [[], {}, {}];
  for (const seed of seeds) {
    const tensors = inputs.map((recipe, stream) => {
      const values = makeInput(recipe, seed, stream);
      const own = recipe.type === "float16" && typeof Float16Array !== "undefined";
      return [recipe.name, new ort.Tensor(recipe.type, own ? new Float16Array(values.buffer) : values, recipe.shape)];
    });
    runs.push(await run(Object.fromEntries(tensors)));
  }
  for (const { name, scale, tolerances, spare, ...mark } of fingerprints) {
    const [floats, certified] = [mark.floats, mark.quantized].map((one) => Array.from(new Int16Array(unpack(one)), (code) => code * scale));
    const buckets = certified.length / seeds.length;
    const found = runs.map((one, probe) => sketch(floatsOf(one[name], quantized[name]), buckets, seeds[probe]));
    const fits = ([here, finite], probe) =>
      finite === mark.finite[probe] && decibels(certified.slice(probe * buckets, (probe + 1) * buckets), here) >= tolerances[probe];
    const bad = found.filter((one, probe) => !fits(one, probe)).length;
    if (bad > spare) wrong[name] = bad;
    outputs[name] = [decibels(floats, found.flatMap(([here]) => here)), decibels(floats, certified)];
  }
  const worst = Object.values(outputs).reduce((least, one) => (one[0] < least[0] ? one : least), [Infinity, Infinity]);
  return { right: !Object.keys(wrong).length, wrong, sqnr: worst[0], certified: worst[1], outputs };
}

// Checks a model; `right` of the result says whether it is right here.
//   ort: the module onnxruntime-web or onnxruntime-node
//   bytes: the model file as a Uint8Array
//   session: an InferenceSession of it; if missing, one is opened with `options`
//   data: files of external weights by location, as Uint8Arrays
export async function verify(ort, bytes, { session = null, options = {}, data = {} } = {}) {
  const { certificate, digest } = await read(bytes);
  if (certificate?.version !== VERSION) return { right: false, reason: "the model has no certificate that this checker reads" };
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
  const stop = (sentence) => {
    process.stderr.write(`onnxq-verify.mjs: ${sentence}\n`);
    process.exit(2);
  };
  const [model, name = "onnxruntime-node"] = process.argv.slice(2);
  if (model === undefined) stop("name a model: node onnxq-verify.mjs model.onnx");
  if (!fs.statSync(model, { throwIfNoEntry: false })?.isFile()) stop(`there is no file ${model}`);
  const bytes = new Uint8Array(fs.readFileSync(model));
  const load = createRequire(path.resolve("package.json"));
  try {
    load.resolve(name);
  } catch {
    stop(`the package ${name} is not installed here; run npm install ${name}`);
  }
  const places = Object.keys((await read(bytes)).certificate?.data ?? {}).map((one) => [one, path.join(path.dirname(model), one)]);
  const data = Object.fromEntries(places.filter(([, file]) => fs.existsSync(file)).map(([one, file]) => [one, fs.readFileSync(file)]));
  const found = await verify(load(name), bytes, { data });
  process.stdout.write(`${JSON.stringify(found, (_, one) => (Object.is(one, Infinity) ? "inf" : one))}\n`);
  process.exitCode = found.right ? 0 : 3;
}
