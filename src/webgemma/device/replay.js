// WebGPU for browser.py: a plan crosses from Python once and is replayed by one call.
"use strict";

const BINDING_TYPES = { read: "read-only-storage", write: "storage", uniform: "uniform" };
const FEATURES = ["subgroups", "shader-f16", "timestamp-query"];
const REPORTED_ONCE = ["memory", "program"]; // with less memory or other programs, the device may work
const MATRICES = "chromium-experimental-subgroup-matrix"; // offered by Chromium with unsafe WebGPU enabled
const LIMITS = [
  "maxBufferSize",
  "maxStorageBufferBindingSize",
  "maxComputeWorkgroupStorageSize",
  "maxComputeInvocationsPerWorkgroup",
  "maxComputeWorkgroupSizeX",
];
const REUSED_STAGING_NBYTES = 1 << 16; // staging buffers up to this size are reused

class Gpu {
  constructor(adapter, device) {
    const { vendor, architecture, description, isFallbackAdapter, subgroupMinSize, subgroupMaxSize } = adapter.info;
    this.name = description || [vendor, architecture].filter(Boolean).join(" ") || "GPU";
    this.vendor = vendor;
    this.software = Boolean(isFallbackAdapter) || architecture === "swiftshader";
    this.features = FEATURES.filter((name) => device.features.has(name)).join(" ");
    this.subgroupSizes = [subgroupMinSize ?? 0, subgroupMaxSize ?? 0];
    // The shapes of products of float16 into float32, as m, n and k of one after the other.
    this.matrixShapes = device.features.has(MATRICES) ? [...adapter.info.subgroupMatrixConfigs]
      .filter(({ componentType, resultComponentType }) => componentType === "f16" && resultComponentType === "f32")
      .flatMap(({ M, N, K }) => [M, N, K].map(Number)) : [];
    this.limits = device.limits;
    this.device = device;
    this.queue = device.queue;
    this.fault = null; // the first error; after any that is not reported once, nothing works
    this.layouts = new Map();
    this.parsing = new Set(); // promises of the errors of shader modules
    this.compiling = new Set(); // promises of pipelines
    this.staging = new Map(); // reusable buffers, by size
    device.lost.then(({ message }) => this.fail("lost", message));
    // The message of a loss; after close() it never comes.
    this.lost = device.lost.then(({ message, reason }) => (reason === "destroyed" ? new Promise(() => {}) : message.trim()));
    device.addEventListener("uncapturederror", async (event) => {
      event.preventDefault();
      await this.parsed(); // a compiler's message says more than what follows from it
      this.fail("invalid", event.error.message);
    });
  }

  fail(name, message, held = 0) {
    this.fault ??= Object.assign(new Error(message.trim()), { name, held });
  }

  check() {
    const fault = this.fault;
    if (REPORTED_ONCE.includes(fault?.name)) this.fault = null;
    if (fault) throw fault;
  }

  // held: bytes of the buffers allocated before, for the error if there is no memory for this one.
  buffer(size, label, held) {
    this.check();
    const usage = GPUBufferUsage;
    const all = usage.STORAGE | usage.UNIFORM | usage.COPY_DST | usage.COPY_SRC;
    this.device.pushErrorScope("out-of-memory");
    const buffer = this.device.createBuffer({ size, label, usage: all });
    this.device.popErrorScope().then(
      (error) => error && this.fail("memory", `${size} bytes for ${label}`, held),
      () => {}, // lost
    );
    return buffer;
  }

  // Bytes of Python's memory, or a JavaScript array that never was there.
  write(buffer, offset, bytes) {
    this.check();
    if (ArrayBuffer.isView(bytes)) return this.queue.writeBuffer(buffer, offset, bytes);
    const view = bytes.getBuffer("u8");
    try {
      this.queue.writeBuffer(buffer, offset, view.data);
    } finally {
      view.release();
    }
  }

  copy(source, at, target, targetAt, nbytes) {
    this.check();
    const encoder = this.device.createCommandEncoder();
    encoder.copyBufferToBuffer(source, at, target, targetAt, nbytes);
    this.queue.submit([encoder.finish()]);
  }

  layout(kinds) {
    if (!this.layouts.has(kinds)) {
      const entries = kinds.split(" ").map((kind, binding) => ({
        binding,
        visibility: GPUShaderStage.COMPUTE,
        buffer: { type: BINDING_TYPES[kind] },
      }));
      this.layouts.set(kinds, this.device.createBindGroupLayout({ entries }));
    }
    return this.layouts.get(kinds);
  }

