// WebGPU as browser.py drives it: a plan crosses once and is replayed by one call.
"use strict";

const BINDING_TYPES = { read: "read-only-storage", write: "storage", uniform: "uniform" };
const FEATURES = ["subgroups", "shader-f16", "timestamp-query"];
const LIMITS = [
  "maxBufferSize",
  "maxStorageBufferBindingSize",
  "maxComputeWorkgroupStorageSize",
  "maxComputeInvocationsPerWorkgroup",
  "maxComputeWorkgroupSizeX",
];
const KEPT_STAGING_NBYTES = 1 << 16; // smaller ones serve again

class Gpu {
  constructor(adapter, device) {
    const { vendor, architecture, description, isFallbackAdapter } = adapter.info;
    this.name = description || [vendor, architecture].filter(Boolean).join(" ") || "GPU";
    this.vendor = vendor;
    this.software = Boolean(isFallbackAdapter) || architecture === "swiftshader";
    this.features = FEATURES.filter((name) => device.features.has(name)).join(" ");
    this.limits = device.limits;
    this.device = device;
    this.queue = device.queue;
    this.fault = null; // the first thing that went wrong; but for memory, nothing works after it
    this.layouts = new Map();
    this.compiling = new Set(); // promises
    this.staging = new Map(); // by size
    device.lost.then(({ message }) => this.fail("lost", message));
    device.addEventListener("uncapturederror", (event) => {
      event.preventDefault();
      this.fail("invalid", event.error.message);
    });
  }

  fail(name, message, held = 0) {
    this.fault ??= Object.assign(new Error(message.trim()), { name, held });
  }

  check() {
    const fault = this.fault;
    if (fault?.name === "memory") this.fault = null; // told once: with less, it may work
    if (fault) throw fault;
  }

  // held: bytes of the buffers made before, for the sentence if there is no memory for this one.
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

  // Bytes of Python's, or an array of JavaScript's that never was in Python's memory.
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

  copy(source, target, nbytes) {
    this.check();
    const encoder = this.device.createCommandEncoder();
    encoder.copyBufferToBuffer(source, 0, target, 0, nbytes);
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

  pipeline(label, code, kinds) {
    this.check();
    const module = this.device.createShaderModule({ label, code });
    const layout = this.device.createPipelineLayout({ bindGroupLayouts: [this.layout(kinds)] });
    const descriptor = { label, layout, compute: { module, entryPoint: "main" } };
    const pipeline = { raw: null, descriptor };
    const compiling = this.device.createComputePipelineAsync(descriptor).then(
      (raw) => { pipeline.raw ??= raw; },
      ({ message }) => this.fail("invalid", message),
    );
    this.compiling.add(compiling);
    compiling.finally(() => this.compiling.delete(compiling));
    return pipeline;
  }

  // Resolves when every pipeline asked for is compiled; they compile side by side.
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

  // calls: pipeline, bind group and the grid's x, y, z of each dispatch in turn. Gives what it reads.
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
    bytes.catch(() => {}); // who asks for them is told; perhaps nobody does
    return bytes;
  }

  take(nbytes) {
    const usage = GPUBufferUsage.COPY_DST | GPUBufferUsage.MAP_READ;
    return this.staging.get(nbytes)?.pop() ?? this.device.createBuffer({ size: nbytes, usage });
  }

  async fetch(staging, nbytes) {
    try {
      await staging.mapAsync(GPUMapMode.READ);
    } catch (error) {
      await new Promise((done) => setTimeout(done)); // the reason comes as an event of its own
      throw this.fault ?? error;
    }
    const bytes = new Uint8Array(staging.getMappedRange()).slice();
    staging.unmap();
    if (nbytes > KEPT_STAGING_NBYTES) {
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

// The browser's GPU with all the limits it has, or undefined.
const openGpu = async () => {
  const adapter = await globalThis.navigator?.gpu?.requestAdapter({
    powerPreference: "high-performance",
  });
  if (!adapter) return undefined;
  const device = await adapter.requestDevice({
    requiredFeatures: FEATURES.filter((name) => adapter.features.has(name)),
    requiredLimits: Object.fromEntries(LIMITS.map((name) => [name, adapter.limits[name]])),
  });
  return new Gpu(adapter, device);
};

globalThis.openWebgemmaGpu = openGpu;
