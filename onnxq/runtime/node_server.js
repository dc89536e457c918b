// Runs models in Node for another process: messages of onnxq/engines/wire.py in, answers out.
"use strict";
const fs = require("node:fs");
const os = require("node:os");
const path = require("node:path");

const PROTOCOL = 2;
// WebAssembly is compiled again, better, by other threads while it runs, which takes them seconds on a busy machine.
// The first model needs most of it; what runs most comes first. All in milliseconds.
const RUNNING = 100;
const WAITING = 30;
const WORKING = 1;
const FIRST_WARM_UP = 2000;
const WARM_UP = 400;
// As many as onnxruntime-web takes by itself.
const WEB_THREADS = Math.min(4, Math.ceil(os.availableParallelism() / 2));
const SHORTEST_ROUND = 0.04;
const LONGEST_ROUND = 0.1;
const [packageName, folder] = process.argv.slice(2);
const TYPES = {
  float32: Float32Array, float64: Float64Array, int8: Int8Array, uint8: Uint8Array, int16: Int16Array,
  uint16: Uint16Array, int32: Int32Array, uint32: Uint32Array, int64: BigInt64Array, uint64: BigUint64Array,
  bool: Uint8Array, float16: Uint16Array,
};
// Whatever libraries print is no answer; in WebAssembly, which writes to files itself, a profile is printed.
let printed = null;
const { writeSync } = fs;
for (const name of ["log", "info", "debug"]) console[name] = console.error;
fs.writeSync = (file, ...rest) => (file === 1 && printed ? printed.push(rest[0]) : writeSync(file === 1 ? 2 : file, ...rest));

let ort;
const sessions = new Map();
let loads = 0;
let threadsInUse;
const web = packageName === "onnxruntime-web";
const warm = new Set();

function tensor(described, data) {
  if (described.values) return new ort.Tensor("string", described.values, described.shape);
  const kind = TYPES[described.dtype];
  if (!kind) throw new Error(`values of type ${described.dtype} cannot be passed to JavaScript`);
  const own = data.buffer.slice(data.byteOffset, data.byteOffset + data.byteLength);
  const view = described.dtype === "float16" && typeof Float16Array !== "undefined" ? Float16Array : kind;
  return new ort.Tensor(described.dtype, new view(own), described.shape);
}

function samplesOf(header, arrays) {
  let start = 0;
  return header.samples.map((names) => {
    const sample = {};
    for (const name of names) sample[name] = arrays[start++];
    return sample;
  });
}

async function opened(model, threads, more = {}) {
  const options = { logSeverityLevel: 4, graphOptimizationLevel: "all", ...more };
  if (web) {
    const wanted = threads || threadsInUse || WEB_THREADS;
    if (threadsInUse && threadsInUse !== wanted) throw new Error("threads cannot change once a model is loaded");
    ort.env.wasm.numThreads = threadsInUse = wanted;
    return ort.InferenceSession.create(fs.readFileSync(model), { ...options, externalData: outside(model) });
  }
  if (threads) options.intraOpNumThreads = threads;
  options.extra = { session: { intra_op: { allow_spinning: "0" } } };
  return ort.InferenceSession.create(model, options);
}

// WebAssembly sees no files; weights outside of a model lie in files that are called after it.
function outside(model) {
  const { dir, base } = path.parse(model);
  const names = fs.readdirSync(dir).filter((name) => name !== base && name.startsWith(base));
  return names.map((name) => ({ path: name, data: fs.readFileSync(path.join(dir, name)) }));
}

// Another model may take a file's place.
function identity(model) {
  return `${model} ${fs.statSync(model).mtimeMs}`;
}

async function load(header) {
  const loaded = [];
  for (const model of header.models) {
    const session = await opened(model, header.threads);
    sessions.set(++loads, { session, model: identity(model) });
    loaded.push({ session: loads, outputs: session.outputNames });
  }
  return [{ loaded }, []];
}

// A model is warm once running it makes no other thread compile any more.
async function warmUp({ session, model }, sample) {
  const cold = web && !warm.has(model);
  const end = performance.now() + (warm.size ? WARM_UP : FIRST_WARM_UP);
  do {
    const pause = performance.now() + (cold ? RUNNING : 0);
    for (let count = 0; count < 2 || performance.now() < pause; count++) await session.run(sample);
  } while (cold && (await othersWorked(end)) && performance.now() < end);
  warm.add(model);
}

// Waits until other threads have nothing to do, and tells whether they had.
async function othersWorked(end) {
  for (let count = 0; ; count++) {
    const before = process.cpuUsage();
    await new Promise((resolve) => setTimeout(resolve, WAITING));
    const { user, system } = process.cpuUsage(before);
    if ((user + system) / 1000 < WORKING || performance.now() > end) return count > 0;
  }
}

