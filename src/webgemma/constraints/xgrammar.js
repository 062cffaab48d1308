// Grammars for xgrammar.py: web-xgrammar, a library in WebAssembly, compiles and matches them.
"use strict";

(() => {
  // Masks are computed in the memory of the library, which it does not share. Without it they are copied
  // number by number.
  let memory = null;
  let loading = null; // a promise: two calls at once would create the library twice, and mix the two

  /**
   * Load the library, unless a page has done so, and keep the memory that its first call creates. A page says where it
   * is by the global `webgemmaXgrammarUrl`.
   */
  async function load(address = globalThis.webgemmaXgrammarUrl) {
    if (!globalThis.xgrammar) {
      if (!address) throw new Error("webgemmaXgrammarUrl is not set");
      await import(globalThis.location ? new URL(address, location).href : address);
    }
    const { instantiate } = WebAssembly;
    const instances = [];
    WebAssembly.instantiate = async (...given) => {
      const result = await instantiate.apply(WebAssembly, given);
      instances.push(result.instance ?? result);
      return result;
    };
    try {
      (await globalThis.xgrammar.TokenizerInfo.createTokenizerInfo([])).dispose();
    } finally {
      WebAssembly.instantiate = instantiate;
    }
    for (const { exports } of instances) {
      memory ??= Object.values(exports).find((each) => each instanceof WebAssembly.Memory) ?? null;
    }
  }

  // Objects of the library are freed when those of this file are not used any more.
  const registry = new FinalizationRegistry((handle) => handle.delete());

  function owned(owner, handle) {
    registry.register(owner, handle);
    return handle;
  }

  class Compiled {
    constructor(handle) {
      this.handle = owned(this, handle);
    }
  }

  /** A vocabulary; special tokens have spellings that no text has. */
  class Vocabulary {
    constructor(info, compiler, size) {
      this.size = size;
      this.compiler = compiler;
      owned(this, compiler.handle);
      owned(this, info.handle);
    }

    async compile(ebnf) {
      const grammar = await globalThis.xgrammar.Grammar.fromEBNF(ebnf);
      try {
        const compiled = await this.compiler.compileGrammar(grammar);
        const matcher = await globalThis.xgrammar.GrammarMatcher.createGrammarMatcher(compiled);
        return new Matcher(this, new Compiled(compiled.handle), matcher.handle);
      } finally {
        grammar.dispose();
      }
    }
  }

  /** What a grammar allows after some tokens. */
  class Matcher {
    constructor(vocabulary, compiled, handle) {
      this.vocabulary = vocabulary;
      this.compiled = compiled;
      this.handle = owned(this, handle);
      this.accepted = [];
    }

    /** Return the mask of the tokens that may come next, as bytes. */
    mask() {
      const words = this.handle.GetNextTokenBitmask(this.vocabulary.size);
      try {
        const count = words.size();
        if (memory) {
          // A std::vector begins with the address of its first number.
          const [begin] = new Uint32Array(memory.buffer, words.$$.ptr, 1);
          return new Uint8Array(memory.buffer.slice(begin, begin + 4 * count));
        }
        return new Uint8Array(Int32Array.from({ length: count }, (_, at) => words.get(at)).buffer);
      } finally {
        words.delete();
      }
    }

    accept(token) {
      if (!this.handle.AcceptToken(token, false)) return false;
      this.accepted.push(token);
      return true;
    }

    rollback(count) {
      this.handle.Rollback(count);
      this.accepted.length -= count;
    }

    /** Return the text that must come next. */
    forced() {
      return this.handle.FindJumpForwardString();
    }

    copy() {
      const handle = new this.handle.constructor(this.compiled.handle, undefined, false, -1);
      const copied = new Matcher(this.vocabulary, this.compiled, handle);
      for (const token of this.accepted) copied.accept(token);
      return copied;
    }
  }

  /** Return the vocabulary of `size` tokens: the text of each, and the ids that end a reply, as JSON. */
  globalThis.openWebgemmaXgrammar = async (address, tokens, size, ends) => {
    loading ??= load(address ?? undefined);
    await loading.catch((error) => {
      loading = null;
      throw error;
    });
    const { TokenizerInfo, GrammarCompiler } = globalThis.xgrammar;
    const info = await TokenizerInfo.createTokenizerInfo(JSON.parse(tokens), "byte_fallback", false, size, JSON.parse(ends));
    return new Vocabulary(info, await GrammarCompiler.createGrammarCompiler(info, false), size);
  };
})();