  module(label, code) {
    this.device.pushErrorScope("validation");
    const module = this.device.createShaderModule({ label, code });
    const parsing = this.device.popErrorScope().then(
      (error) => error && this.fail("program", error.message), // with line and column
      () => {}, // lost
    );
    this.parsing.add(parsing);
    parsing.finally(() => this.parsing.delete(parsing));
    return module;
  }

  // Resolves when every shader module is parsed and its errors are known.
  async parsed() {
    await Promise.all(this.parsing);
  }

  pipeline(label, code, kinds) {
    this.check();
    const module = this.module(label, code);
    const layout = this.device.createPipelineLayout({ bindGroupLayouts: [this.layout(kinds)] });
    const descriptor = { label, layout, compute: { module, entryPoint: "main" } };
    const pipeline = { raw: null, descriptor };
    const compiling = this.device.createComputePipelineAsync(descriptor).then(
      (raw) => { pipeline.raw ??= raw; },
      async ({ message }) => {
        await this.parsed();
        this.fail("program", message);
      },
    );
    this.compiling.add(compiling);
    compiling.finally(() => this.compiling.delete(compiling));
    return pipeline;
  }

  // Resolves when every requested pipeline is compiled; they compile side by side.
  async compiled() {
    await Promise.all(this.compiling);
    this.check();
  }

  // A pipeline that is needed now.
  raw(pipeline) {
    return (pipeline.raw ??= this.device.createComputePipeline(pipeline.descriptor));
  }

  // parts: buffer, offset and size of each binding in turn.
  bind(kinds, ...parts) {
    this.check();
    const entries = [];
    for (let i = 0; i < parts.length; i += 3) {
      const [buffer, offset, size] = parts.slice(i, i + 3);
      entries.push({ binding: i / 3, resource: { buffer, offset, size } });
    }
    return this.device.createBindGroup({ layout: this.layout(kinds), entries });
  }

  // calls: pipeline, bind group and the grid's x, y, z of each dispatch in turn. Returns {bytes}, a promise of the
  // bytes that are read, if any: Pyodide would make a future of a promise itself, and report it as an error if
  // nobody awaits it, as after a reply that was stopped.
  run(calls, buffer, offset, nbytes) {
    this.check();
    const encoder = this.device.createCommandEncoder();
    if (calls.length) {
      const pass = encoder.beginComputePass();
      for (let i = 0; i < calls.length; i += 5) {
        pass.setPipeline(calls[i].raw ?? this.raw(calls[i]));
        pass.setBindGroup(0, calls[i + 1]);
        pass.dispatchWorkgroups(calls[i + 2], calls[i + 3], calls[i + 4]);
      }
      pass.end();
    }
    if (!nbytes) {
      this.queue.submit([encoder.finish()]);
      return undefined;
    }
    const staging = this.take(nbytes);
    encoder.copyBufferToBuffer(buffer, offset, staging, 0, nbytes);
    this.queue.submit([encoder.finish()]);
    const bytes = this.fetch(staging, nbytes);
    bytes.catch(() => {}); // reported to the reader of the bytes, if there is one
    return { bytes };
  }

  take(nbytes) {
    const usage = GPUBufferUsage.COPY_DST | GPUBufferUsage.MAP_READ;
    return this.staging.get(nbytes)?.pop() ?? this.device.createBuffer({ size: nbytes, usage });
  }

  async fetch(staging, nbytes) {
    try {
      await staging.mapAsync(GPUMapMode.READ);
    } catch (error) {
      await new Promise((done) => setTimeout(done)); // the reason comes as a separate event
      await this.parsed();
      throw this.fault ?? error;
    }
    const bytes = new Uint8Array(staging.getMappedRange()).slice();
    staging.unmap();
    if (nbytes > REUSED_STAGING_NBYTES) {
      staging.destroy();
    } else if (this.staging.has(nbytes)) {
      this.staging.get(nbytes).push(staging);
    } else {
      this.staging.set(nbytes, [staging]);
    }
    return bytes;
  }

  close() {
    this.device.destroy();
  }
}

// Opens the browser's GPU with all its limits, and its matrix units if wanted; undefined if there is none.
const openGpu = async (withMatrices = false) => {
  const adapter = await globalThis.navigator?.gpu?.requestAdapter({
    powerPreference: "high-performance",
  });
  if (!adapter) return undefined;
  const device = await adapter.requestDevice({
    requiredFeatures: [...FEATURES, ...(withMatrices ? [MATRICES] : [])].filter((name) => adapter.features.has(name)),
    requiredLimits: Object.fromEntries(LIMITS.map((name) => [name, adapter.limits[name]])),
  });
  return new Gpu(adapter, device);
};

globalThis.openWebgemmaGpu = openGpu;