// In WebAssembly the profile is printed and the graph that ran is not told; elsewhere both are files.
async function profile(header, samples) {
  if (web) {
    const session = await opened(header.model, header.threads);
    await warmUp({ session, model: identity(header.model) }, samples[0]);
    await session.release();
  }
  const folder = fs.mkdtempSync(path.join(os.tmpdir(), "onnxq-"));
  try {
    const optimized = path.join(folder, "optimized.onnx");
    const files = web ? {} : { optimizedModelFilePath: optimized, profileFilePrefix: path.join(folder, "profile") };
    const session = await opened(header.model, header.threads, { enableProfiling: true, ...files });
    await session.run(samples[0]);
    for (const sample of samples) for (let count = 0; count < header.repeats; count++) await session.run(sample);
    printed = [];
    session.endProfiling();
    const events = printed.join("");
    await session.release();
    if (web) return [{}, [bytes(Buffer.from(events))]];
    const written = fs.readdirSync(folder).find((name) => name.startsWith("profile"));
    return [{}, [optimized, path.join(folder, written)].map((name) => bytes(fs.readFileSync(name)))];
  } finally {
    printed = null;
    fs.rmSync(folder, { recursive: true });
  }
}

function bytes(data) {
  return { type: "uint8", dims: [data.length], data };
}

// As onnxq/engines/turns.py does it, in orders that come from there.
async function time(header, samples) {
  const found = header.sessions.map((number) => sessions.get(number));
  const timed = async ({ session }, sample) => {
    const start = performance.now();
    await session.run(sample);
    return (performance.now() - start) / 1000;
  };
  for (const one of found) await warmUp(one, samples[0]);
  const times = samples.map(() => []);
  const start = performance.now();
  for (let turn = header.turn; ; ) {
    const index = turn % samples.length;
    const order = header.orders[(Math.floor(turn / samples.length) + index) % header.orders.length];
    const taken = [];
    for (const place of order) taken[place] = await timed(found[place], samples[index]);
    times[index].push(taken);
    turn++;
    const spent = (performance.now() - start) / 1000;
    const turns = turn - header.turn;
    const many = turns >= header.enough && spent >= SHORTEST_ROUND;
    const long = turns >= samples.length && spent >= LONGEST_ROUND * found.length;
    if (spent >= header.seconds || (header.enough !== null && (many || long))) return [{ times }, []];
  }
}

async function answer(header, arrays) {
  if (header.ask === "hello") {
    ort = require(require.resolve(packageName, { paths: [folder] }));
    const found = ort.env.versions;
    const version = found && (found.node || found.web || found.common);
    const told = `${packageName} ${version} on Node ${process.versions.node}`;
    return [{ protocol: PROTOCOL, version: told, profiles: true, threads: web ? WEB_THREADS : null }, []];
  }
  if (header.ask === "load") return load(header);
  if (header.ask === "close") {
    await sessions.get(header.session).session.release();
    sessions.delete(header.session);
    return [{}, []];
  }
  const samples = samplesOf(header, arrays);
  if (header.ask === "time") return time(header, samples);
  if (header.ask === "profile") return profile(header, samples);
  if (header.ask !== "run") throw new Error(`it does not ${header.ask}`);
  const { session } = sessions.get(header.session);
  const found = await session.run(samples[0]);
  return [{}, session.outputNames.map((name) => found[name])];
}

function write(header, tensors) {
  const arrays = tensors.map((one) => {
    const entry = { dtype: one.type === "string" ? "text" : one.type, shape: one.dims };
    return one.type === "string" ? { ...entry, values: one.data } : entry;
  });
  const text = Buffer.from(JSON.stringify({ ...header, arrays }));
  const length = Buffer.alloc(4);
  length.writeUInt32BE(text.length);
  const data = tensors.filter((one) => one.type !== "string");
  const parts = data.map((one) => Buffer.from(one.data.buffer, one.data.byteOffset, one.data.byteLength));
  for (const part of [length, text, ...parts]) writeAll(part);
}

function writeAll(part) {
  for (let done = 0; done < part.length; ) {
    try {
      done += writeSync(1, part, done);
    } catch (error) {
      // A pipe that is full is asked again.
      if (error.code !== "EAGAIN") process.exit(1);
    }
  }
}

// Messages come in pieces, and are answered one after the other.
const pieces = [];
let waiting = 0;
let wake = () => {};
process.stdin.on("data", (piece) => { pieces.push(piece); waiting += piece.length; wake(); });
process.stdin.on("end", () => process.exit(0));

async function exactly(count) {
  while (waiting < count) await new Promise((resolve) => { wake = resolve; });
  const all = Buffer.concat(pieces.splice(0));
  if (all.length > count) pieces.push(all.subarray(count));
  waiting -= count;
  return all.subarray(0, count);
}

async function serve() {
  for (;;) {
    const header = JSON.parse((await exactly((await exactly(4)).readUInt32BE())).toString());
    const arrays = [];
    let reply;
    try {
      for (const one of header.arrays || []) {
        const bytes = one.values ? 0 : one.shape.reduce((a, b) => a * b, 1) * (TYPES[one.dtype]?.BYTES_PER_ELEMENT ?? NaN);
        if (Number.isNaN(bytes)) throw new Error(`values of type ${one.dtype} cannot be passed to JavaScript`);
        arrays.push(tensor(one, await exactly(bytes)));
      }
      reply = await answer(header, arrays);
    } catch (error) {
      const missing = error.code === "MODULE_NOT_FOUND" && header.ask === "hello";
      const told = missing ? `npm package ${packageName} is not in reach of ${folder}; npm install ${packageName}, or name its folder: --engine ${packageName}:FOLDER` : error.message;
      reply = [{ error: told || String(error) }, []];
    }
    write(...reply);
  }
}

serve();
